"""Block swap: the weights of some checkpointed blocks are kept in pinned host RAM and stream through a ring of two
buffers on the GPU.

A block's weights are fetched when the block before it begins, in forward and again in backward, where recomputation
calls the blocks from the last to the first. This is correct only with checkpointing: between a block's recomputation
and the end of its backward no other block runs, so the weights that autograd saved and those that a module reads again
are the same bytes. Without checkpointing they would differ (autograd holds a linear layer's old storage, while norms
and tables read the new one). Frozen weights are never copied back (musubi-tuner ``--block_swap_h2d_only``). Trained
weights are stepped inside backward, while they are in a buffer, and copied back before another block takes the buffer.

Blocks go to host RAM one by one, while the model is loaded. Frozen ones are the same in every rank that has the whole
model, so the ranks of a computer hold them together (`trainers.memory.shared_ram`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from planner.catalog.profiles import ModelProfile
from planner.spec.job import SPLIT, Strategy
from planner.tape.parameter_table import is_of_adapter
from trainers.memory.pinned import pinned_tensor
from trainers.memory.quantise import Place, places
from trainers.memory.shared_ram import SharedRam, share_ram

ALIGNMENT = 256
"""Alignment of each weight in a buffer, bytes, as in an allocation of its own."""

SLOTS = 2

CAST = (torch.float8_e4m3fn,)
"""Storage dtypes of weights that a layer casts while it runs (`trainers.memory.quantise`)."""


class _SwappedTensor(NamedTuple):
    """One of a block's tensors: where its module looks for it, and which bytes of a buffer hold it."""

    place: Place
    start: int
    """byte in the buffer"""
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size

    def point_into(self, buffer: Tensor) -> None:
        """Makes the module read the tensor from a buffer of bytes."""
        self.place.put(buffer[self.start : self.start + self.nbytes].view(self.dtype).view(self.shape))


@dataclass
class _BlockOnHost:
    """One block's weights in host RAM."""

    parts: list[_SwappedTensor]
    host: Tensor
    """all of them, bytes"""
    trained: bool
    """whether some are trained, so that a buffer has newer weights after a backward"""

    def point_into(self, buffer: Tensor) -> None:
        """Makes the block read its weights from a buffer of bytes."""
        for part in self.parts:
            part.point_into(buffer)


Fill = Callable[[str, Tensor], None]
"""Fills a newly allocated weight, given its full name."""


class BlocksToHost:
    """The swapped blocks of a model that is being loaded, on their way to host RAM. All ranks of a computer load the
    same model together.

    ``blocks``: in execution order, with their full names. ``shared``: for blocks of which nothing is trained.
    """

    def __init__(
        self, blocks: Sequence[tuple[str, nn.Module]], device: torch.device, shared: SharedRam | None = None
    ) -> None:
        self.modules = [block for _, block in blocks]
        self.names = on_host(blocks)
        """full names of the weights that go to host RAM"""
        self._prefixes = [f"{name}." for name, _ in blocks]
        self._device = device
        self._shared = shared
        self._loading: int | None = None
        """the block whose weights are being loaded"""
        self._on_host: dict[int, _BlockOnHost] = {}

    def filling(self, fill: Fill | None) -> Fill:
        """Fills weights as ``fill`` does, and moves each block to host RAM once its weights are there. So at most one
        of them is in a rank's own memory while the model is loaded. The weights of a block come one after another."""

        def fill_and_move(name: str, weight: Tensor) -> None:
            block = next((index for index, prefix in enumerate(self._prefixes) if name.startswith(prefix)), None)
            if block != self._loading:
                self._move(self._loading)
            self._loading = block
            if fill is not None:
                fill(name, weight)

        return fill_and_move

    def on_host(self) -> list[_BlockOnHost]:
        """All blocks, after the model was loaded; waits for the other ranks of the computer."""
        for block in range(len(self.modules)):
            self._move(block)
        if self._shared is not None:
            self._shared.complete()
            self._shared = None
        return [self._on_host[block] for block in range(len(self.modules))]

    def _move(self, block: int | None) -> None:
        if block is not None and block not in self._on_host:
            self._on_host[block] = _to_host(self.modules[block], self._device, self._shared)


def blocks_to_host(
    model: nn.Module, profile: ModelProfile, strategy: Strategy, device: torch.device
) -> BlocksToHost | None:
    """The blocks that a strategy swaps, to be moved to host RAM while the built model is loaded; None without any. All
    ranks call it together."""
    blocks = swapped_blocks(model, profile, strategy)
    if not blocks:
        return None
    frozen = not any(weight.requires_grad for _, block in blocks for _, weight in _weights_that_move(block))
    alike = frozen and strategy.sharding not in SPLIT  # an engine that splits moves and replaces weights itself
    return BlocksToHost(blocks, device, share_ram(device) if alike else None)


