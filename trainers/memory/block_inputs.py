"""Keeps the inputs of checkpointed blocks between forward and backward in another form than unchanged on the GPU."""

from __future__ import annotations

import abc
import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class BlockInputs(abc.ABC):
    """The inputs of one model's checkpointed blocks. Call `begin` before each forward of the model.

    Only tensors that one block passes to the next are packed. Tensors that all blocks are given (text, modulation,
    tables) are on the GPU once in any case, and so is the first block's input, the output of the patch embedding.
    """

    def __init__(self) -> None:
        self._seen: list[weakref.ref[Tensor]] = []
        self._call = -1

    def begin(self) -> None:
        """Starts a new forward of the model."""
        self._call, self._seen = -1, []

    @contextlib.contextmanager
    def around(self, *arguments: Any) -> Iterator[None]:
        """A context around the checkpoint of the next block, which is called with these arguments."""
        self._call += 1
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        shared = [reference() for reference in self._seen]
        # A tensor that an earlier block was given too is shared by all blocks, so it is not packed.
        packed = {
            tensor.data_ptr()
            for tensor in tensors
            if self._call and not any(tensor is parameter for parameter in shared)
        }
        self._seen += [weakref.ref(tensor) for tensor in tensors]
        call = self._call

        def pack(tensor: Tensor) -> object:
            return self.pack(call, tensor) if tensor.data_ptr() in packed else tensor

        # Non-reentrant checkpointing saves the block's arguments through these hooks, and asks for them in backward.
        with torch.autograd.graph.saved_tensors_hooks(pack, self.unpack):
            yield

    @abc.abstractmethod
    def pack(self, call: int, tensor: Tensor) -> object:
        """What to keep in place of an input of the ``call``-th block, counted from 0 in the order of calls."""

    @abc.abstractmethod
    def unpack(self, packed: Any) -> Tensor:
        """Restores an input from what `pack` returned, or from the tensor itself if it was not packed."""
