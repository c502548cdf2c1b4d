"""Computes the values of small tensors, so that masks, schedules, lengths and seeds are what they are on a real card.

The virtual card's memory is host memory. After torch has run an operator as usual, with all its allocations, the same
operator runs on CPU tensors over the same bytes, if all of its tensors are small. Large tensors have no values: they
count as zeros, so that a sum is 0 and no gradient is infinite. What is computed from them is marked unknown, and the
answer names the lines that read it. An unknown value is always finite: 0/0 of missing values must not end a run as NaN.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from .hollow_tensors import HANDLED, MADE, HollowTensors
from .large_zeros import LargeZeros

SMALL_BYTES = 65536
"""As the copies that the virtual card makes (virtual_gpu.h)."""

OVERWRITING = {
    "fill_", "zero_", "copy_", "uniform_", "normal_", "random_", "bernoulli_", "exponential_",
    "_foreach_copy_", "_foreach_zero_",
}  # fmt: skip
"""What these write into their first argument, and any operator into `out`, does not depend on what was there."""

GATHERED = {"all_gather_copy_in": 1}
"""FSDP2 copies a rank's shares into their place in a buffer, whose other places the gathering that follows fills."""

COMPUTED_NAMESPACES = {"aten", "fsdp"}
"""Whose operators have CPU kernels that do the same. Those of FSDP2 put shares together and apart
(torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py)."""

FUNCTIONAL = "_c10d_functional"
COLLECTIVE_NAMESPACES = {"c10d", FUNCTIONAL}
SENDING_FROM_SECOND = ("_allgather", "allgather", "_reduce_scatter", "reduce_scatter", "alltoall", "gather", "scatter")
RECEIVING = {"recv_", "recv_any_source_", "irecv", "batch_p2p_ops", "gather_", "scatter_"}

WRAPPERS = {"DTensor", "AsyncCollectiveTensor"}
"""Classes of tensors around plain ones."""

READING = {"_local_scalar_dense", "equal", "is_nonzero", "_is_all_true", "_is_any_true"}
FRESH = {"lift_fresh", "lift"}
"""What `torch.tensor(data)` ends with: its values were copied from Python."""

COPYING = {"_to_copy", "copy_"}
FILLING = {"zeros_like": 0, "new_zeros": 0, "ones_like": 1, "new_ones": 1}
"""What these write does not depend on the tensor whose format they take, however large that is."""

UNINITIALISED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}

BY_VALUE = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave", "bincount"}
"""Operators whose result has a shape that depends on values: the card's own result would be empty."""

BY_NUMBER = {"self_int"}
"""Overloads that are told what the others read: `repeat_interleave` with one number of repeats for all."""

HOLDING_FOR_ALL = {"all"}
"""Of a large tensor these say yes: what they are asked is whether all of it is finite."""

INDEXING = {"index", "index_put", "index_put_", "_unsafe_index"}
"""Their second argument is a list of indices; those that are masks are counted."""


