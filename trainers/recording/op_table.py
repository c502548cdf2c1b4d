"""Every operator that may occur on a tape, classified by what its CUDA kernel allocates.

``SAME``: nothing but what the tape has. ``KNOWN_SMALL`` and ``UNMODELLED``: workspaces that tapes leave out. Operators
whose workspace is on tapes are in `trainers.recording.cuda_ops`. A test fails on an operator that is in none of them.
"""

from __future__ import annotations

import torch

from trainers.recording.cuda_ops import WORKSPACES


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in names.split())


VIEWS = _aten(
    "alias _conj detach diagonal expand lift_fresh permute select slice split split_with_sizes squeeze t transpose "
    "unbind _unsafe_view unsqueeze view view_as_complex view_as_real"
)
"""Take no memory: the output shares its input's storage on every device. A conjugate is a bit on the tensor; the next
operator resolves it with a copy, which is on the tape (ATen/ConjugateFallback.cpp, for every device)."""

CREATED = _aten(
    "arange empty empty_like eye full full_like linspace new_empty new_empty_strided new_full new_ones new_zeros ones "
    "ones_like rand randint randn randn_like scalar_tensor zeros zeros_like"
)
"""Allocate their output and nothing else. Random numbers come from a Philox counter that is passed by value
(aten/src/ATen/cuda/CUDAGeneratorImpl.h)."""

POINTWISE = _aten(
    "abs add add_ addcdiv_ addcmul addcmul_ bitwise_and bitwise_not clamp clamp_ clamp_min clone copy_ cos div div_ "
    "eq exp fill_ floor floor_divide ge gelu gelu_backward gt le leaky_relu leaky_relu_backward lerp lerp_ log "
    "logical_not lt ne masked_fill masked_fill_ maximum minimum mse_loss_backward mul mul_ native_dropout "
    "native_dropout_backward neg normal_ polar pow reciprocal relu remainder round rsqrt rsqrt_ rsub sigmoid "
    "sigmoid_backward silu silu_backward sin _softmax sqrt sub sub_ tanh tanh_backward threshold_backward _to_copy "
    "where"
)
"""One TensorIterator loop, which casts and broadcasts while it reads (aten/src/ATen/native/cuda/Loops.cuh); dropout
and its mask are one kernel too (native/cuda/Dropout.cu). A copy needs a buffer only between devices (Copy.cu,
copy_requires_temporaries), and a step has no such copies."""

MOVES = _aten(
    "avg_pool2d avg_pool3d cat constant_pad_nd cumprod cumsum diag_embed embedding gather index index_add index_copy "
    "index_fill index_select pixel_shuffle pixel_unshuffle reflection_pad3d repeat replication_pad1d "
    "replication_pad1d_backward replication_pad3d scatter scatter_reduce_ select_backward slice_backward stack tril "
    "triu upsample_nearest2d_backward"
)
"""Write their output once. cat passes addresses as kernel arguments (Shape.cu, CatArrayBatchedCopy). index is called
with a few integers or the row indices of a mixture of experts, never with a mask. The backwards of select and slice
fill zeros and copy into them. scatter copies its input and writes into the copy. cumprod runs over a schedule of 1000
numbers. The index_* operators access rows by index (native/cuda/Indexing.cu, IndexKernel.cu). Padding, pooling and
embedding compute each output from few inputs. Pixel shuffling is one copy between two views (native/PixelShuffle.cpp,
math_pixel_shuffle)."""

MATMULS = _aten("addmm bmm mm")
"""cuBLAS's workspace is one permanent buffer per handle, see `planner.layout.cublas.cublas_workspace`. cuBLASLt,
which adds the bias in ``addmm``, shares it in current torch (CublasHandlePool.cpp, unified_cublas_and_lt_workspaces);
in older versions it took 1 MiB per call (CUDABlas.cpp, gemm_and_bias)."""

