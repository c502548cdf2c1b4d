"""What a checkpointed block is given, between its forward and its backward: by another way than on the GPU as it is."""

from __future__ import annotations

import abc
import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class BlockInputs(abc.ABC):
    """The inputs of one model's checkpointed blocks, call by call. `begin` is for each forward of the model.

    Only what one block hands to the next is packed. What all blocks are given alike (text, modulation, tables) is on
    the GPU once whatever happens, and the first block's input is what patches were made into.
    """

    def __init__(self) -> None:
        self._seen: list[weakref.ref[Tensor]] = []
        self._call = -1

    def begin(self) -> None:
        """Starts a new forward of the model; call it before each."""
        self._call, self._seen = -1, []

    @contextlib.contextmanager
    def around(self, *arguments: Any) -> Iterator[None]:
        """A context around the checkpoint of the next block, which is called with these arguments."""
        self._call += 1
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        shared = [reference() for reference in self._seen]
        # What an earlier block was given too is of all blocks, and the first block's input is the patches: both stay.
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
        """What is kept in place of an input of the block that is called as number ``call``, from 0."""

    @abc.abstractmethod
    def unpack(self, packed: Any) -> Tensor:
        """The input again, from what is kept: what `pack` made, or the tensor itself where that was not asked."""