def watch_values(torch: Any, told: Callable[[str], None], hollow: HollowTensors) -> None:
    """Follow every operator of this thread, and of its backward, from here on.

    `told` gets the name of an operator that reads a value nobody knows; `hollow` answers for work in host RAM on such
    values.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    values = _Values(torch, told, hollow)

    class SmallValues(TorchDispatchMode):  # type: ignore[misc, unused-ignore]  # torch's class is untyped in places
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            """Else torch turns its compiler off and on again around every operator, which takes longer than we do."""
            return False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(kind.__name__ in WRAPPERS for kind in types):
                return NotImplemented  # its own handler comes first, and what it does to its shard comes here
            if any(kind not in values.plain for kind in types):  # a fake tensor, or anybody's own
                return func(*args, **(kwargs or {}))
            return values.run(func, args, kwargs or {})

    mode: Any = SmallValues
    mode().__enter__()  # for good: the process ends with it


class _OperatorTraits(NamedTuple):
    """What decides how an operator is followed; looked up once for each, as schemas are slow to ask."""

    name: str
    """without namespace and overload"""
    is_computed: bool
    """whether it can be tried on the CPU"""
    is_collective: bool
    is_by_value: bool
    """whether its result's shape, or how much it writes, can depend on values"""
    is_view: bool
    is_mutable: bool
    only_returns: bool
    """whether new tensors are all that comes of it"""
    overwritten: int | None
    """index of the argument whose old values do not matter"""
    out: tuple[str, ...]
    """names of arguments that only receive"""

    @property
    def only_writes(self) -> bool:
        """Whether nothing that was there before counts in what it gives or writes."""
        return self.only_returns or self.overwritten == 0 or bool(self.out)

    @classmethod
    def of(cls, func: Any) -> _OperatorTraits:
        name = func._schema.name.partition("::")[2]
        mutable = bool(func._schema.is_mutable)
        special = name in READING | COPYING | BY_VALUE | FRESH
        written = [argument for argument in func._schema.arguments if argument.alias_info is not None]
        return cls(
            name=name,
            is_computed=func.namespace in COMPUTED_NAMESPACES and name not in UNINITIALISED,
            is_collective=func.namespace in COLLECTIVE_NAMESPACES,
            is_by_value=name in BY_VALUE | INDEXING and func._overloadname not in BY_NUMBER,
            is_view=func.is_view and name not in FRESH,
            is_mutable=mutable,
            only_returns=not mutable and not special,
            overwritten=0 if name in OVERWRITING else GATHERED.get(name),
            out=tuple(each.name for each in written if each.kwarg_only and each.alias_info.is_write),
        )


