"""Checkpoint offload: the inputs of checkpointed blocks are kept in pinned host RAM until their backward.

Copies overlap with computation: a block's input is copied out while the block runs, and back in while the following
block is in backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainers.memory.block_inputs import BlockInputs
from trainers.memory.pinned import pinned_tensor


@dataclass(frozen=True)
class _InputOnHost:
    """A tensor that was copied to host RAM: the ``number``-th packed input of the ``call``-th block."""

    call: int
    number: int
    host: Tensor
    """its bytes"""
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class InputsOnHost(BlockInputs):
    """Keeps inputs in host RAM."""

    def __init__(self) -> None:
        super().__init__()
        self._hosts: dict[tuple[int, int], Tensor] = {}
        """(call, number) -> host RAM, reused in every step"""
        self._away: dict[int, list[_InputOnHost]] = {}
        self._back: dict[tuple[int, int], tuple[Tensor, torch.cuda.Event | None]] = {}
        self._leaving: list[tuple[Tensor, torch.cuda.Event]] = []
        self._copying: torch.cuda.Stream | None = None

    def begin(self) -> None:
        self._await_copies()
        super().begin()
        self._away.clear()
        self._back.clear()

    @contextmanager
    def around(self, *arguments: Any) -> Iterator[None]:
        self._await_copies()
        with super().around(*arguments):
            yield

    def pack(self, call: int, tensor: Tensor) -> _InputOnHost:
        """Copies a tensor to host RAM. It is held on the GPU until the next block begins and has waited for the
        copy."""
        entries = self._away.setdefault(call, [])
        key = (call, len(entries))
        source = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if key not in self._hosts or self._hosts[key].numel() < source.numel():
            self._hosts[key] = pinned_tensor(source.numel(), pinned=tensor.is_cuda)
        host = self._hosts[key][: source.numel()]
        if (stream := self._copy_stream(tensor.device)) is None:
            host.copy_(source)
        else:
            with torch.cuda.stream(stream):
                host.copy_(source, non_blocking=True)
                self._leaving.append((source, stream.record_event()))
        entries.append(_InputOnHost(*key, host, tensor.shape, tensor.dtype, tensor.device))
        return entries[-1]

    def unpack(self, packed: Tensor | _InputOnHost) -> Tensor:
        """The tensor, back on the GPU; also starts to fetch the inputs of the block whose backward comes next."""
        self._await_copies()
        if isinstance(packed, Tensor):
            return packed
        for entry in (packed, *self._away.get(packed.call - 1, ())):
            if (entry.call, entry.number) not in self._back:
                self._back[entry.call, entry.number] = self._fetch(entry)
        tensor, ready = self._back.pop((packed.call, packed.number))
        if ready is not None:
            torch.cuda.current_stream(tensor.device).wait_event(ready)
        return tensor

    def _fetch(self, entry: _InputOnHost) -> tuple[Tensor, torch.cuda.Event | None]:
        tensor = torch.empty(entry.shape, dtype=entry.dtype, device=entry.device)
        target = tensor.reshape(-1).view(torch.uint8)
        if (stream := self._copy_stream(entry.device)) is None:
            target.copy_(entry.host)
            return tensor, None
        with torch.cuda.stream(stream):
            target.copy_(entry.host, non_blocking=True)
            return tensor, stream.record_event()

    def _copy_stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """The stream for copies, made to wait for all work queued on the GPU so far; None without a GPU."""
        if device.type != "cuda":
            return None
        self._copying = self._copying or torch.cuda.Stream(device)
        self._copying.wait_stream(torch.cuda.current_stream(device))
        return self._copying

    def _await_copies(self) -> None:
        """Makes later computation wait for the copies to host RAM, and frees their sources, which may be overwritten
        then."""
        for source, copied in self._leaving:
            torch.cuda.current_stream(source.device).wait_event(copied)
        self._leaving.clear()
