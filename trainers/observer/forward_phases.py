"""Which phase of a run goes on, by the modules whose forward runs."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

ASIDE = ("encode", "denoise", "decode")
"""Phases beside training, which the next forward with gradients ends."""


class Call(NamedTuple):
    """A forward that goes on."""

    module: Any
    gradients: bool
    """whether they were on"""


class ForwardPhases:
    """Tells training from what runs beside it. A forward without gradients that is not inside another such one is a
    text encoder's or the VAE's where nothing of the module is trained, and sampling where something is; a frozen module
    behind sampling decodes, unless it has encoded before. Checkpointed blocks run without gradients too, and are part
    of training. Gradients may be on where a trainer's module holds a pipeline and calls its parts
    (DiffSynth-Studio): then frozen parts with layers of layers are its encoders."""

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
    def _stack(self) -> list[Call]:
        """This thread's forwards, the outermost first."""
        if not hasattr(self._calls, "stack"):
            self._calls.stack = []
        stack: list[Call] = self._calls.stack
        return stack

    def _before(self, module: Any, _arguments: Any) -> None:
        stack, gradients = self._stack, self._torch.is_grad_enabled()
        caller = stack[-1] if stack else Call(None, True)
        stack.append(Call(module, gradients))
        if gradients:
            self._with_gradients(module, caller.module)
        elif caller.gradients:
            self._without_gradients(module)

    def _after(self, *_ignored: Any) -> None:
        if self._stack:
            self._stack.pop()

    def _with_gradients(self, module: Any, caller: Any) -> None:
        if self._training:
            if self._training == "first_step" and module is self.model() and self._stepped_in_backward(module):
                self.step_ended()
            if self._phase() in ASIDE:
                if _is_trained(module):
                    self._enter(self._training)
            elif caller is not None and caller is self._called_model() and _is_encoder_of(caller, module):
                self._enter("encode")
        elif _is_training(module):
            self.model = weakref.ref(module)
            self._training = "first_step"
            self._enter("first_step")

    def _called_model(self) -> Any:
        """The model in training, without what wraps it; None where an optimizer has stepped before any was seen."""
        return None if self.model is None else _unwrapped(self.model())

    def _stepped_in_backward(self, model: Any) -> bool:
        """Whether no gradient waits for a step where the model's second forward begins: then parameters step in hooks
        of backward (sd-scripts ``--fused_backward_pass``)."""
        return not self._splits_gradients() and all(parameter.grad is None for parameter in _parameters(model))

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
    return any(parameter.requires_grad for parameter in _parameters(module))


def _is_training(module: Any) -> bool:
    """Whether something is trained in a module in training mode. A frozen model's mode says nothing of its adapters
    (without checkpoints musubi-tuner's is in evaluation mode)."""
    if module.training:
        return _is_trained(module)
    return any(
        adapter.training and any(parameter.requires_grad for parameter in adapter.parameters())
        for adapter in _adapters(module)
    )


def _parameters(module: Any) -> Iterator[Any]:
    """A module's own, and those of its adapters."""
    yield from module.parameters()
    for adapter in _adapters(module):
        yield from adapter.parameters()


def _adapters(module: Any) -> Iterator[Any]:
    """Modules outside of it that run in place of a part's forward (ai-toolkit's LoKr)."""
    for part in module.modules():
        owner = getattr(vars(part).get("forward"), "__self__", None)
        if owner is not None and owner is not part and hasattr(owner, "parameters"):
            yield owner


def _unwrapped(model: Any) -> Any:
    """What DDP or an engine wraps (``module``)."""
    return getattr(model, "module", model)


def _is_encoder_of(model: Any, module: Any) -> bool:
    """Whether a frozen module is no part of the model itself, and has layers of layers: neither one of its children nor
    in one of its lists, whose blocks a model may run part by part (SimpleTuner's Stable Diffusion 3)."""
    own = (part for child in model.children() for part in (child.modules() if _is_list(child) else (child,)))
    return _depth(module, 3) == 3 and not _is_trained(module) and not any(module is part for part in own)


def _is_list(module: Any) -> bool:
    return any(base.__name__ in ("ModuleList", "ModuleDict") for base in type(module).__mro__)


def _depth(module: Any, most: int) -> int:
    """How deep its modules lie in each other, counted up to ``most``."""
    if not most:
        return 0
    return max((1 + _depth(child, most - 1) for child in module.children()), default=0)


def _inside_autograd_function() -> bool:
    """Whether a function of autograd's own runs, as checkpoints are: its ``forward`` has ``ctx`` first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("ctx",) and frame.f_code.co_name == "forward":
            return True
        frame = frame.f_back
    return False