class _Values:
    """Which storages hold what they would hold on a card."""

    def __init__(self, torch: Any, told: Callable[[str], None], hollow: HollowTensors) -> None:
        self._torch = torch
        self._hollow = hollow
        self._told = told
        self._known: set[int] = set()
        self._parts: dict[int, list[tuple[int, int]]] = {}
        """of storages that are not known as a whole: ranges of bytes that are, in order"""
        self._zeros = LargeZeros(SMALL_BYTES)
        self._traits: dict[Any, _OperatorTraits] = {}
        self.plain = {torch.Tensor, torch.nn.Parameter, *filter(None, [getattr(torch.nn, "Buffer", None)])}
        self._random_state: Any = None

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operator's result on the card, with its values where they can be had."""
        traits = self._traits.get(func)
        if traits is None:
            traits = self._traits[func] = _OperatorTraits.of(func)
        if traits.is_collective:
            return self._collective(traits, func, args, kwargs)
        if traits.name in HANDLED:
            result = self._hollow.run(traits.name, func, args, kwargs)
            if result is not MADE:
                return result
        if traits.is_by_value and any(tensor.is_cuda for tensor in self._tensors((args, kwargs))):
            if traits.name in BY_VALUE:
                return self._by_value(func, args, kwargs, traits.name)
            args = self._without_masks(traits.name, args)
        zero = self._zeros.given(traits.name, args)
        result = func(*args, **kwargs)
        if traits.is_view:
            return result
        if not (traits.only_returns and self._all_are_large(result)):
            result = self._follow(traits, func, args, kwargs, result)
        if zero is not None:
            self._zeros.note(result, zero)
        return result

    def _all_are_large(self, result: Any) -> bool:
        """Whether all that an operator returned is too large to be computed, and unknown: most of them, so it is quick.

        A large tensor is never known, but its address may have been that of a small one.
        """
        tensors = (result,) if type(result) in self.plain else tuple(self._tensors(result))
        if not all(tensor.numel() * tensor.element_size() > SMALL_BYTES for tensor in tensors):
            return False
        for tensor in tensors:
            self._forget(tensor.data_ptr() - tensor.storage_offset() * tensor.element_size())
        return True

    def _follow(self, traits: _OperatorTraits, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """The operator's result again, its values computed or marked as unknown."""
        name = traits.name
        inputs, outputs = list(self._tensors((args, kwargs))), list(self._tensors(result))
        if not any(tensor.is_cuda for tensor in (*inputs, *outputs)):
            return result
        on_card = [tensor for tensor in outputs if tensor.is_cuda]  # `zeros_like` may make one elsewhere, as on meta
        if name in FRESH:
            for tensor in on_card:
                self._mark(tensor, _is_small(tensor), partly=False)
            return result
        if name in FILLING:
            self._fill(on_card, FILLING[name])
            for tensor in on_card:
                self._mark(tensor, _is_small(tensor), partly=False)
            return result
        known = all(self._is_known(tensor) for tensor in self._depended_on(traits, args, kwargs) if tensor.is_cuda)
        if name in READING:
            if not known:
                self._told(name)
            if name == "equal":  # its kernel ran inside it, and did nothing
                return self._are_equal(func, args, kwargs)
            return result if known else _finite_number(result)
        if name in COPYING and not known:  # to the host: `tolist`, `cpu`
            read = [tensor for tensor in outputs if not tensor.is_cuda and _is_small(tensor)]
            if read:
                self._told(name)
            self._make_finite(read)
        written = on_card
        zero = self._zeros.asked(name, inputs[0]) if len(inputs) == 1 and not known else None
        if zero is not None:
            self._fill(written, float(not zero))
            self._mark(written[0], True, partly=False)
            return result
        if traits.is_mutable:
            written += [tensor for tensor in self._mutated(func, args, kwargs) if tensor.is_cuda]
        computed = traits.is_computed and self._compute(func, args, kwargs, result, written)
        for tensor in written:
            self._mark(tensor, known and computed, partly=traits.is_mutable)
        if not computed and traits.only_writes:
            self._fill(written, float(name in HOLDING_FOR_ALL))
        elif not known:
            self._make_finite(written)
        return result

    def _are_equal(self, func: Any, args: Any, kwargs: Any) -> bool:
        """`torch.equal` over the same bytes; large tensors, taken as zeros, are equal where their shapes are."""
        inputs = list(self._tensors((args, kwargs)))
        if all(map(_is_small, inputs)):
            return bool(self._on_host(func, args, kwargs))
        return bool(inputs[0].shape == inputs[1].shape)

    def _depended_on(self, traits: _OperatorTraits, args: Any, kwargs: Any) -> Iterable[Any]:
        """Tensors whose values count in what the operator gives or writes."""
        yield from self._tensors([value for index, value in enumerate(args) if index != traits.overwritten])
        yield from self._tensors({word: value for word, value in kwargs.items() if word not in traits.out})

    def _make_finite(self, tensors: Iterable[Any]) -> None:
        """Missing values taken as zeros give 0/0 where the true ones would not: that is no NaN of the program."""
        for tensor in tensors:
            if _is_small(tensor) and tensor.is_floating_point() and tensor.dtype.itemsize > 1:
                (self._over(tensor) if tensor.is_cuda else tensor).nan_to_num_(0.0, 0.0, 0.0)

    def _fill(self, tensors: Iterable[Any], value: float) -> None:
        """What comes of large tensors is taken to come of zeros: memory that was used before holds anything."""
        for tensor in filter(_is_small, tensors):
            self._over(tensor).fill_(value)

    def _tensors(self, value: Any) -> Iterable[Any]:
        """All plain tensors in the arguments or the result of an operator."""
        if type(value) in self.plain:
            yield value
        elif isinstance(value, (list, tuple)):
            for item in value:
                yield from self._tensors(item)
        elif isinstance(value, dict):
            for item in value.values():
                yield from self._tensors(item)

    def _collective(self, traits: _OperatorTraits, func: Any, args: Any, kwargs: Any) -> Any:
        """Small ones are really made (virtual_gpu/nccl.c): what a rank brings decides what all get. What one rank alone
        sends to another is there too, but whether the sender knew it is not: it counts as unknown."""
        result = func(*args, **kwargs)
        if func.namespace == FUNCTIONAL:
            sends, gets = self._depended_on(traits, args, kwargs), [result, list(self._mutated(func, args, kwargs))]
        else:  # the first argument receives, and sends where no second one does
            sends, gets = self._tensors(args[1 if traits.name.startswith(SENDING_FROM_SECOND) else 0]), args[0]
        brought = list(sends)
        known = traits.name not in RECEIVING and all(_is_small(each) and self._is_known(each) for each in brought)
        whole = sum(each.numel() * each.element_size() for each in brought)
        for tensor in self._tensors(gets):
            if not tensor.is_cuda:
                continue
            self._mark(tensor, known and _is_small(tensor), partly=True)
            if "reduce_scatter" in traits.name and whole > SMALL_BYTES:  # as in nccl.c
                self._fill([tensor], 0.0)
            elif not known:
                self._make_finite([tensor])
        return result

    # ---- what is known

    def _is_known(self, tensor: Any) -> bool:
        place = tensor.untyped_storage().data_ptr()
        if place in self._known or tensor.numel() == 0:
            return True
        parts = self._parts.get(place)
        if parts is None or not tensor.is_contiguous():
            return False
        start, end = _extent(tensor)
        return any(first <= start and end <= last for first, last in parts)

    def _mark(self, tensor: Any, known: bool, partly: bool) -> None:
        """A part that is written says nothing of the rest: that was known before, or the parts make up all there is."""
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        self._zeros.forget(place)
        if not known:
            self._forget(place)
        elif not partly or tensor.numel() * tensor.element_size() >= storage.nbytes():
            self._parts.pop(place, None)
            self._known.add(place)
        elif place not in self._known and tensor.is_contiguous():
            parts = _joined([*self._parts.get(place, ()), _extent(tensor)])
            if parts == [(0, storage.nbytes())]:
                self._parts.pop(place, None)
                self._known.add(place)
            else:
                self._parts[place] = parts

    def _forget(self, place: int) -> None:
        self._known.discard(place)
        self._parts.pop(place, None)
        self._zeros.forget(place)

    def _mutated(self, func: Any, args: Any, kwargs: Any) -> Iterable[Any]:
        """Arguments that the operator writes to."""
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                yield from self._tensors(value)

    # ---- computing

    def _compute(self, func: Any, args: Any, kwargs: Any, result: Any, written: list[Any]) -> bool:
        """Run the operator over the same bytes on the CPU; whether that could be done."""
        if not all(map(_is_small, (*self._tensors((args, kwargs)), *written))):
            return False
        for in_fp32 in (False, True):
            try:
                on_host = self._on_host(func, args, kwargs, in_fp32)
                for theirs, ours in zip(self._tensors(result), self._tensors(on_host)):  # noqa: B905  # strict= is of 3.10
                    if theirs.is_cuda and not func._schema.is_mutable:
                        self._over(theirs).copy_(ours)
            except (RuntimeError, TypeError, ValueError, IndexError):  # nothing of the kind on the CPU
                if func._schema.is_mutable:
                    return False
            else:
                return True
        return False

    def _on_host(self, func: Any, args: Any, kwargs: Any, in_fp32: bool = False) -> Any:
        """The operator on CPU tensors over the card's bytes, or on copies in fp32: some CPU kernels lack half
        precision, or mix it otherwise than the card's (layer norm keeps its statistics in fp32 there). Random numbers
        come from a generator of our own, so that the program's draws on the CPU stay as they are."""
        torch = self._torch
        words = {**kwargs, "device": "cpu"} if kwargs.get("device") is not None else dict(kwargs)
        words |= {word: None for word in ("generator", "pin_memory") if word in words}
        args, words = self._mapped(args, in_fp32), self._mapped(words, in_fp32)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **words)
        theirs = torch.random.get_rng_state()
        if self._random_state is not None:
            torch.random.set_rng_state(self._random_state)
        try:
            return func(*args, **words)
        finally:
            self._random_state = torch.random.get_rng_state()
            torch.random.set_rng_state(theirs)

    def _mapped(self, value: Any, in_fp32: bool) -> Any:
        if isinstance(value, self._torch.Tensor):
            mapped = self._over(value) if value.is_cuda else value
            return mapped.float() if in_fp32 and mapped.is_floating_point() else mapped
        if isinstance(value, (list, tuple)):
            return type(value)(self._mapped(item, in_fp32) for item in value)
        if isinstance(value, dict):
            return {name: self._mapped(item, in_fp32) for name, item in value.items()}
        if isinstance(value, self._torch.device):
            return self._torch.device("cpu")
        return value

    def _over(self, tensor: Any) -> Any:
        """A CPU tensor over the bytes of one on the card."""
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return self._torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
        flat = self._torch.frombuffer(memory, dtype=self._torch.uint8)
        empty = self._torch.empty(0, dtype=tensor.dtype)
        return empty.set_(flat.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    # ---- shapes that depend on values

    def _by_value(self, func: Any, args: Any, kwargs: Any, name: str) -> Any:
        """The card's own operator never runs: it would read how much to allocate from memory that nobody has filled."""
        inputs = [tensor for tensor in self._tensors((args, kwargs)) if tensor.is_cuda]
        if all(self._is_known(tensor) and _is_small(tensor) for tensor in inputs):
            return self._to_card(self._on_host(func, args, kwargs), inputs[0].device)
        self._told(name)
        return self._to_card(func(*self._emptied(args), **self._emptied(kwargs)), inputs[0].device)

    def _emptied(self, value: Any) -> Any:
        """The same arguments with tensors in which there is nothing, on the CPU."""
        if isinstance(value, self._torch.Tensor):
            return self._torch.zeros([0, *value.shape[1:]] if value.dim() else [], dtype=value.dtype)
        if isinstance(value, (list, tuple)):
            return type(value)(self._emptied(item) for item in value)
        if isinstance(value, dict):
            return {name: self._emptied(item) for name, item in value.items()}
        return value

    def _to_card(self, value: Any, device: Any) -> Any:
        if isinstance(value, self._torch.Tensor):
            moved = value.to(device)
            self._mark(moved, _is_small(moved), partly=False)
            return moved
        return type(value)(self._to_card(item, device) for item in value)

    def _without_masks(self, name: str, args: Any) -> Any:
        """The same indices with masks counted. One that nobody knows has as many places as values are put there, and
        none where values are taken."""
        indices: list[Any] = []
        for index in args[1]:
            if index is None or not index.is_cuda or index.dtype not in (self._torch.bool, self._torch.uint8):
                indices.append(index)
            elif self._is_known(index) and _is_small(index):
                indices.extend(self._to_card(self._over(index).nonzero().unbind(1), index.device))
            else:
                self._told(name)
                count = args[2].shape[0] if len(args) > 2 and args[2].dim() else 0
                place = self._torch.zeros(count, dtype=self._torch.int64, device=index.device)
                indices.extend([place] * index.dim())
        return (args[0], indices, *args[2:])


def _extent(tensor: Any) -> tuple[int, int]:
    """The bytes of its storage that a contiguous tensor has: the first, and the one behind the last."""
    width = tensor.element_size()
    start = tensor.storage_offset() * width
    return start, start + tensor.numel() * width


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same ranges in order, those that touch as one."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def _finite_number(value: Any) -> Any:
    return 0.0 if isinstance(value, float) and not math.isfinite(value) else value


def _is_small(tensor: Any) -> bool:
    return bool(tensor.untyped_storage().nbytes() <= SMALL_BYTES)