OPTIMIZERS = _aten(
    "_foreach_add_ _foreach_addcdiv_ _foreach_addcmul_ _foreach_div_ _foreach_lerp_ _foreach_mul_ _foreach_sqrt "
    "_fused_adamw_"
) | {"bitsandbytes.optimizer_update_32bit", "bitsandbytes.optimizer_update_8bit_blockwise"}
"""Tensor lists are passed as kernel arguments (ForeachFunctors.cuh, MultiTensorApply.cuh). All but sqrt work in place,
and the outputs of sqrt are on the tape. CUDA falls back to one call per tensor in the same cases as the CPU
(ForeachUtils.h, can_use_fast_route: same dtypes, shapes and strides). bitsandbytes' kernels work in place
(csrc/kernels.cu)."""

QUANTISERS = frozenset(
    f"bitsandbytes.{way}_{kind}" for way in ("quantize", "dequantize") for kind in ("4bit", "blockwise")
)
"""Allocate their outputs and nothing else (bitsandbytes/backends/cuda/ops.py)."""

HOST = _aten("_local_scalar_dense") | {"profiler._record_function_enter_new", "profiler._record_function_exit"}
"""Allocate nothing on the device."""

SAME = VIEWS | CREATED | POINTWISE | MOVES | MATMULS | OPTIMIZERS | QUANTISERS | HOST
"""Operators whose CUDA kernel allocates what the tape has and nothing else; the reason is given with each group. The
statements about reductions, norms, attention and convolution in the two tables below were checked line by line in
torch's source."""

_REDUCTION = (
    "when few outputs are reduced over many inputs, blocks exchange partial results in a buffer of a few numbers per "
    "block and output (native/cuda/Reduce.cuh, global_memory_size): up to 140 MiB where a bias's gradient is summed "
    "over the tokens. Its size depends on the card, so it is not on tapes; `planner.layout.gradient_sums` and "
    "`.optimizer.reduction_workspace` add it"
)
KNOWN_SMALL = {
    "aten.all": _REDUCTION,
    "aten.sum": _REDUCTION,
    "aten.mean": _REDUCTION,
    "aten.std": _REDUCTION,
    "aten.argmax": _REDUCTION,
    "aten.argmin": _REDUCTION,
    "aten.any": _REDUCTION,
    "aten.dot": "one number, reduced in the workspace of cuBLAS (native/cuda/Blas.cpp, dot)",
    "aten.max": _REDUCTION,
    "aten.amax": _REDUCTION,
    "aten.amin": _REDUCTION,
    "aten.linalg_vector_norm": _REDUCTION,
    "aten.mse_loss": "the squared errors before their mean, as large as the prediction in fp32 (native/Loss.cpp, "
    "mse_loss_out): 8 MiB for 81 frames of 480x832 in Wan's latents",
    "aten._foreach_norm": "one fp32 per tensor and chunk of 65,536 numbers of the largest tensor (native/cuda/"
    "ForeachReduceOp.cu, output_per_tensor): 5 MiB in full training of a 14B model",
    "aten.sort": "keys and places once more while they are sorted (native/cuda/Sort.cpp); text tokens, or a number for "
    "each expert of a token: KiB",
    "aten.nonzero": "cub's temporary storage and a count, for a mask of text tokens (native/cuda/Nonzero.cu): some KiB",
    "aten.embedding_dense_backward": "sorted row numbers above 3072 text tokens (native/cuda/Embedding.cu): some KiB",
    "aten.index_put": "sorted row numbers, and copies of gradient and output in the order of the rows (native/cuda/"
    "Indexing.cu, index_put_with_sort_kernel); text tokens, or the rows of a mixture's experts: some MiB",
    "aten.repeat_interleave": "the sums of how often each is repeated, as whole numbers (native/cuda/Repeat.cu, "
    "cumsum in native/Repeat.cpp); places of text and image: some KiB",
    "aten.topk": "nothing for slices of four numbers, each gathered by one block (native/cuda/TensorTopK.cu, sbtopk)",
    "aten.index_put_": "the index once more, as numbers of its own (native/TensorAdvancedIndexing.cpp, make_info); "
    "positions of a rotary embedding, and the rows of a mixture's experts: some KiB",
    "aten.native_layer_norm": "mean and rstd are fp32 on CUDA and of the input's dtype on CPU (layer_norm_kernel.cu): "
    "4 bytes a row more without autocast, which makes its input fp32; `planner.layout.recorded_run` makes them so",
    "aten.native_layer_norm_backward": "a trained weight and bias over many rows are summed in two passes through "
    "at most 2**20 numbers each (layer_norm_kernel.cu, dgamma_blocks): 8 MiB; likewise the fused RMSNorm's weight",
    "aten.native_group_norm": "scale and shift in fp32 per sample and channel (group_norm_kernel.cu): 20 KiB a sample",
    "aten.native_group_norm_backward": "sums in fp32 per sample and channel (group_norm_kernel.cu): 40 KiB a sample",
    "aten.linalg_qr": "cuSOLVER's scratch for a matrix of 512 x 20 (native/cuda/linalg/BatchLinearAlgebra.cpp): KiB",
    "aten.linalg_solve_triangular": "a copy of a matrix of 20 x 20 (native/BatchLinearAlgebra.cpp): KiB",
    "aten._safe_softmax": "which scores are blocked, a byte each, and the softmax before those rows are cleared ("
    "native/transformers/attention.cpp); of attention without an axis of heads, as in HunyuanImage 2.1's VAE: 80 MiB "
    "for 2048x2048, far from its peak; and in fp32 of fewer heads of keys than of queries",
    "aten._scaled_dot_product_flash_attention": "where queries are too few to fill the card, keys are split and the "
    "parts' outputs kept in fp32 (flash_api.cpp, num_splits_heuristic, out_accum): some MiB, never for a long clip",
}
"""Operators that take a little more memory inside on CUDA -> how much, and why tapes leave it out."""

