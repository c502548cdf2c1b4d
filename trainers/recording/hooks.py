"""Hooks that tell a recorder which block runs and what a tensor holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trainers.recording.block_places import Place, place_of_name


class BlockListener(Protocol):
    """What the hooks call; ``trainers.recording.recorder.Recorder`` implements it."""

    place: Place | None
    phase: str

    def label(self, tensor: Tensor, category: str, name: str, place: Place | None = None) -> None:
        """Sets the category, name and block of a tensor's allocation."""


def watch_blocks(model: nn.Module, recorder: BlockListener, places: dict[str, Place]) -> None:
    """Adds hooks that set ``recorder.place`` to the running block, in forward and backward.

    A module of another list that runs between blocks (an adapter) belongs to the block before it.
    """

    def entering(place: Place | None) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if recorder.phase == "forward":
                recorder.place = place

        return hook

    def back_to(place: Place | None, out: Any) -> None:
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(lambda _: setattr(recorder, "place", place))

    def leaving(place: Place) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            if recorder.phase == "forward":
                back_to(place, out)

        return hook

    def leaving_between(module: nn.Module, args: Any, out: Any) -> None:
        if recorder.phase == "forward":
            back_to(recorder.place, out)

    lists = {name.rpartition(".")[0] for name in places}
    for name, place in places.items():
        block = model.get_submodule(name)
        block.register_forward_pre_hook(entering(place))
        block.register_forward_hook(leaving(place))
    for name, child in model.named_children():
        if name not in lists and not any(listed.startswith(f"{name}.") for listed in lists):
            # a ModuleDict itself is never called
            for called in child.children() if isinstance(child, nn.ModuleDict) else [child]:
                called.register_forward_pre_hook(entering(None))
            for between in child if isinstance(child, nn.ModuleList) else ():
                between.register_forward_hook(leaving_between)


def watch_casts(model: nn.Module, recorder: BlockListener, places: dict[str, Place]) -> None:
    """Adds hooks that label a layer's weights again after its forward, because layerwise casting allocates them anew
    there."""
    from diffusers.hooks.layerwise_casting import _is_layerwise_casting_active

    def watch(name: str, module: nn.Module) -> None:
        place = place_of_name(name, places)

        def stored(*_: Any) -> None:
            for key, parameter in module.named_parameters(recurse=False):
                recorder.label(parameter, "weight", f"{name}.{key}", place)

        module.register_forward_hook(stored)

    for name, module in model.named_modules():
        if not list(module.children()) and _is_layerwise_casting_active(module):
            watch(name, module)


def watch_gradients(trainable: Mapping[str, nn.Parameter], recorder: BlockListener, places: dict[str, Place]) -> None:
    """Adds hooks that label each gradient as it is accumulated."""

    def watch(name: str, parameter: nn.Parameter) -> None:
        def accumulated(_: Tensor) -> None:
            assert parameter.grad is not None
            recorder.label(parameter.grad, "gradient", name, place_of_name(name, places))

        parameter.register_post_accumulate_grad_hook(accumulated)

    for name, parameter in trainable.items():
        watch(name, parameter)
