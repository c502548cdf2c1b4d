"""Which phase of a run goes on, by the modules whose forward runs."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

ASIDE = ("encode", "denoise", "decode")
"""Phases beside training, which the next forward with gradients ends."""


class ForwardPhases:
    """Tells training from what runs beside it. A forward without gradients that is not inside another such one is a
    text encoder's or the VAE's where nothing of the module is trained, and sampling where something is; a frozen module
    behind sampling decodes, unless it has encoded before. Checkpointed blocks run without gradients too, and are part
    of training."""

    def __init__(
        self,
        torch: Any,
        enter: Callable[[str], None],
        phase: Callable[[], str],
        device: str = "cuda",
        splits_gradients: Callable[[], bool] = lambda: False,
    ) -> None:
        """``enter``: called with each phase as it begins; ``phase``: the one that goes on; ``device``: of modules that
        count; ``splits_gradients``: whether an engine takes parameters' gradients away before a step."""
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

        self._torch, self._enter, self._phase, self._device = torch, enter, phase, device
        self._splits_gradients = splits_gradients
        self._training = ""
        """what forward and backward belong to; empty before the first"""
        self._calls = threading.local()
        self._encoders: weakref.WeakSet[Any] = weakref.WeakSet()
        """modules that have encoded: of a VAE its encoder, not its decoder"""
        self.model: Any = None
        """weak reference to the model in training, once it has run"""
        register_module_forward_pre_hook(self._before)
        register_module_forward_hook(self._after, always_call=True)
        self._watch_moves(torch.nn.Module)

    def _watch_moves(self, module_class: Any) -> None:
        """A module that is moved or cast before training is loading again, as the model is behind cached prompts."""
        apply = module_class._apply

        @functools.wraps(apply)
        def moved(*arguments: Any, **options: Any) -> Any:
            if self._phase() == "encode" and not self._training and not self._stack:
                self._enter("load")
            return apply(*arguments, **options)

        module_class._apply = moved

    def step_begins(self) -> None:
        """The optimizer is about to step."""
        self._training = self._training or "train"
        self._enter("optimizer")

    def step_ended(self) -> None:
        """What follows is training again."""
        self._training = "train"
        self._enter("train")

    @property
    def _stack(self) -> list[bool]:
        """Of this thread's forwards, the outermost first: whether gradients were on."""
        if not hasattr(self._calls, "stack"):
            self._calls.stack = []
        stack: list[bool] = self._calls.stack
        return stack

    def _before(self, module: Any, _arguments: Any) -> None:
        stack, gradients = self._stack, self._torch.is_grad_enabled()
        around = stack[-1] if stack else True
        stack.append(gradients)
        if gradients:
            self._with_gradients(module)
        elif around:
            self._without_gradients(module)

    def _after(self, *_ignored: Any) -> None:
        if self._stack:
            self._stack.pop()

    def _with_gradients(self, module: Any) -> None:
        if self._training:
            if self._training == "first_step" and module is self.model() and self._stepped_in_backward(module):
                self.step_ended()
            if self._phase() in ASIDE and _is_trained(module):
                self._enter(self._training)
        elif module.training and _is_trained(module):
            self.model = weakref.ref(module)
            self._training = "first_step"
            self._enter("first_step")

    def _stepped_in_backward(self, model: Any) -> bool:
        """Whether no gradient waits for a step where the model's second forward begins: then parameters step in hooks
        of backward (sd-scripts ``--fused_backward_pass``)."""
        return not self._splits_gradients() and all(parameter.grad is None for parameter in model.parameters())

    def _without_gradients(self, module: Any) -> None:
        if not any(parameter.device.type == self._device for parameter in module.parameters()):
            return
        phase = self._phase()
        if phase == "optimizer" or (self._training and _inside_autograd_function()):
            return
        wanted = "encode"
        if self._training and _is_trained(module):
            wanted = "denoise"
        elif phase in ("denoise", "decode") and module not in self._encoders:
            wanted = "decode"
        else:
            self._encoders.add(module)
        if wanted != phase:
            self._enter(wanted)


def _is_trained(module: Any) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _inside_autograd_function() -> bool:
    """Whether a function of autograd's own runs, as checkpoints are: its ``forward`` has ``ctx`` first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("ctx",) and frame.f_code.co_name == "forward":
            return True
        frame = frame.f_back
    return False
