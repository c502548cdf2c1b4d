"""The dispatch mode that writes down every allocation and free while a model runs with fake tensors.

It sees every operator. A storage that an operator returns for the first time is an allocation; the death of its last
reference is the free, in the order in which autograd really causes them. Module hooks (`trainers.recording.hooks`) say
which block and pass an event belongs to. `trainers.recording.recordings` runs models under it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
)

from trainers.families.common.base import Family
from trainers.memory import quantise
from trainers.recording import cuda_ops, fakes
from trainers.recording.block_places import LikeBlocks, Place
from trainers.recording.constant_values import Uniform
from trainers.recording.known_numbers import KnownNumbers
from trainers.recording.op_cost import OpCost, cost_of
from trainers.recording.op_table import COPYING_BEHIND_OUTPUTS, is_copied


@dataclass
class RawAllocation:
    """One recorded allocation: its size in bytes, what it holds, and the block that made it."""

    nbytes: int
    op: str
    place: Place | None
    phase: str
    category: str = ""
    name: str = ""
    kernel: str = "any"
    rounded: tuple[int, int, int] | None = None
    """(exact dimension, multiple, rounded dimension) if one dimension is rounded up"""
    copied: int | None = None
    """for a copy of a mask with padded rows: the allocation that holds the mask"""
    samples: int = 0
    """for a rounded workspace of attention's backward: the batch of the queries"""


@dataclass
class RawRecording:
    """A raw recording: an event >= 0 allocates ``allocations[event]``, one < 0 frees ``allocations[~event]``."""

    allocations: list[RawAllocation] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    places: list[Place | None] = field(default_factory=list)
    """per event: the block that ran; None outside the blocks"""
    pieces: list[tuple[str, int]] = field(default_factory=list)
    """(piece, index of its first event); ``gradients`` only prepares an optimizer step, ``end`` closes the last."""

    runs: list[LikeBlocks] = field(default_factory=list)
    passes: list[str] = field(default_factory=list)
    work: list[tuple[int, OpCost]] = field(default_factory=list)
    """(number of events before it, an operator's work)"""

    ops: set[str] = field(default_factory=set)