class BlockSwap:
    """The swapped blocks of a loaded model, and the ring of buffers on the GPU.

    ``ring_owner``: the swap of another model of the same architecture, with which to share one ring in turn (see
    `release_ring`).
    """

    def __init__(self, moving: BlocksToHost, device: torch.device, ring_owner: BlockSwap | None = None) -> None:
        self.device = device
        blocks = moving.modules
        self.blocks = moving.on_host()
        largest = max(waiting.host.numel() for waiting in self.blocks)
        slots = 0 if ring_owner else min(SLOTS, len(blocks))
        own_ring = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(slots)]
        self.ring: list[Tensor] = ring_owner.ring if ring_owner else own_ring
        self._holds: list[int | None] = [None] * len(self.ring)
        """which block is in each slot"""
        self._copying = torch.cuda.Stream(device) if device.type == "cuda" else None
        if ring_owner:
            self._copying = ring_owner._copying
        self._ready: list[torch.cuda.Event | None] = [None] * len(self.ring)
        """the end of the copy into each slot"""
        self._newer: set[int] = set()
        """blocks that were stepped since they were fetched"""
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(self._before(index))
            self._keep_in_ring(index, block)

    def _before(self, index: int) -> Any:
        def before(_module: nn.Module, _arguments: Any) -> None:
            self.make_ready(index)

        return before

    def _keep_in_ring(self, index: int, block: nn.Module) -> None:
        """Adds hooks for layerwise casting (fp8), which leaves a layer with new copies of its weights after a forward:
        they point the layer at the ring again, which has the same numbers, so that the copies are freed."""
        parts = {id(part.place.holder): part for part in self.blocks[index].parts if part.dtype in CAST}

        def behind(swapped: list[_SwappedTensor]) -> Any:
            def after(_module: nn.Module, _arguments: Any, _output: Any) -> None:
                for part in swapped:
                    part.point_into(self.ring[self._holds.index(index)])

            return after

        for module in block.modules():
            if swapped := [parts[id(weight)] for weight in module.parameters(recurse=False) if id(weight) in parts]:
                module.register_forward_hook(behind(swapped))

    def make_ready(self, index: int) -> None:
        """Makes sure that a block's weights are on the device before it computes, and starts to fetch those of the
        block that runs next (in backward, the one before)."""
        # Only the GPU waits for a copy that was started ahead; the CPU goes on and queues the block's kernels.
        slot = self._holds.index(index) if index in self._holds else self._fetch(index)
        if (ready := self._ready[slot]) is not None:
            torch.cuda.current_stream(self.device).wait_event(ready)
        # Recomputation calls the same hook as the forward; only the autograd engine knows which of the two it is.
        in_backward = torch._C._current_graph_task_id() != -1  # torch.utils.checkpoint tells it the same way
        if in_backward and self.blocks[index].trained:  # its backward and step run before any other block does
            self._newer.add(index)
        following = index - 1 if in_backward else index + 1
        if 0 <= following < len(self.blocks) and following not in self._holds:
            self._fetch(following, keep=slot)

    def release_ring(self) -> None:
        """Leaves the ring to another model. This model must have finished running, and the ring must not hold trained
        weights that were not copied back."""
        assert not self._newer, "what was trained in the ring would be lost"
        for index in self._holds:
            if index is not None:
                self.blocks[index].point_into(self.blocks[index].host)
        self._holds = [None] * len(self.ring)

    def _fetch(self, index: int, keep: int | None = None) -> int:
        """Copies a block's weights into a slot, after the computation that still uses it; returns the slot."""
        # The block in slot ``keep`` is computing; the other slot is free as soon as the work queued so far is done.
        slot = next(number for number in range(len(self.ring)) if number != keep)
        if self._copying is None:
            self._exchange(slot, index)
        else:
            self._copying.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._copying):
                self._exchange(slot, index)
                self._ready[slot] = self._copying.record_event()
        self.blocks[index].point_into(self.ring[slot])
        self._holds[slot] = index
        return slot

    def _exchange(self, slot: int, index: int) -> None:
        """Copies a slot's trained weights back to the host, and another block's weights into the slot."""
        if (before := self._holds[slot]) is not None:
            leaving = self.blocks[before]
            if before in self._newer:  # it was stepped in its backward, before any other block ran
                leaving.host.copy_(self.ring[slot][: leaving.host.numel()], non_blocking=True)
                self._newer.remove(before)
            leaving.point_into(leaving.host)  # so that a stray use fails instead of reading another block's weights
        arriving = self.blocks[index].host
        self.ring[slot][: arriving.numel()].copy_(arriving, non_blocking=True)


def swapped_blocks(model: nn.Module, profile: ModelProfile, strategy: Strategy) -> list[tuple[str, nn.Module]]:
    """(full name, block) of the blocks that a strategy swaps, in execution order: the last ``swap_blocks`` of the
    checkpointed blocks."""
    blocks = [
        (f"{stack.list}.{name}", block)
        for stack in profile.stacks
        for name, block in model.get_submodule(stack.list).named_children()
    ]
    if strategy.gradient_checkpointing == "partial":
        blocks = blocks[: strategy.checkpointed_blocks]
    return blocks[len(blocks) - strategy.swap_blocks :] if strategy.swap_blocks else []


def on_host(blocks: Iterable[tuple[str, nn.Module]]) -> frozenset[str]:
    """Full names of the weights that are kept in host RAM: those of swapped blocks, except adapters."""
    return frozenset(f"{prefix}.{name}" for prefix, block in blocks for name, _ in _weights_that_move(block))


def _weights_that_move(block: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in block.named_parameters() if not is_of_adapter(name))


def _to_host(block: nn.Module, device: torch.device, shared: SharedRam | None = None) -> _BlockOnHost:
    """Moves a block's weights from any device into one buffer of host RAM; into ``shared`` only one rank copies
    them."""
    parts, end, trained = [], 0, False
    for name, parameter in _weights_that_move(block):
        trained |= parameter.requires_grad
        for _, place in places(name, parameter):
            tensor = place.tensor
            parts.append(_SwappedTensor(place, end, tensor.nbytes, tensor.dtype, tensor.shape))
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    host, fills = shared.take(end) if shared else (pinned_tensor(end, pinned=device.type == "cuda"), True)
    for part in parts:
        if fills:
            source = part.place.tensor.detach().reshape(-1).view(torch.uint8)
            host[part.start : part.start + part.nbytes].copy_(source)
        part.point_into(host)
    return _BlockOnHost(parts, host, trained)
