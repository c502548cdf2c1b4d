"""Where CUDA differs from what fake CPU tensors do: tables, and switches that make the recorder behave like CUDA.

Three kinds of difference:

* **Dispatch**: operators whose CUDA path is another operator: autocast's op lists, attention, dropout, RMSNorm.
  ``cuda_semantics`` installs CUDA's behaviour on the CPU dispatch keys while a recording runs.
* **Workspace**: memory a CUDA kernel takes and gives back inside one operator (``workspaces``).
* **Same**: everything else. ``SAME`` lists the operators somebody looked at, ``KNOWN_SMALL`` and ``UNMODELLED`` those
  that take something inside that no tape holds; a test fails on an operator that is in no table.
"""

from __future__ import annotations

import contextlib
import math
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainers import fakes

Workspace = tuple[str, tuple[int, ...]]
"""(attention kernel or "any", dimensions whose product is the size in bytes)."""


# --- Dispatch ------------------------------------------------------------------------------------------------------


def autocast_lists() -> dict[str, set[str]]:
    """CUDA autocast's operator lists, read from the header the installed torch ships (ATen/autocast_mode.h).

    Keys: ``lower`` (cast to the autocast dtype), ``fp32``, ``fp32_dtype`` (output dtype set to fp32), ``promote``
    (widest input dtype wins). Values: operator names with overload, as ``layer_norm`` or ``pow.Tensor_Scalar``.
    """
    text = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    macros = {
        "lower": "AT_FORALL_LOWER_PRECISION_FP",
        "fp32": "AT_FORALL_FP32",
        "fp32_dtype": "AT_FORALL_FP32_SET_OPT_DTYPE",
        "promote": "AT_FORALL_PROMOTE",
    }
    lists = {}
    for key, macro in macros.items():
        found = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*)", text)
        assert found, f"torch {torch.__version__}: {macro} not found in autocast_mode.h"
        entries = re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", found[1])
        lists[key] = {f"{name}.{overload}" if overload else name for name, overload in entries}
    return lists