_CUDNN = (
    "cuDNN picks an algorithm at run time and takes its workspace inside the call (native/cudnn/Conv_v8.cpp). A patch "
    "embedding is one convolution outside the blocks, far from the peak; for a UNet it is the largest effect that is "
    "not modelled: up to copies of input and output in the layout the kernel wants"
)
UNMODELLED = {"aten.convolution": _CUDNN, "aten.convolution_backward": _CUDNN}
"""Operators whose workspace is not known without a GPU and must be measured."""

COPYING = _aten(
    "convolution native_layer_norm native_layer_norm_backward upsample_nearest2d _upsample_nearest_exact2d "
    "upsample_nearest3d"
)
"""Copy an input that is not contiguous, and free the copy at the end (``contiguous()`` in native/Convolution.cpp,
native/cuda/layer_norm_kernel.cu and UpSampleNearest2d.cu): 1.5 GiB when CogVideoX-2B's VAE decodes 9 frames of 480x720,
and 63 MiB in its transformer's blocks, which normalise queries and keys per head."""


COPYING_BEHIND_OUTPUTS = _aten("upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d")
"""Those of `COPYING` that copy after their outputs are allocated (``TORCH_IMPL_FUNC`` in UpSampleNearest2d.cu and
UpSampleNearest3d.cu). The order decides which free block each allocation gets: Wan's decode of five chunks at 480x832
reserved 5134 MiB on a virtual H200 with expandable segments, and a replay in the other order 5434 MiB."""


def is_copied(name: str, tensor: torch.Tensor) -> bool:
    """Whether one of `COPYING` copies an input: norms need a contiguous one, the others accept channels last as well
    (``suggest_memory_format`` in the same files)."""
    if name not in COPYING:
        return False
    wanted = torch.contiguous_format if "layer_norm" in name else torch._prims_common.suggest_memory_format(tensor)
    return not tensor.is_contiguous(memory_format=wanted)


CLASSIFIED = SAME | KNOWN_SMALL.keys() | UNMODELLED.keys() | WORKSPACES.keys() | COPYING
"""Every operator that may occur on a tape."""
