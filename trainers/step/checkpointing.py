"""Turns on gradient checkpointing: of all or the first blocks, nested, or with the blocks' inputs offloaded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from planner.catalog.profiles import ModelProfile
from planner.errors import VplanError
from planner.spec.job import Strategy
from trainers.memory.block_inputs import BlockInputs
from trainers.memory.fp8_inputs import InputsInFp8
from trainers.memory.offload import InputsOnHost


def set_checkpointing(
    model: nn.Module, profile: ModelProfile, strategy: Strategy, inputs: InputsOnHost | None = None
) -> None:
    """Turns on non-reentrant checkpointing of the blocks that ``strategy.gradient_checkpointing`` selects.

    ``partial``: the first ``checkpointed_blocks`` in execution order. ``offload``: all blocks, with their inputs in
    host RAM; pass ``inputs`` to share that RAM with another model. ``fp8``: all blocks, with their inputs in 8 bits.
    With ``nested_checkpointing`` the attentions and feed-forwards of blocks are checkpointed as well, which changes
    neither the operators nor their order in backward (torch/utils/checkpoint.py, "Nested checkpoint").
    """
    mode = strategy.gradient_checkpointing
    if mode == "none":
        return
    calls = 0
    limit = strategy.checkpointed_blocks if mode == "partial" else None
    kept: BlockInputs | None = None
    if mode == "offload":
        kept = inputs or InputsOnHost()
    elif mode == "fp8":
        kept = InputsInFp8()
    # With early stop, recomputation would end inside a last linear layer, and the hook that casts its weights back to
    # fp8 (layerwise casting) would not run.
    early_stop = not (strategy.weights_dtype == "fp8" and profile.traits.ends_in_linear)

    def start_forward(*_: Any) -> None:
        nonlocal calls
        calls = 0  # ``partial`` counts blocks in the order in which they are called
        if kept is not None:
            kept.begin()

    def run(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if limit is not None and calls > limit:
            return block(*args, **kwargs)
        with kept.around(*args, *kwargs.values()) if kept is not None else contextlib.nullcontext():
            return checkpoint(block.__call__, *args, use_reentrant=False, early_stop=early_stop, **kwargs)

    if strategy.nested_checkpointing:
        for part in block_parts(model, profile):
            part.forward = _checkpointed(part.forward, early_stop)
    model.register_forward_pre_hook(start_forward)
    model.enable_gradient_checkpointing(run)  # type: ignore[operator]  # diffusers' own method


def block_parts(model: nn.Module, profile: ModelProfile) -> list[nn.Module]:
    """The attentions and feed-forwards of a model's blocks: everything in a block except norms, modulation and the
    linear layers that run in parallel with attention (FLUX's single blocks).

    Raises a VplanError for a UNet, whose checkpointed parts are not blocks, and if the blocks have no such parts.
    """
    from diffusers.models.attention import AttentionModuleMixin
    from diffusers.models.attention_processor import Attention

    blocks = [block for stack in profile.stacks for block in model.get_submodule(stack.list).children()]
    parts = [
        part
        for block in blocks
        for part in _unwrapped(block).children()
        if isinstance(part, (Attention, AttentionModuleMixin)) or "FeedForward" in type(part).__name__
    ]
    if profile.traits.stages or not parts:
        fault = f"the blocks of {profile.title} have no attention or feed-forward of their own to checkpoint"
        raise VplanError(fault, "leave out --nested-checkpointing")
    return parts


def _unwrapped(block: nn.Module) -> nn.Module:
    """The block, or its only child if it is a mere wrapper (HiDream's)."""
    children = list(block.children())
    return children[0] if len(children) == 1 and not list(block.parameters(recurse=False)) else block


def _checkpointed(forward: Callable[..., Any], early_stop: bool) -> Callable[..., Any]:
    """A module's forward, checkpointed when gradients are enabled. The module's hooks are outside, so they run once."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, early_stop=early_stop, **kwargs)

    return run
