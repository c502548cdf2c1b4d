"""Block swap: frozen weights of some checkpointed blocks wait in pinned host RAM and stream through two buffers.

A block's weights are fetched when the one before it begins, in forward and again in backward, where recomputation calls
the blocks from the last to the first. Checkpointing is what makes this right: between a block's recomputation and the
end of its backward no other block runs, so what autograd kept of its weights and what a module reads again are the same
bytes. Without it both would differ (autograd holds a linear layer's old storage, while norms and tables read the new).
Nothing is copied back, because nothing that is swapped is trained (musubi-tuner ``--block_swap_h2d_only``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from planner.errors import VplanError
from planner.facts import ModelProfile
from planner.job import Strategy
from trainers.memory.pinned import host_bytes

ALIGNMENT = 256
"""Each weight begins at a multiple of this in a buffer, as it would in an allocation of its own."""

SLOTS = 2


@dataclass
class _Waiting:
    """One block's frozen weights, in host RAM."""

    weights: list[tuple[nn.Parameter, int]]
    """parameter -> where it begins in the buffer"""
    host: Tensor
    """all of them, bytes"""

    def show(self, buffer: Tensor) -> None:
        """Makes the parameters those in a buffer."""
        for parameter, start in self.weights:
            part = buffer[start : start + parameter.numel() * parameter.element_size()]
            parameter.data = part.view(parameter.dtype).view(parameter.shape)


class BlockSwap:
    """The swapped blocks of a model, and the ring their weights pass through. ``blocks`` in the order they run."""

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device) -> None:
        self.device = device
        self.blocks = [_taken(block, device) for block in blocks]
        largest = max(waiting.host.numel() for waiting in self.blocks)
        self.ring = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(min(SLOTS, len(blocks)))]
        self._holds: list[int | None] = [None] * len(self.ring)
        self._fetching = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ready: list[torch.cuda.Event | None] = [None] * len(self.ring)
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(self._hook(index))

    def _hook(self, index: int) -> Any:
        def before(_module: nn.Module, _arguments: Any) -> None:
            self.bring(index)

        return before

    def bring(self, index: int) -> None:
        """Makes a block's weights be there, and has the next one's fetched: in backward that is the one before."""
        slot = self._holds.index(index) if index in self._holds else self._fetch(index)
        if (ready := self._ready[slot]) is not None:
            torch.cuda.current_stream(self.device).wait_event(ready)
        in_backward = torch._C._current_graph_task_id() != -1  # as torch.utils.checkpoint asks
        following = index - 1 if in_backward else index + 1
        if 0 <= following < len(self.blocks) and following not in self._holds:
            self._fetch(following, keep=slot)

    def _fetch(self, index: int, keep: int | None = None) -> int:
        """Copies a block's weights into a slot, behind whatever still computes with it; returns the slot."""
        slot = next(number for number in range(len(self.ring)) if number != keep)
        if (before := self._holds[slot]) is not None:
            self.blocks[before].show(self.blocks[before].host)  # whoever used them now would be told, not misled
        waiting = self.blocks[index]
        target = self.ring[slot][: waiting.host.numel()]
        if self._fetching is None:
            target.copy_(waiting.host)
        else:
            self._fetching.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._fetching):
                target.copy_(waiting.host, non_blocking=True)
                self._ready[slot] = self._fetching.record_event()
        waiting.show(target)
        self._holds[slot] = index
        return slot


def swapped_blocks(model: nn.Module, profile: ModelProfile, strategy: Strategy) -> list[tuple[str, nn.Module]]:
    """(full name, block) of the blocks that a strategy swaps, in the order they run: the last, or with ``partial``
    checkpointing the last of those that are checkpointed."""
    blocks = [
        (f"{stack.list}.{name}", block)
        for stack in profile.stacks
        for name, block in model.get_submodule(stack.list).named_children()
    ]
    if strategy.gradient_checkpointing == "partial":
        blocks = blocks[: strategy.checkpointed_blocks]
    return blocks[len(blocks) - strategy.swap_blocks :] if strategy.swap_blocks else []


def on_host(blocks: Iterable[tuple[str, nn.Module]]) -> frozenset[str]:
    """Full names of the weights that never need to be on the device as a whole: frozen ones of swapped blocks."""
    return frozenset(
        f"{prefix}.{name}"
        for prefix, block in blocks
        for name, parameter in block.named_parameters()
        if not parameter.requires_grad
    )


def _taken(block: nn.Module, device: torch.device) -> _Waiting:
    """Moves a block's frozen weights from wherever they are into one piece of host RAM."""
    weights, end = [], 0
    for name, parameter in block.named_parameters():
        if parameter.requires_grad:
            continue
        if type(parameter) is not nn.Parameter or not parameter.is_floating_point() or parameter.element_size() == 1:
            fault = f"swap_blocks cannot move {name}, a {type(parameter.data).__name__} of {parameter.dtype}"
            raise VplanError(fault, "use --weights-dtype bf16 with --swap-blocks, or no swap")
        weights.append((parameter, end))
        end += -(-parameter.numel() * parameter.element_size() // ALIGNMENT) * ALIGNMENT
    waiting = _Waiting(weights, host_bytes(end, pinned=device.type == "cuda"))
    for parameter, start in weights:
        source = parameter.data.reshape(-1).view(torch.uint8)
        waiting.host[start : start + source.numel()].copy_(source)
    waiting.show(waiting.host)
    return waiting
