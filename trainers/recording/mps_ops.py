"""How a training step on MPS, PyTorch's backend for Apple's GPUs, differs from one on CUDA; read at torch 2.13.

* **Attention** takes the math path: `_fused_sdp_choice` has no kernel for MPS (torchgen's native_functions.yaml), and
  `_scaled_dot_product_attention_math_for_mps` has no backward, so it runs only without gradients
  (ATen/native/transformers/attention.cpp). The scores of all heads are whole tensors in fp32, and their softmax is
  saved.
* **RMSNorm** has no backward on MPS (native_functions.yaml, `_fused_rms_norm_backward`): with gradients it is several
  operators in fp32, without them one kernel (ATen/native/layer_norm.cpp, ``rms_norm_symint``).
* **Autocast** applies to the operators registered for it (ATen/autocast_mode.cpp), to each as on CUDA; RMSNorm and the
  interpolations are not registered.
* **Workspaces** are allocated by Metal, not by the allocator. `_safe_softmax`, which appears as one operator, makes
  intermediate tensors on any device.

Everything else that is recorded is the same as on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from trainers.recording.cuda_ops import Workspace, autocast_lists, group_norm, semantics


def mps_lists() -> dict[str, set[str]]:
    """MPS autocast's operator lists: CUDA's, without operators that are not registered for MPS
    (ATen/autocast_mode.cpp)."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastMPS")
    known = {name.removeprefix("aten::") for name in registered}
    return {kind: names & known for kind, names in autocast_lists().items()}


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
    """``scaled_dot_product_attention`` as MPS runs it. Without gradients one kernel makes the output and the scores
    (ATen/native/mps/operations/Attention.mm); its other memory is Metal's."""
    trains = query.requires_grad or key.requires_grad or value.requires_grad
    if not (torch.is_grad_enabled() and trains) and not dropout_p:
        scores = torch.empty(*query.shape[:-1], key.shape[-2], dtype=query.dtype, device=query.device)
        out = torch.empty(*query.shape[:-1], value.shape[-1], dtype=query.dtype, device=query.device)
        del scores
        return out
    math: Callable[..., tuple[Tensor, Tensor]] = torch.ops.aten._scaled_dot_product_attention_math
    return math(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]


def rms_norm(value: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """``aten::rms_norm`` as MPS dispatches it."""
    trains = value.requires_grad or (weight is not None and weight.requires_grad)
    if weight is not None and not (torch.is_grad_enabled() and trains):
        return torch.empty_like(value)
    composite: Callable[..., tuple[Tensor, Tensor]] = torch.ops.aten._fused_rms_norm
    return composite(value, normalized_shape, weight, eps)[0]


def mps_semantics() -> AbstractContextManager[None]:
    """While open, CPU tensors take MPS's path through autocast, attention, GroupNorm and RMSNorm."""
    kernels: dict[str, Callable[..., Any]] = {
        "scaled_dot_product_attention": attention,
        "group_norm": group_norm,
        "rms_norm": rms_norm,
    }
    return semantics(mps_lists(), kernels)


def workspaces(op: str, args: tuple[Any, ...]) -> list[Workspace]:
    """The buffers that an operator allocates inside and frees before it returns. Those of `_safe_softmax` are the
    softmax before fully masked rows are cleared, and the mask of blocked scores
    (ATen/native/transformers/attention.cpp)."""
    if op != "aten._safe_softmax":
        return []
    scores = args[0]
    return [("any", (scores.element_size(), *scores.shape)), ("any", tuple(scores.shape))]
