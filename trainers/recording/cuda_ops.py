"""The differences between CUDA and fake CPU tensors, and contexts that make the recorder behave like CUDA.

There are two kinds; `trainers.recording.op_table` says, operator by operator, that nothing else differs:

* **Dispatch**: operators that run as other operators on CUDA: autocast's lists, attention, dropout, RMSNorm, GroupNorm.
  ``cuda_semantics`` installs CUDA's behaviour on the CPU dispatch keys while a recording runs.
* **Workspace**: memory that a CUDA kernel allocates and frees inside one operator (``workspaces``).
"""

from __future__ import annotations

import contextlib
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainers.recording import fakes, token_routing

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
        definition = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*)", text)
        assert definition, f"torch {torch.__version__}: {macro} not found in autocast_mode.h"
        entries = re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", definition[1])
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


def cuda_lists(rms_norm_in_fp32: bool = True) -> dict[str, set[str]]:
    """CUDA's autocast lists. ``rms_norm_in_fp32``: with RMSNorm in the fp32 list, as since torch 2.12."""
    lists = autocast_lists()
    lists["fp32"] = lists["fp32"] - {"rms_norm"} | ({"rms_norm"} if rms_norm_in_fp32 else set())
    return lists


def install_autocast(library: torch.library.Library, lists: Mapping[str, Collection[str]]) -> None:
    """Installs a device's autocast on the CPU key. ``lists``: as from `autocast_lists`.

    Operators of the lower-precision list that CPU autocast knows keep torch's kernel, which owns the cache of cast
    weights.
    """
    cpu = {name.removeprefix("aten::") for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")}
    listed = set[str]().union(*lists.values())
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


def _mask_of_numbers(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask that attention gets: a boolean one becomes one of numbers in the queries' dtype, whose temporaries are
    freed before attention begins. Raises a RuntimeError for a mask of another dtype, as torch does (attention.cpp,
    validate_sdpa_input)."""
    if mask is None or mask.dtype in (torch.float32, dtype):
        return mask
    if mask.dtype != torch.bool:
        raise RuntimeError(f"attention takes no mask of {mask.dtype} with queries of {dtype}")
    kept, blocked = (torch.full((), number, dtype=dtype, device=mask.device) for number in (0.0, -math.inf))
    return torch.where(mask, kept, blocked)


class CudaAttention:
    """``scaled_dot_product_attention`` as CUDA runs it: flash without a mask, memory-efficient with one or in fp32.

    Shapes (B, heads, S, head size). Both save q, k, v, the output and a logsumexp in fp32; cuDNN attention saves the
    same (ATen/native/transformers/cuda/sdp_utils.cpp, attention.cu).

    Masks. A boolean mask becomes one of numbers (torch 2.6 and newer: ATen/native/transformers/attention.cpp,
    convert_boolean_attn_mask). For memory-efficient attention a mask whose rows are not a multiple of 8 elements is
    then copied into padded rows (pad_bias), and the copy is saved: at most B * S * 16 bytes for a mask of one row,
    which is left out; as large as the mask for one of S rows. cuDNN uses the mask directly, see
    `planner.layout.attention_kernel`.

    Grouped queries (fewer heads of keys than of queries). Only flash and cuDNN support them
    (check_batch_size_and_num_heads_dense in sdp_utils_cpp.h), with a mask only cuDNN. It runs on cards where torch
    prefers it, which ``cudnn`` records; on others the math path runs, as it does for tensors without an axis of heads
    (check_tensor_shapes, in the same file).

    Head sizes. If a head is not a multiple of 16 bytes, flash makes padded copies (attention.cpp, pad_last_dim), and
    memory-efficient attention does not run (sdp_utils.cpp, check_head_dim_size_mem_efficient).
    """

    def __init__(self, cudnn: bool = False) -> None:
        self.cudnn = cudnn
        self.differs_by_card = False
        """whether there was a call that runs on cuDNN in 16 bits on some cards, and on the math path on others"""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        plain: Callable[..., Sequence[Tensor]] = torch.ops.aten._scaled_dot_product_attention_math
        if query.dim() != 4:
            return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)[0]
        half = query.dtype in (torch.float16, torch.bfloat16)
        size, aligned = query.shape[-1], 16 // query.element_size()
        left_over = size % aligned
        if attn_mask is None and half and size <= 256:
            return _flash(query, key, value, dropout_p, is_causal, scale, aligned)
        if enable_gqa and key.shape[1] != query.shape[1]:
            taken = attn_mask is not None and key.shape[2] > 1 and size % 8 == 0 and size <= CUDNN_HEAD_SIZE
            self.differs_by_card |= taken
            if not (taken and half and self.cudnn):
                return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True)[0]
        attn_mask = _mask_of_numbers(attn_mask, query.dtype)
        saves = query.requires_grad or key.requires_grad or value.requires_grad
        if key.shape[1] != query.shape[1]:
            cudnn: Callable[..., Sequence[Tensor]] = torch.ops.aten._scaled_dot_product_cudnn_attention
            return cudnn(query, key, value, attn_mask, saves, dropout_p, is_causal, scale=scale)[0]
        if left_over:
            return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)[0]
        if attn_mask is not None:
            length = key.shape[2]
            if attn_mask.shape[-2] > 1 and length % MASK_ALIGNMENT:
                attn_mask = torch.constant_pad_nd(attn_mask, [0, -length % MASK_ALIGNMENT])[..., :length]
            attn_mask = attn_mask.expand(*query.shape[:3], length)
        efficient: Callable[..., Sequence[Tensor]] = torch.ops.aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, attn_mask, saves, dropout_p, is_causal, scale=scale)[0]


CUDNN_HEAD_SIZE = 128
"""The largest head size that cuDNN's attention supports on every card; on Hopper it supports up to 256 (ATen/native/
transformers/cuda/sdp_utils.cpp, check_cudnn_tensor_shapes)."""


def _flash(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: float | None, aligned: int
) -> Tensor:
    """Flash attention; heads whose size is not a multiple of ``aligned`` are padded."""
    flash: Callable[..., Sequence[Tensor]] = torch.ops.aten._scaled_dot_product_flash_attention
    size = query.shape[-1]
    if not size % aligned:
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
    padded = [torch.constant_pad_nd(each, [0, -size % aligned]) for each in (query, key, value)]
    return flash(*padded, dropout_p, is_causal, scale=size**-0.5 if scale is None else scale)[0][..., :size]


class FusedRmsNorm(torch.autograd.Function):
    """``aten::_fused_rms_norm`` of CUDA (torch >= 2.9): saves the input, the weight and one fp32 rstd per row."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor | None) -> Tensor:
        out = torch.empty_like(value)
        rstd = value.new_empty((*value.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(value, weight, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        value, weight, _ = ctx.saved_tensors
        grad_value = torch.empty_like(value) if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(weight) if weight is not None and ctx.needs_input_grad[1] else None
        return grad_value, grad_weight


def rms_norm(value: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """``aten::rms_norm`` as CUDA dispatches it: fused when input and weight share a dtype, else the composite."""
    if weight is None or weight.dtype == value.dtype:
        fused: Tensor = FusedRmsNorm.apply(value, weight)  # type: ignore[no-untyped-call]  # torch has no types here
        return fused
    upcast = value.float()
    normed = upcast * torch.rsqrt(upcast.pow(2).mean(-1, keepdim=True) + (eps or torch.finfo(value.dtype).eps))
    return (normed * weight).to(value.dtype)


def group_norm(
    value: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """``aten::group_norm`` as CUDA dispatches it: a channels-last input (N, C, ...) is copied first, the copy is saved,
    and the output is contiguous too. The CPU normalises it in its own layout (native/group_norm.cpp)."""
    value = value.contiguous()
    samples, channels, *sides = value.shape
    normed: Callable[..., Sequence[Tensor]] = torch.ops.aten.native_group_norm
    return normed(value, weight, bias, samples, channels, math.prod(sides), num_groups, eps)[0]


@contextlib.contextmanager
def semantics(lists: Mapping[str, Collection[str]], kernels: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """A context in which CPU tensors take another device's path: its autocast ``lists``, and its ``kernels`` by
    operator."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns of every kernel we replace
        install_autocast(library, lists)
        for name, kernel in kernels.items():
            library.impl(name, kernel, "AutogradCPU")
    try:
        with (
            fakes.converted_in_place(),
            fakes.autocast_asked_of_cpu(),
            fakes.autocast_to_fp32(),
            token_routing.by_row_numbers(),
            fakes.views_as_eagerly(),
        ):
            yield
    finally:
        library._destroy()


@contextlib.contextmanager
def cuda_semantics(
    fused_rms_norm: bool = True, rms_norm_in_fp32: bool = True, cudnn: bool = False
) -> Iterator[CudaAttention]:
    """A context in which CPU tensors take CUDA's path through autocast, attention, dropout, GroupNorm and RMSNorm;
    yields the `CudaAttention`. ``cudnn``: as on cards where torch prefers cuDNN's attention.

    ``fused_rms_norm=False``: as in torch before 2.9, which had no fused kernel. ``rms_norm_in_fp32=False``: as before
    2.12, when autocast left RMSNorm in the dtype of its input.
    """
    attention = CudaAttention(cudnn)
    kernels: dict[str, Callable[..., Any]] = {
        "scaled_dot_product_attention": attention,
        "dropout": fakes.dropout,
        "group_norm": group_norm,
    }
    if fused_rms_norm:
        kernels["rms_norm"] = rms_norm
    with semantics(cuda_lists(rms_norm_in_fp32), kernels):
        yield attention


# --- Workspace -----------------------------------------------------------------------------------------------------


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def flash_backward(args: tuple[Any, ...]) -> list[Workspace]:
    """FlashAttention-2 backward: fp32 dq accumulator and row sums, on query rows rounded up to 128.

    flash-attention csrc/flash_attn/flash_api.cpp, mha_bwd: dq_accum (B, S, heads, D rounded up to 32), softmax_d (B,
    heads, S). If several query heads share a key head, dk and dv are made for each query head and then summed
    (dk_expanded, dv_expanded). cuDNN does not round, but does not support keys of one row or batches above
    `CUDNN_SAMPLES` (ATen/native/transformers/cuda/sdp_utils.cpp, check_cudnn_tensor_shapes; seen on a virtual H200
    under torch 2.13).
    """
    query, key = args[1], args[2]
    batch, heads, rows, size = query.shape
    kernel, samples = ("any", 0) if key.shape[2] == 1 else ("flash", batch)
    rounded = Rounded(rows, 128, samples)
    expanded: Workspace = ("flash", (key.element_size(), batch, heads, key.shape[2], size))
    return [
        *([expanded, expanded] if key.shape[1] != heads else []),
        (kernel, (4, batch, heads, rounded)),
        (kernel, (4, batch, heads, rounded, _round_up(size, 32))),
    ]


def efficient_forward(args: tuple[Any, ...]) -> list[Workspace]:
    """Memory-efficient attention with heads above 128 in 16 bits: an accumulator of the output in fp32
    (mem_eff_attention/kernel_forward.h, kNeedsOutputAccumulatorBuffer). Most VAEs have attention with one wide head."""
    query, value = args[0], args[2]
    batch, heads, rows, _ = query.shape
    size = value.shape[-1]
    return [("any", (4, batch, heads, rows, size))] if size > WIDEST_IN_REGISTERS and query.element_size() == 2 else []


WIDEST_IN_REGISTERS = 128


def efficient_backward(args: tuple[Any, ...]) -> list[Workspace]:
    """Memory-efficient attention backward: fp32 delta and fp32 accumulators for dq when inputs are not fp32.

    ATen/native/transformers/cuda/mem_eff_attention/kernel_backward.h, workspace_size.
    """
    query = args[1]
    batch, heads, rows, size = query.shape
    workspaces: list[Workspace] = [("any", (4, batch, heads, rows))]
    if query.dtype != torch.float32:
        workspaces.append(("any", (4, batch, heads, rows, _round_up(size, 32))))
    return workspaces


def cudnn_backward(args: tuple[Any, ...]) -> list[Workspace]:
    """cuDNN's attention backward: row sums and a dq accumulator in fp32. Query heads that share a key head need no more
    (NVIDIA/cudnn-frontend include/cudnn_frontend/node/scaled_dot_product_flash_attention.h: softmax_sum_size and
    dQ_accum_size; dK_fullhead is virtual)."""
    batch, heads, rows, size = args[1].shape
    return [("any", (4, batch, heads, rows)), ("any", (4, batch, heads, rows, size))]


def softmax_backward(args: tuple[Any, ...]) -> list[Workspace]:
    """The product of gradient and output, as large as either (native/cuda/SoftMax.cu, softmax_backward_cuda_out)."""
    gradient = args[0]
    return [("any", (gradient.element_size(), *gradient.shape))]


def gemm_4bit(args: tuple[Any, ...]) -> list[Workspace]:
    """bitsandbytes' 4-bit matrix product: a copy of the weight in the input's dtype for a plain product, and under
    double quantisation also the blocks' constants in fp32, without and with their mean added.

    bitsandbytes/backends/cuda/ops.py, _dequant_linear_fallback. For up to 4 rows a fused kernel needs no copy, on every
    card (_GEMM_4BIT_CUSTOM_FLOOR_M): products with one row per sample, such as time embeddings. For up to 1536 rows
    (short prompts) that depends on card and shape, and is not modelled.
    """
    rows, columns = args[2]
    if args[0].numel() // args[0].shape[-1] in ONE_ROW_A_SAMPLE:
        return []
    copy: Workspace = ("any", (args[0].element_size(), rows, columns))
    if len(args) > 7 and args[7] is not None:
        constants: Workspace = ("any", (4, *args[7].shape))
        return [constants, constants, copy]
    return [copy]


BATCHES = (1009, 1051)
"""Batches of recordings that are valid for any batch: the first usually, the next where a length is a sum of the batch,
which shows in sizes (1052 is 4 * 263; 1010 has no large prime)."""

ONE_ROW_A_SAMPLE = (1, 2, 3, 4, *BATCHES, BATCHES[1] + 1)
"""Numbers of rows of products with one row per sample, or one more for all: those of the fused kernel, and those of a
recording that is valid for any batch."""


class Rounded(int):
    """A dimension rounded up. Keeps the exact dimension and the multiple, so that a tape can keep it symbolic, and in
    ``samples`` the batch if it depends on the batch whether a card's kernel rounds, else 0."""

    exact: int
    multiple: int
    samples: int

    def __new__(cls, exact: int, multiple: int, samples: int = 0) -> Rounded:
        rounded = super().__new__(cls, _round_up(exact, multiple))
        rounded.exact, rounded.multiple, rounded.samples = exact, multiple, samples
        return rounded


WORKSPACES: dict[str, Callable[[tuple[Any, ...]], list[Workspace]]] = {
    "aten._scaled_dot_product_flash_attention_backward": flash_backward,
    "aten._scaled_dot_product_efficient_attention": efficient_forward,
    "aten._scaled_dot_product_efficient_attention_backward": efficient_backward,
    "aten._scaled_dot_product_cudnn_attention_backward": cudnn_backward,
    "aten._softmax_backward_data": softmax_backward,
    "bitsandbytes.gemm_4bit": gemm_4bit,
}


BEFORE_OUTPUTS = frozenset({"bitsandbytes.gemm_4bit"})
"""Operators that allocate their workspaces before their outputs."""

LAST_OUTPUT_FIRST = frozenset({"bitsandbytes.quantize_4bit"})
"""Operators that allocate their outputs in reverse order: the blocks' constants before the packed weight
(bitsandbytes/backends/cuda/ops.py)."""


def workspaces(op: str, args: tuple[Any, ...]) -> list[Workspace]:
    """The buffers that a CUDA kernel allocates inside ``op`` (its name without overload) and frees before it
    returns."""
    entry = WORKSPACES.get(op)
    return entry(args) if entry else []


def rounded_output(op: str, position: int, shape: tuple[int, ...], args: tuple[Any, ...]) -> Rounded | None:
    """The dimension of an output that a kernel rounds up, so that its size does not show the shape's atoms.

    Memory-efficient attention pads its logsumexp to 32 rows (kAlignLSE, mem_eff_attention/kernel_forward.h), and the
    rows of its mask to 8 elements.
    """
    if op == "aten._scaled_dot_product_efficient_attention" and position == 1 and shape[-1]:
        return Rounded(args[0].shape[2], 32)
    if op == "aten.constant_pad_nd" and args[1] == [0, -args[0].shape[-1] % MASK_ALIGNMENT]:  # ``attention`` above
        return Rounded(args[0].shape[-1], MASK_ALIGNMENT)
    return None