def _without_autocast(op: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    with torch._C._ExcludeDispatchKeyGuard(keys):
        return op(*args, **kwargs)


def _eligible(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_cast(item, dtype) for item in value)
    return value.to(dtype) if _eligible(value) else value


def _widest(values: Any, dtype: torch.dtype) -> torch.dtype:
    for value in values:
        if isinstance(value, list | tuple):
            dtype = _widest(value, dtype)
        elif _eligible(value) and value.dtype == torch.float32:
            dtype = torch.float32
    return dtype


def _autocast_kernel(op: Any, kind: str) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        if kind == "fp32":
            args = _cast(args, torch.float32)
        elif kind == "promote":
            args = _cast(args, _widest(args, torch.get_autocast_dtype("cpu")))
        elif kind == "lower":
            args = _cast(args, torch.get_autocast_dtype("cpu"))
        elif _eligible(args[0]) and kwargs.get("dtype") is None:
            kwargs = {**kwargs, "dtype": torch.float32}
        return _without_autocast(op, args, kwargs)

    return kernel


def install_autocast(library: torch.library.Library) -> None:
    """CUDA's autocast on the CPU key.

    The lower-precision list keeps torch's own kernel: it owns the weight-cast cache.
    """
    lists = autocast_lists()
    cpu = {name.removeprefix("aten::") for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")}
    listed = set.union(*lists.values())
    for name in sorted(cpu - listed):
        library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU")
    for kind in ("fp32", "fp32_dtype", "promote", "lower"):
        for name in sorted(lists[kind]):
            packet, _, overload = name.partition(".")
            if (kind == "lower" and name in cpu) or not hasattr(torch.ops.aten, packet):
                continue
            op = getattr(torch.ops.aten, packet)
            if (overload or "default") not in op.overloads():
                continue
            library.impl(name, _autocast_kernel(getattr(op, overload or "default"), kind), "AutocastCPU")


MASK_ALIGNMENT = 8
"""Elements that rows of a mask are padded to (mem_eff_alignment in ATen/native/transformers/attention.cpp)."""


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``scaled_dot_product_attention`` as CUDA runs it: flash without a mask, memory-efficient with one or in fp32.

    Shapes (B, heads, S, head size). Both save q, k, v, the output and a logsumexp in fp32. cuDNN attention saves the
    same (ATen/native/transformers/cuda/sdp_utils.cpp, attention.cu). Masks whose rows are not a multiple of 8
    elements are copied into padded rows first (ATen/native/transformers/attention.cpp, pad_bias), and the copy is what
    is saved: at most B * S * 16 bytes for masks of one row, left out; as large as the mask for one of S rows.
    """
    half = query.dtype in (torch.float16, torch.bfloat16)
    if attn_mask is None and half and query.shape[-1] <= 256:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            blocked = torch.full((), -math.inf, dtype=query.dtype, device=query.device)
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), blocked)
        length = key.shape[2]
        if attn_mask.shape[-2] > 1 and length % MASK_ALIGNMENT:
            attn_mask = torch.constant_pad_nd(attn_mask, [0, -length % MASK_ALIGNMENT])[..., :length]
        attn_mask = attn_mask.expand(*query.shape[:3], length)
    saves_logsumexp = query.requires_grad or key.requires_grad or value.requires_grad
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    found = efficient(query, key, value, attn_mask, saves_logsumexp, dropout_p, is_causal, scale=scale)
    return found[0]  # type: ignore[no-any-return]


class FusedRmsNorm(torch.autograd.Function):
    """``aten::_fused_rms_norm`` of CUDA (torch >= 2.9): saves the input, the weight and one fp32 rstd per row."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor | None) -> Tensor:
        out = torch.empty_like(value)
        rstd = value.new_empty((*value.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(value, weight, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        value, weight, _ = ctx.saved_tensors
        grad_value = torch.empty_like(value) if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(weight) if weight is not None and ctx.needs_input_grad[1] else None
        return grad_value, grad_weight


def rms_norm(value: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """``aten::rms_norm`` as CUDA dispatches it: fused when input and weight share a dtype, else the composite."""
    if weight is None or weight.dtype == value.dtype:
        return FusedRmsNorm.apply(value, weight)  # type: ignore[no-any-return]
    upcast = value.float()
    normed = upcast * torch.rsqrt(upcast.pow(2).mean(-1, keepdim=True) + (eps or torch.finfo(value.dtype).eps))
    return (normed * weight).to(value.dtype)


@contextlib.contextmanager
def cuda_semantics(fused_rms_norm: bool = True) -> Iterator[None]:
    """While open, CPU tensors take CUDA's path through autocast, attention, dropout and RMSNorm.

    ``fused_rms_norm=False`` records what torch before 2.9 did, which had no fused kernel.
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns of every kernel we replace
        install_autocast(library)
        library.impl("scaled_dot_product_attention", attention, "AutogradCPU")
        library.impl("dropout", fakes.dropout, "AutogradCPU")
        if fused_rms_norm:
            library.impl("rms_norm", rms_norm, "AutogradCPU")
    try:
        with fakes.converted_in_place(), fakes.autocast_asked_of_cpu():
            yield
    finally:
        library._destroy()


# --- Workspace -----------------------------------------------------------------------------------------------------


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def flash_backward(args: tuple[Any, ...]) -> list[Workspace]:
    """FlashAttention-2 backward: fp32 dq accumulator and row sums, on query rows rounded up to 128.

    flash-attention csrc/flash_attn/flash_api.cpp, mha_bwd: dq_accum (B, S, heads, D rounded to 32), softmax_d (B,
    heads, S).
    """
    query = args[1]
    batch, heads, rows, size = query.shape
    return [
        ("flash", (4, batch, heads, Rounded(rows, 128))),
        ("flash", (4, batch, heads, Rounded(rows, 128), _round_up(size, 32))),
    ]


def efficient_backward(args: tuple[Any, ...]) -> list[Workspace]:
    """Memory-efficient attention backward: fp32 delta and fp32 accumulators for dq when inputs are not fp32.

    ATen/native/transformers/cuda/mem_eff_attention/kernel_backward.h, workspace_size.
    """
    query = args[1]
    batch, heads, rows, size = query.shape
    found: list[Workspace] = [("any", (4, batch, heads, rows))]
    if query.dtype != torch.float32:
        found.append(("any", (4, batch, heads, rows, _round_up(size, 32))))
    return found


def gemm_4bit(args: tuple[Any, ...]) -> list[Workspace]:
    """bitsandbytes' 4-bit matrix product: above 1536 rows it is a copy of the weight in the input's dtype and a plain
    product, and before that, under double quantisation, the blocks' constants in fp32, without and with their mean.

    bitsandbytes/backends/cuda/ops.py, _dequant_linear_fallback. With fewer rows a fused kernel may do without, which
    concerns short prompts and time embeddings only.
    """
    rows, columns = args[2]
    copy: Workspace = ("any", (args[0].element_size(), rows, columns))
    constants: Workspace = ("any", (4, *args[3].shape))
    if len(args) > 7 and args[7] is not None:
        constants = ("any", (4, *args[7].shape))
        return [constants, constants, copy]
    return [copy]


class Rounded(int):
    """A dimension rounded up: remembers the exact one and the multiple, so that a tape can keep it symbolic."""

    exact: int
    multiple: int

    def __new__(cls, exact: int, multiple: int) -> Rounded:
        rounded = super().__new__(cls, _round_up(exact, multiple))
        rounded.exact, rounded.multiple = exact, multiple
        return rounded


WORKSPACES: dict[str, Callable[[tuple[Any, ...]], list[Workspace]]] = {
    "aten._scaled_dot_product_flash_attention_backward": flash_backward,
    "aten._scaled_dot_product_efficient_attention_backward": efficient_backward,
    "bitsandbytes.gemm_4bit": gemm_4bit,
}


def workspaces(op: str, args: tuple[Any, ...]) -> list[Workspace]:
    """What a CUDA kernel allocates inside ``op`` (name without overload) and frees before it returns."""
    entry = WORKSPACES.get(op)
    return entry(args) if entry else []


def rounded_output(op: str, position: int, shape: tuple[int, ...], args: tuple[Any, ...]) -> Rounded | None:
    """The dimension of an output that a kernel rounds up, so that it no longer shows the shape's atoms.

    Memory-efficient attention pads its logsumexp to 32 rows (kAlignLSE, mem_eff_attention/kernel_forward.h), and the
    rows of its mask to 8 elements.
    """
    if op == "aten._scaled_dot_product_efficient_attention" and position == 1 and shape[-1]:
        return Rounded(args[0].shape[2], 32)
    if op == "aten.constant_pad_nd" and args[1] == [0, -args[0].shape[-1] % MASK_ALIGNMENT]:  # ``attention`` above
        return Rounded(args[0].shape[-1], MASK_ALIGNMENT)
    return None


# --- The rest ------------------------------------------------------------------------------------------------------


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in names.split())


VIEWS = _aten(
    "alias _conj detach diagonal expand lift_fresh permute select slice split split_with_sizes squeeze t transpose "
    "unbind _unsafe_view unsqueeze view view_as_complex view_as_real"
)
"""Take no memory: the output shares its input's storage on every device. A conjugate is a bit that the operator behind
it resolves by a copy, which is on the tape (ATen/ConjugateFallback.cpp, no device has its own)."""

CREATED = _aten(
    "arange empty empty_like full full_like linspace new_empty new_empty_strided new_full new_ones new_zeros ones "
    "ones_like randint randn randn_like scalar_tensor zeros zeros_like"
)
"""Take their output and nothing else. Random numbers come from a Philox counter that is passed by value
(aten/src/ATen/cuda/CUDAGeneratorImpl.h)."""

POINTWISE = _aten(
    "abs add add_ addcdiv_ addcmul_ bitwise_and bitwise_not clamp clamp_ clamp_min clone copy_ cos div div_ eq exp "
    "fill_ ge gelu gelu_backward gt le leaky_relu leaky_relu_backward lerp lerp_ log logical_not lt ne masked_fill "
    "masked_fill_ maximum minimum mse_loss_backward mul mul_ native_dropout native_dropout_backward neg normal_ polar "
    "pow reciprocal round rsqrt rsqrt_ rsub sigmoid sigmoid_backward silu silu_backward sin _softmax sqrt sub sub_ "
    "tanh tanh_backward _to_copy where"
)
"""One TensorIterator loop, which casts and broadcasts while it reads (aten/src/ATen/native/cuda/Loops.cuh); dropout
and its mask are one kernel too (native/cuda/Dropout.cu). A copy needs a buffer only between devices (Copy.cu,
copy_requires_temporaries), and a step has none."""

MOVES = _aten(
    "avg_pool2d cat constant_pad_nd cumprod cumsum diag_embed embedding gather index reflection_pad3d repeat "
    "replication_pad1d replication_pad1d_backward replication_pad3d select_backward slice_backward stack triu "
    "upsample_nearest2d upsample_nearest2d_backward upsample_nearest3d _upsample_nearest_exact2d"
)
"""Write their output once. cat passes addresses as kernel arguments (Shape.cu, CatArrayBatchedCopy); index is with a
few integers here, never a mask; the backwards of select and slice are zeros and a copy into them; cumprod runs over a
schedule of 1000 numbers; padding, pooling, upsampling and embedding compute each output from few inputs."""

MATMULS = _aten("addmm bmm mm")
"""cuBLAS's workspace is one buffer per handle that stays, in ``planner.strategies.cublas_workspace``. cuBLASLt, which
adds the bias in ``addmm``, shares it in today's torch (CublasHandlePool.cpp, unified_cublas_and_lt_workspaces); in
older ones it took 1 MiB per call (CUDABlas.cpp, gemm_and_bias)."""

OPTIMIZERS = _aten(
    "_foreach_add_ _foreach_addcdiv_ _foreach_addcmul_ _foreach_div_ _foreach_lerp_ _foreach_mul_ _foreach_sqrt "
    "_fused_adamw_"
) | {"bitsandbytes.optimizer_update_32bit", "bitsandbytes.optimizer_update_8bit_blockwise"}
"""Tensor lists travel as kernel arguments (ForeachFunctors.cuh, MultiTensorApply.cuh), and all but sqrt work in place;
its outputs are on the tape. CUDA falls back to one call per tensor where CPU does (ForeachUtils.h, can_use_fast_route:
same dtypes, shapes and strides). bitsandbytes' kernels work in place (csrc/kernels.cu)."""

QUANTISERS = frozenset(
    f"bitsandbytes.{way}_{kind}" for way in ("quantize", "dequantize") for kind in ("4bit", "blockwise")
)
"""Their outputs and no more (bitsandbytes/backends/cuda/ops.py)."""

HOST = _aten("_local_scalar_dense") | {"profiler._record_function_enter_new", "profiler._record_function_exit"}
"""Nothing on the device."""

SAME = VIEWS | CREATED | POINTWISE | MOVES | MATMULS | OPTIMIZERS | QUANTISERS | HOST
"""Operators whose CUDA kernel allocates what the tape says and no more, by their kind as each group says. What was read
line by line in torch's source is what the two tables below say of reductions, norms, attention and convolution."""

_REDUCTION = (
    "when few outputs are reduced over many inputs, blocks meet in a buffer of a few numbers per block and output "
    "(native/cuda/Reduce.cuh, global_memory_size): under 1 MiB"
)
KNOWN_SMALL = {
    "aten.all": _REDUCTION,
    "aten.sum": _REDUCTION,
    "aten.mean": _REDUCTION,
    "aten.argmax": _REDUCTION,
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
    "aten.sort": "keys and places once more while they are sorted (native/cuda/Sort.cpp); text tokens only: KiB",
    "aten.nonzero": "cub's temporary storage and a count, for a mask of text tokens (native/cuda/Nonzero.cu): some KiB",
    "aten.embedding_dense_backward": "sorted row numbers above 3072 text tokens (native/cuda/Embedding.cu): some KiB",
    "aten.index_put": "sorted row numbers, and copies of gradient and output in the order of the rows (native/cuda/"
    "Indexing.cu, index_put_with_sort_kernel); text tokens only: some MiB",
    "aten.native_layer_norm": "mean and rstd are fp32 on CUDA and of the input's dtype on CPU (layer_norm_kernel.cu): "
    "4 bytes a row more, and only without autocast, which makes its input fp32",
    "aten.native_layer_norm_backward": "a trained weight and bias over many rows are summed in two passes through "
    "at most 2**20 numbers each (layer_norm_kernel.cu, dgamma_blocks): 8 MiB; likewise the fused RMSNorm's weight",
    "aten.native_group_norm": "scale and shift in fp32 per sample and channel (group_norm_kernel.cu): 20 KiB a sample",
    "aten.native_group_norm_backward": "sums in fp32 per sample and channel (group_norm_kernel.cu): 40 KiB a sample",
    "aten.linalg_qr": "cuSOLVER's scratch for a matrix of 512 x 20 (native/cuda/linalg/BatchLinearAlgebra.cpp): KiB",
    "aten.linalg_solve_triangular": "a copy of a matrix of 20 x 20 (native/BatchLinearAlgebra.cpp): KiB",
    "aten._scaled_dot_product_flash_attention": "where queries are too few to fill the card, keys are split and the "
    "parts' outputs kept in fp32 (flash_api.cpp, num_splits_heuristic, out_accum): some MiB, never for a long clip",
    "aten._scaled_dot_product_efficient_attention": "an fp32 output for heads above 128 (mem_eff_attention/"
    "kernel_forward.h, kNeedsOutputAccumulatorBuffer): of models with a mask only HunyuanVideo 1.5's VAE has such, of "
    "1024: 81 MiB for 49 frames of 480x848, where the mask itself is 815 MiB",
}
"""Operators that take a little more inside on CUDA, and why that is left out of tapes."""

_CUDNN = (
    "cuDNN picks an algorithm at run time and takes its workspace inside the call (native/cudnn/Conv_v8.cpp). A patch "
    "embedding is one convolution outside the blocks, far from the peak; for a UNet it is the largest effect that is "
    "not modelled: up to copies of input and output in the layout the kernel wants"
)
UNMODELLED = {"aten.convolution": _CUDNN, "aten.convolution_backward": _CUDNN}
"""Operators whose workspace is not known without a GPU: what a measurement has to tell."""

CLASSIFIED = SAME | KNOWN_SMALL.keys() | UNMODELLED.keys() | WORKSPACES.keys()
"""Every operator that a tape may show."""