class Recorder(TorchDispatchMode):
    """A dispatch mode that turns operators and the deaths of storages into a RawRecording."""

    def __init__(
        self, workspaces_of: Callable[[str, tuple[Any, ...]], list[cuda_ops.Workspace]] = cuda_ops.workspaces
    ) -> None:
        """``workspaces_of``: gives the workspaces that a device's kernel allocates inside an operator."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.workspaces_of = workspaces_of
        self.recording = RawRecording()
        self.adds_masks_up = False
        """Whether code that counts the tokens of a mask gets their real number instead of 1."""

        self.knows_numbers = False
        """Whether the values of integer and boolean tensors are computed, for models whose lengths depend on them."""

        self.place: Place | None = None
        """The block that runs; in the optimizer, the block whose parameter the latest operator worked on."""

        self.phase = "load"
        self._uniform = Uniform()
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._number: dict[int, int] = {}
        self._event_of: list[int] = []
        """Per allocation: the index of its event."""

        self._from_nothing: set[int] = set()
        """Allocations that the optimizer made without an input, until they are first used with a parameter."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Recording compiles nothing; without this, torch would check every call, which is slow."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # more than half of all calls; the fake mode takes 50 times as long
            return args[0].fake_device
        if func in fakes.READS and isinstance(args[0], FakeTensor) and args[0].constant is None:
            self.recording.ops.add("aten._local_scalar_dense")
            asks = (self.adds_masks_up or self.knows_numbers) and not args[0].is_floating_point()
            known = self._uniform.number(args[0]) if asks else None
            return fakes.read(args[0]) if known is None else known
        kwargs = kwargs or {}
        name = _name(func)
        out = self._uniform.call(func, name, args, kwargs)
        out = fakes.with_number(func, args, out)
        if self.adds_masks_up:
            self._uniform.follow_mask(name, args, out)
        self._note(func, name, args, kwargs, out)
        return out

    def _note(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        """Records what an operator allocates, in the order of its CUDA kernel: copies of its inputs, workspaces and
        outputs, of which all but the outputs go when it ends; and its work."""
        self.recording.ops.add(name)
        inputs = _plain((*args, *kwargs.values()))
        outputs = _plain((out,))
        if name in cuda_ops.LAST_OUTPUT_FIRST:
            outputs.reverse()
        if self.phase == "optimizer":
            self.place = self._common_place(inputs)
        before = len(self.recording.events)
        inside = [] if name in COPYING_BEHIND_OUTPUTS else self._copies(name, inputs)
        if name in cuda_ops.BEFORE_OUTPUTS:
            inside += self._workspaces(name, args)
        self._note_outputs(name, args, inputs, outputs)
        if name not in cuda_ops.BEFORE_OUTPUTS:
            inside = self._workspaces(name, args) + inside
        if name in COPYING_BEHIND_OUTPUTS:
            inside += self._copies(name, inputs)
        for number in inside:
            self._event(~number, self.place)
        if work := cost_of(func, args, kwargs, out, inputs, outputs):
            self.recording.work.append((before, work))

    def _note_outputs(self, name: str, args: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Allocates the outputs that are new: views and tensors written in place are alive already. An output of a
        foreach operator belongs to the block of the tensor that it is made of."""
        by_tensor = name.startswith("aten._foreach") and isinstance(args[0], list | tuple)
        for position, tensor in enumerate(outputs):
            storage = tensor.untyped_storage()
            if storage._cdata in self._alive:
                continue
            source = args[0][position] if by_tensor and len(outputs) == len(args[0]) else None
            number = self._allocate(storage, name, self.place if source is None else self._common_place([source]))
            if self.phase == "optimizer" and not inputs:
                self._from_nothing.add(number)
            allocation = self.recording.allocations[number]
            if rounded := cuda_ops.rounded_output(name, position, tuple(tensor.shape), args):
                allocation.rounded = (rounded.exact, rounded.multiple, int(rounded))
                if name == "aten.constant_pad_nd":
                    allocation.copied = self._number.get(inputs[0].untyped_storage()._cdata)

    def _common_place(self, tensors: list[Tensor]) -> Place | None:
        """The block that all tensors belong to; None if they belong to several; the current block if none has one."""
        allocations = (self._number.get(tensor.untyped_storage()._cdata) for tensor in tensors)
        numbers = {number for number in allocations if number is not None}
        places = {self.recording.allocations[number].place for number in numbers - self._from_nothing}
        if not places:
            return self.place
        if len(places) > 1:
            return None
        place = places.pop()
        fresh = numbers & self._from_nothing
        for number in fresh:  # a new state, and all events since, belong to the block that it is first used with
            self._from_nothing.remove(number)
            self.recording.allocations[number].place = place
            since = self._event_of[number]
            # one call for many parameters outside of blocks does not tell what the events between them belong to
            end = since + 1 if place is None and len(fresh) > 1 else len(self.recording.places)
            self.recording.places[since:end] = [place] * (end - since)
        return place

    def _allocate(self, storage: torch.UntypedStorage, op: str, place: Place | None) -> int:
        number = len(self.recording.allocations)
        key = storage._cdata
        self.recording.allocations.append(RawAllocation(storage.nbytes(), op, place, self.phase))
        self._event_of.append(len(self.recording.events))
        self._event(number, place)
        self._number[key] = number
        self._alive[key] = weakref.ref(storage, lambda _: self._free(key))
        return number

    def _event(self, event: int, place: Place | None) -> None:
        self.recording.events.append(event)
        self.recording.places.append(place)
        self.recording.passes.append(self.phase)

    def _free(self, key: int) -> None:
        del self._alive[key]
        self._uniform.forget(key)
        number = self._number.pop(key)
        self._event(~number, self.place)

    def _copies(self, name: str, inputs: list[Tensor]) -> list[int]:
        """Records the copies that CUDA makes of non-contiguous inputs; returns the numbers of their allocations."""
        copies = []
        for tensor in inputs:
            if is_copied(name, tensor):
                copies.append(len(self.recording.allocations))
                self.recording.allocations.append(RawAllocation(tensor.nbytes, name, self.place, self.phase))
                self._event_of.append(len(self.recording.events))
                self._event(copies[-1], self.place)
        return copies

    def _workspaces(self, name: str, args: Any) -> list[int]:
        """Records the workspaces of an operator's kernel; returns the numbers of their allocations."""
        workspaces = []
        for kernel, dims in self.workspaces_of(name, args):
            nbytes = 1
            rounded, samples = None, 0
            for dim in dims:
                if isinstance(dim, cuda_ops.Rounded):
                    rounded, samples = (dim.exact, dim.multiple, int(dim)), dim.samples
                nbytes *= int(dim)
            workspaces.append(len(self.recording.allocations))
            taken = RawAllocation(nbytes, name, self.place, self.phase, "workspace", kernel=kernel, rounded=rounded)
            taken.samples = samples
            self.recording.allocations.append(taken)
            self._event_of.append(len(self.recording.events))
            self._event(workspaces[-1], self.place)
        return workspaces

    def follow(self, kind: Family) -> None:
        """Turns on tracking of tensor values as far as the family's model depends on them."""
        self.adds_masks_up = kind.adds_masks_up
        if kind.places_by_mask:
            self.knows_numbers, self._uniform = True, KnownNumbers()

    def weights(self) -> list[tuple[str, int]]:
        """(name, bytes) of every weight that is allocated now, sorted."""
        allocs = (self.recording.allocations[number] for number in self._number.values())
        return sorted((allocation.name, allocation.nbytes) for allocation in allocs if allocation.category == "weight")

    def begin(self, phase: str) -> None:
        self.phase, self.place = phase, None

    def piece(self, name: str) -> None:
        self.recording.pieces.append((name, len(self.recording.events)))

    def rounds_up(self, tensor: Tensor, exact: int, multiple: int) -> None:
        """Records that an allocation's bytes are ``exact`` rounded up, so that a tape can keep them symbolic."""
        allocation = self.recording.allocations[self._number[tensor.untyped_storage()._cdata]]
        assert allocation.nbytes == -(-exact // multiple) * multiple
        allocation.rounded = exact, multiple, allocation.nbytes

    def label(self, tensor: Tensor, category: str, name: str, place: Place | None = None) -> None:
        """Sets what an existing allocation holds. The category ``host`` is for tensors that a GPU run has in host RAM.

        Several gradients may share one storage, for example those of biases that a block concatenates: autograd keeps
        each as it comes (torch/csrc/autograd/functions/accumulate_grad.h, ``accumulateGrad``). Then the first gradient
        gets all bytes of the storage, and each other one gets an allocation of size 0.
        """
        number = self._number.get(tensor.untyped_storage()._cdata)
        if number is None:
            return
        allocation = self.recording.allocations[number]
        if category == "gradient" == allocation.category and allocation.name != name:
            self.recording.allocations.append(RawAllocation(0, allocation.op, place, self.phase, category, name))
            self._event_of.append(len(self.recording.events))
            self._event(len(self.recording.allocations) - 1, self.place)
            return
        allocation.category, allocation.name = category, name
        if category in ("weight", "optimizer", "gradient", "batch"):
            allocation.place = place


@functools.cache
def _name(func: Any) -> str:
    """The name of an operator, without its overload."""
    return f"{func.namespace}.{func.overloadpacket.__name__}"


def _plain(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among arguments or results, also inside lists and dicts. A tensor subclass that wraps others (such as
    torchao's) is replaced by those."""
    tensors: list[Tensor] = []
    for value in values:
        if type(value) is FakeTensor:
            tensors.append(value)
        elif isinstance(value, Tensor):
            wraps: bool = is_traceable_wrapper_subclass(value)
            tensors += [tensor for _, tensor in quantise.stored_tensors("", value)] if wraps else [value]
        elif isinstance(value, list | tuple):
            tensors += _plain(value)
        elif isinstance(value, dict):
            tensors += _plain(value.values())
    return tensors
