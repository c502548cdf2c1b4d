"""Attention's kernels: the one a plan asks for is set where diffusers lets it be, and what really ran is seen."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from planner.errors import VplanError

BACKENDS = {"flash": "_native_flash", "cudnn": "_native_cudnn", "efficient": "_native_efficient"}
"""What a plan calls a kernel -> what diffusers calls the way to torch's (diffusers/models/attention_dispatch.py)."""

ON_CPU = ("flash",)

KERNELS = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_flash_attention_for_cpu": "flash-cpu",
    "_safe_softmax": "math",
    "_softmax": "math",
}
"""Operator that torch's scaled_dot_product_attention ends in -> kernel. The math path is known by its softmax."""


def ask_for(model: nn.Module, attention: str, device: torch.device) -> None:
    """Sets the attention kernel that a plan asks for; ``sdpa`` leaves the choice to torch. Raises a VplanError when it
    is not available."""
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


class Kernels(TorchDispatchMode):
    """A dispatch mode that notes which attention operators run."""

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
        """The kernels that ran, sorted: ``cudnn+efficient``; "unknown" when none was seen."""
        return "+".join(sorted(self.seen)) or "unknown"
