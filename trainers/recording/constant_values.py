"""Tracks which fake tensors are filled with one number, which the fake mode does not know.

Some models select tokens by a mask (Mochi, HunyuanVideo 1.5), so that sizes depend on values, and a fake tensor has
none. Recordings use prompts that fill their masks and conditions that are absent (all zero). This module propagates
such constants through the few operators in between, and answers where the fake mode cannot.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from trainers.recording.repeated_calls import CALLS

FILLED = {"aten.ones": 1, "aten.ones_like": 1, "aten.zeros": 0, "aten.zeros_like": 0}
COPIES = frozenset({"aten._to_copy", "aten.clone"})
"""Operators that copy their input's numbers. Views share the input's storage, and need no entry."""


@functools.cache
def written_arguments(func: Any) -> tuple[int, ...]:
    """The positions of the arguments that an operator writes to."""
    return tuple(position for position, argument in enumerate(func._schema.arguments) if argument.is_write)


class Uniform:
    """The storages of a recording that are known to be filled with one number."""

    def __init__(self) -> None:
        self._number: dict[int, int] = {}

    def of(self, tensor: object) -> int | None:
        """The number that a tensor is filled with; None if that is not known."""
        return self._number.get(tensor.untyped_storage()._cdata) if isinstance(tensor, Tensor) else None

    def number(self, tensor: Tensor) -> int | None:
        """The value of a tensor with one element; None if that is not known."""
        return self.of(tensor)

    def forget(self, storage: int) -> None:
        """Drops a storage (by its ``_cdata``) that was freed or written to."""
        self._number.pop(storage, None)

    def call(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """``func(*args, **kwargs)``; results that depend on values follow from the known numbers."""
        if places := written_arguments(func):  # an argument left to its default is not written to
            for tensor in tree_leaves([args[position] for position in places if position < len(args)]):
                if isinstance(tensor, Tensor):
                    self.forget(tensor.untyped_storage()._cdata)
        number = self.of(args[0]) if args else None
        if name in FILLED:
            return self._note(CALLS.call(func, args, kwargs), FILLED[name])
        if name in ("aten.index", "aten.index_put"):
            indices = [row for index in args[1] for row in self._indices(index)]
            return CALLS.call(func, (args[0], indices, *args[2:]), kwargs)
        if number is not None:
            return self._from_number(func, name, number, args, kwargs)
        return CALLS.call(func, args, kwargs)

    def _from_number(self, func: Any, name: str, number: int, args: Any, kwargs: Any) -> Any:
        if name == "aten._local_scalar_dense":
            return bool(number) if args[0].dtype == torch.bool else number
        if name == "aten.nonzero":
            rows = args[0].numel() if number else 0
            return args[0].new_empty((rows, args[0].ndim), dtype=torch.long)
        out = CALLS.call(func, args, kwargs)
        if name in COPIES:
            self._note(out, number)
        elif name == "aten.bitwise_not" and args[0].dtype == torch.bool:
            self._note(out, 1 - number)
        elif name == "aten.eq":
            other = self.of(args[1]) if isinstance(args[1], Tensor) else args[1]
            if other is not None:
                self._note(out, int(number == other))
        elif name == "aten.all":
            self._note(out, int(bool(number)))
        return out

    def follow_mask(self, name: str, args: Any, out: Any) -> None:
        """Also follows operators by which code counts the tokens of a mask: concatenation and sum."""
        if name in ("aten.new_ones", "aten.new_zeros"):
            self._note(out, int(name == "aten.new_ones"))
        elif name == "aten.cat":
            numbers = {self.of(part) for part in args[0]}
            if len(numbers) == 1 and (number := numbers.pop()) is not None:
                self._note(out, number)
        elif name == "aten.sum" and (number := self.of(args[0])) is not None:
            self._note(out, number * (args[0].numel() // max(1, out.numel())))

    def _indices(self, index: Tensor | None) -> list[Tensor | None]:
        """A boolean mask as index tensors, one for each of its dimensions, as CUDA expands it
        (ATen/native/IndexingUtils.h); any other index unchanged."""
        number = self.of(index)
        if index is None or index.dtype != torch.bool or number is None:
            return [index]
        rows = index.numel() if number else 0
        return [index.new_empty((rows,), dtype=torch.long) for _ in range(index.ndim)]

    def _note(self, out: Tensor, number: int) -> Tensor:
        self._number[out.untyped_storage()._cdata] = number
        return out
