"""What cannot be rehearsed is refused where it begins: its memory depends on kernels that are compiled or captured."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from .import_hook import ImportHook

COMPILE = (
    "torch.compile",
    "run it without: leave out torch.compile and its option, or set TORCH_COMPILE_DISABLE=1",
)
FLEX = ("FlexAttention", "choose another attention, as torch's scaled_dot_product_attention is")
TRITON = ("a Triton kernel", "choose the trainer's option without Triton kernels")
GRAPH = ("CUDA graphs", "run it without: leave out the option that captures CUDA graphs")

TORCH_KERNELS = "torch._native."
"""The package of torch's own kernels in Triton."""

Refuse = Callable[[str, str], None]
"""Gets what is refused and the fix; the call that follows never happens."""


def install(hook: ImportHook, refuse: Refuse) -> None:
    """Watch for the modules that begin such work."""
    hook.after("torch._dynamo.eval_frame", lambda module: _refuse_compiled(module, refuse))
    hook.after("torch._inductor.compile_fx", lambda module: _replace(module, "compile_fx", COMPILE, refuse))
    hook.after("triton.runtime.jit", lambda module: _refuse_triton(module, refuse))
    hook.after("torch.nn.attention.flex_attention", lambda module: _replace(module, "flex_attention", FLEX, refuse))
    hook.after("torch.cuda.graphs", lambda module: _refuse_graphs(module, refuse))


def _refuse_compiled(module: Any, refuse: Refuse) -> None:
    """A compiled function begins with a callback set (None and False are those of functions left alone). Under a
    dispatch mode, as ours, dynamo would run it uncompiled and say nothing."""

    def refusing(real: Any) -> Any:
        def refused(callback: Any, *more: Any) -> Any:
            if callback is not None and callback is not False:
                refuse(*COMPILE)
            return real(callback, *more)

        return refused

    for name in ("set_eval_frame", "_maybe_set_eval_frame"):
        if hasattr(module, name):
            setattr(module, name, refusing(getattr(module, name)))


def _refuse_triton(module: Any, refuse: Refuse) -> None:
    """torch's own Triton kernels do nothing, like all kernels of a virtual card: they write to an output that torch has
    allocated (``torch/_native``: torch 2.13 multiplies two vectors per batch with one, as language models do for rotary
    positions)."""

    def run(kernel: Any, *_arguments: Any, **_options: Any) -> None:
        if not kernel.fn.__module__.startswith(TORCH_KERNELS):
            refuse(*TRITON)

    module.JITFunction.run = run


def _refuse_graphs(module: ModuleType, refuse: Refuse) -> None:
    _replace(module.CUDAGraph, "capture_begin", GRAPH, refuse)


def _replace(owner: Any, name: str, what: tuple[str, str], refuse: Refuse) -> None:
    if not hasattr(owner, name):
        return

    def refused(*_arguments: Any, **_options: Any) -> None:
        refuse(*what)

    setattr(owner, name, refused)
