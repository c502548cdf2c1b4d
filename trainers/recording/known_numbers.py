"""Computes the real values of integer and boolean fake tensors on which the sizes of others depend.

Qwen-Image-2.1 reads from a mask which positions of its sequence are the image's, how often each is repeated and where
its image begins. Integer and boolean tensors whose inputs are all known are computed here for real, next to the fake
ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from trainers.recording.constant_values import Uniform, written_arguments

MOST = 1 << 23
"""Elements of the largest tensor that is computed. Masks over all pairs of tokens have more, and no length depends on
them."""

WHOLE = (torch.bool, torch.int32, torch.int64)

RANDOM = ("aten.empty", "aten.new_empty", "aten.rand")
"""Prefixes of operators whose values are undefined or random."""


class _UnknownError(Exception):
    """The values of a tensor are not known."""


class KnownNumbers(Uniform):
    """Computes the values of every operator all of whose arguments are known, and keeps them by storage."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[int, Tensor] = {}
        """storage -> a real tensor with its values"""

    def number(self, tensor: Tensor) -> int | None:
        """The value of a tensor with one element; None if that is not known."""
        real = self._known(tensor)
        if real is None:
            return super().number(tensor)
        with _disable_current_modes():
            return int(real.item())

    def forget(self, storage: int) -> None:
        super().forget(storage)
        self._numbers.pop(storage, None)

    def call(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        known = self._worked_out(func, name, args, kwargs)
        if known is None:
            return super().call(func, name, args, kwargs)
        if name == "aten.nonzero":
            out = args[0].new_empty(known.shape, dtype=torch.long)
        elif name == "aten.repeat_interleave":
            out = super().call(func, name, args, {**kwargs, "output_size": known.numel()})
        else:
            out = super().call(func, name, args, kwargs)
        if isinstance(out, FakeTensor) and out.is_contiguous() and not out.storage_offset():
            with _disable_current_modes():
                self._numbers[out.untyped_storage()._cdata] = known.contiguous().flatten()
        return out

    def _worked_out(self, func: Any, name: str, args: Any, kwargs: Any) -> Tensor | None:
        """The real result of an operator; None if it is not known, is a view, or is no integer or boolean tensor."""
        given = tree_leaves((args, kwargs))
        if name.startswith(RANDOM) or not (kwargs.get("dtype") in WHOLE or any(map(_is_whole, given))):
            return None
        with _disable_current_modes(), torch.no_grad():
            try:
                real_args, real_kwargs = tree_map(self._real, (args, kwargs))
            except _UnknownError:
                return None
            made = func(*real_args, **real_kwargs)
        if not _is_whole(made) or made.numel() > MOST:
            return None
        held = {numbers.untyped_storage().data_ptr() for numbers in self._numbers.values()}
        is_view = made.untyped_storage().data_ptr() in held
        return made if written_arguments(func) or not is_view else None

    def _indices(self, index: Tensor | None) -> list[Tensor | None]:
        real = self._known(index) if index is not None and index.dtype == torch.bool else None
        if index is None or real is None:
            return super()._indices(index)
        with _disable_current_modes():
            count = int(real.sum())
        return [index.new_empty((count,), dtype=torch.long) for _ in range(index.ndim)]

    def _known(self, tensor: Tensor) -> Tensor | None:
        with _disable_current_modes():
            try:
                real: Tensor = self._real(tensor)
            except _UnknownError:
                return None
        return real

    def _real(self, value: Any) -> Any:
        """An argument as a real tensor. Raises an _UnknownError for a tensor whose values are not known."""
        if not isinstance(value, Tensor):
            return value
        if not _is_whole(value) or value.numel() > MOST:
            raise _UnknownError
        if not isinstance(value, FakeTensor):
            return value
        held = self._numbers.get(value.untyped_storage()._cdata)
        if held is None or held.dtype != value.dtype:
            raise _UnknownError
        return held.as_strided(value.shape, value.stride(), value.storage_offset())


def _is_whole(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype in WHOLE
