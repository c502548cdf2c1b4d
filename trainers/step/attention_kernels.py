"""Attention kernels: sets the one that a plan asks for, where diffusers allows it, and observes which ones ran."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from planner.catalog.card_limits import CUDNN_FIRST
from planner.errors import VplanError

BACKENDS = {"flash": "_native_flash", "cudnn": "_native_cudnn", "efficient": "_native_efficient"}
"""Kernel as plans name it -> diffusers' backend for torch's kernel (diffusers/models/attention_dispatch.py)."""

ON_CPU = ("flash",)

KERNELS = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_flash_attention_for_cpu": "flash-cpu",
    "_safe_softmax": "math",
    "_softmax": "math",
}
"""Operator that torch's scaled_dot_product_attention dispatches to -> kernel. The math path shows by its softmax."""


def ask_for(model: nn.Module, attention: str, device: torch.device) -> None:
    """Sets the attention kernel that a plan asks for; ``sdpa`` leaves the choice to torch. Raises a VplanError if the
    kernel is not available."""
    if attention == "sdpa":
        return
    fix = "use --attention sdpa, which lets torch choose"
    if device.type == "cpu" and attention not in ON_CPU:
        raise VplanError(f"attention {attention} has no kernel for the CPU", fix)
    processors = [module.processor for module in model.modules() if hasattr(module, "processor")]
    if not processors or not all(hasattr(processor, "_attention_backend") for processor in processors):
        fault = f"attention {attention} is not supported by {type(model).__name__}: diffusers has no setting for it"
        raise VplanError(fault, fix)
    model.set_attention_backend(BACKENDS[attention])  # type: ignore[operator]  # diffusers' own method


def cudnn_runs(attention: str, device: torch.device) -> bool:
    """Whether attention without a mask runs on cuDNN: because it is asked for, or because torch prefers it on the
    card."""
    if attention != "sdpa" or device.type != "cuda" or torch.version.hip:
        return attention == "cudnn"
    return torch.cuda.get_device_capability(device)[0] in CUDNN_FIRST


def lay_out_gradients(model: nn.Module) -> None:
    """Makes the output gradients of attention modules without an output projection contiguous. Only needed for cuDNN.

    torch caches the execution plan of a backward by the sizes and strides of q, k and v, but the plan also depends on
    the strides of the output's gradient (ATen/native/cudnn/MHA.cpp, ``MHACacheKeyWrapper``; see also pytorch#191576).
    FLUX.1's and Chroma's single blocks join attention and feed-forward before one linear layer, so the gradient that
    reaches attention is a slice of rows five times as wide. Their double blocks have the same q, k and v, reuse the
    plan of that slice, and would read far beyond their own gradients: NaN, or silently wrong numbers (from torch's
    source, not confirmed on a GPU yet). The cost is a copy of one slice at a time. It raised reserved memory in none of
    ten rehearsals, so recordings leave it out.
    """
    for module in model.modules():
        if getattr(module, "pre_only", False):
            module.register_forward_hook(_with_contiguous_gradient)


def _with_contiguous_gradient(_: nn.Module, __: Any, output: Any) -> Any:
    """Leaves a tuple unchanged: it was split from the output, so autograd joins its gradients in a new tensor."""
    return _ContiguousGradient.apply(output) if isinstance(output, torch.Tensor) else output  # type: ignore[no-untyped-call]


class _ContiguousGradient(torch.autograd.Function):
    """The same tensor, with a contiguous gradient. A function rather than a tensor hook, so that blocks compile."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].contiguous()


class Kernels(TorchDispatchMode):
    """A dispatch mode that records which attention kernels run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kernel = KERNELS.get(func.overloadpacket.__name__)
        if kernel:
            self.seen.add(kernel)
        return func(*args, **(kwargs or {}))

    @property
    def names(self) -> str:
        """The kernels that ran, sorted: ``cudnn+efficient``; "unknown" if none was seen."""
        return "+".join(sorted(self.seen)) or "unknown"
