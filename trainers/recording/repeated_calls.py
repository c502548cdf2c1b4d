"""A cache of what operators return for fake tensors.

The same block runs several times in a recording, again in recomputation, and again in the next recording. torch's fake
mode has a cache too, but looking up and rebuilding its results took more than half of a recording's time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensor

aten = torch.ops.aten

PLAIN = frozenset(
    {bool, complex, float, int, str, type(None), torch.device, torch.dtype, torch.layout, torch.memory_format}
)
"""Types of arguments other than fake tensors that affect a result only by their value."""

NEVER = frozenset({torch.Tag.data_dependent_output, torch.Tag.inplace_view})
"""Tags of operators that are not cached."""

BUILT_IN = frozenset({"aten", "prims"})
"""Libraries whose operators have no state."""

MOST = 20_000
"""Calls in the cache, of some 2 KB each."""
LONGEST = 64
"""Longest list argument of a cached call: an optimizer's list of all parameters would take 300 KB."""


class KeptTensor(NamedTuple):
    """The description of a tensor that a call returns."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    source: int | None
    """index of the argument tensor whose storage it shares; None if it has its own storage"""


Result = KeptTensor | int | None
"""One result of a call; an int is the index of the argument tensor that the call returns unchanged."""


class RepeatedCalls:
    """Cached results, by operator and everything that they depend on: shapes, strides, dtypes and plain values."""

    def __init__(self) -> None:
        self._results: dict[tuple[Any, ...], tuple[type, tuple[Result, ...]] | None] = {}
        self._kept: dict[Any, bool] = {}
        """whether results of an operator are cached at all"""

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """``func(*args, **kwargs)``, from the cache if possible."""
        kept = self._kept.get(func)
        if kept is None:
            kept = self._kept[func] = func.namespace in BUILT_IN and NEVER.isdisjoint(func.tags)
        if not kept:
            return func(*args, **kwargs)
        tensors: list[FakeTensor] = []
        key = _key(func, args, kwargs, tensors)
        if key is None or not tensors:
            return func(*args, **kwargs)
        if key not in self._results:
            out = func(*args, **kwargs)
            if len(self._results) >= MOST:
                self._results.clear()
            is_same = not func._schema.is_mutable or _key(func, args, kwargs, []) == key
            self._results[key] = _results(func, tensors, out) if is_same else None
            return out
        found = self._results[key]
        if found is None:
            return func(*args, **kwargs)
        container, results = found
        made = [_made(result, tensors) for result in results]
        return made[0] if container is FakeTensor else container(made)


def _key(func: Any, args: Any, kwargs: Any, tensors: list[FakeTensor]) -> tuple[Any, ...] | None:
    """The cache key of a call; None if its result depends on more. Adds the argument tensors to ``tensors``."""
    views = aten.view.default in op_implementations_dict  # not under `trainers.recording.fakes.views_as_eagerly`
    words: list[Any] = [func, views, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
    for name, value in kwargs.items():
        words.append(name)
        if not _describe((value,), words, tensors):
            return None
    return tuple(words) if _describe(args, words, tensors) else None


def _describe(values: Any, words: list[Any], tensors: list[FakeTensor]) -> bool:
    """Adds to ``words`` what a result depends on in some arguments; False if an argument cannot be described."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.layout is not torch.strided or value.is_conj() or value.is_neg():
                return False
            words += (
                value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device,
                value.requires_grad,
            )  # fmt: skip
            tensors.append(value)
        elif kind in PLAIN:
            words += (kind, value)
        elif kind is list or kind is tuple:
            words += (kind, len(value))
            if len(value) > LONGEST or not _describe(value, words, tensors):
                return False
        else:
            return False
    return True


def _results(func: Any, tensors: list[FakeTensor], out: Any) -> tuple[type, tuple[Result, ...]] | None:
    """The description of what a call returned, from which it can be rebuilt; None if that is not possible."""
    if type(out) not in (FakeTensor, list, tuple):
        return None
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    own: set[int] = set()
    results: list[Result] = []
    for tensor in [out] if isinstance(out, Tensor) else out:
        same = next((number for number, given in enumerate(tensors) if given is tensor), None)
        if tensor is None or same is not None:
            results.append(same)
            continue
        if type(tensor) is not FakeTensor or tensor.constant is not None or tensor.layout is not torch.strided:
            return None
        if tensor.is_conj() or tensor.is_neg() or func._schema.is_mutable:
            return None
        storage = tensor.untyped_storage()
        source = storages.index(storage._cdata) if storage._cdata in storages else None
        if source is None:
            spans = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            whole = spans * tensor.itemsize if tensor.numel() else 0
            if storage._cdata in own or tensor.storage_offset() or storage.nbytes() != whole or tensor.requires_grad:
                return None
            own.add(storage._cdata)
        shape, offset = tuple(tensor.shape), int(tensor.storage_offset())
        results.append(KeptTensor(shape, tensor.stride(), offset, tensor.dtype, tensor.fake_device, source))
    return type(out), tuple(results)


def _made(result: Result, tensors: list[FakeTensor]) -> FakeTensor | None:
    if not isinstance(result, KeptTensor):
        return None if result is None else tensors[result]
    shape, stride, offset, dtype, device, source = result
    with torch._C._DisableTorchDispatch():
        if source is None:
            meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        else:
            meta = torch.empty(0, dtype=dtype, device="meta")
            meta.set_(tensors[source].untyped_storage(), offset, shape, stride)
        return FakeTensor(tensors[0].fake_mode, meta, device)


CALLS = RepeatedCalls()
"""The cache of this process."""
