"""Records the allocations of a real training step with fake tensors: no GPU, no weights, no data.

A dispatch mode sees every operator. A storage that an operator returns for the first time is an allocation; the death
of its last reference is the free, in the order autograd really causes them. Module hooks say which block and pass an
event belongs to. Each function returns a RawRecording, which `trainers.recording.compress` turns into a Tape.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from bitsandbytes import functional
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves

from planner.catalog.profiles import ModelProfile
from planner.garbage_collection import without_garbage_collection
from planner.spec.job import Job, Strategy
from planner.tape.variants.variant import SampleVariant, StepVariant
from trainers.families import family
from trainers.families.common.base import Family
from trainers.memory import quantise
from trainers.recording import cuda_ops, fakes, mps_ops
from trainers.recording.block_places import LikeBlocks, Place, find_runs, place_of_name
from trainers.recording.constant_values import Uniform
from trainers.recording.hooks import watch_blocks, watch_casts, watch_gradients
from trainers.recording.known_numbers import KnownNumbers
from trainers.recording.op_cost import OpCost, work_of
from trainers.recording.op_table import COPYING_BEHIND_OUTPUTS, is_copied
from trainers.recording.trainer_code import TrainerCode
from trainers.step import step
from trainers.step.optimizers import SteppedInBackward, make_optimizer


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
    """For what has a rounded dimension: (exact dimension, multiple, rounded dimension)."""
    copied: int | None = None
    """of a mask's copy with padded rows: the allocation that holds the mask"""
    samples: int = 0
    """of what is rounded in attention's backward: the batch of its queries"""


@dataclass
class RawRecording:
    """A recording as it happened: an event >= 0 allocates ``allocations[event]``, one < 0 frees ``~event``."""

    allocations: list[RawAllocation] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    places: list[Place | None] = field(default_factory=list)
    """per event: the block that ran; None outside the blocks"""
    pieces: list[tuple[str, int]] = field(default_factory=list)
    """(piece, index of its first event); ``gradients`` only feeds an optimizer step, ``end`` closes the last."""

    runs: list[LikeBlocks] = field(default_factory=list)
    passes: list[str] = field(default_factory=list)
    work: list[tuple[int, OpCost]] = field(default_factory=list)
    """(number of events before it, what an operator computes and moves)."""

    ops: set[str] = field(default_factory=set)


class Recorder(TorchDispatchMode):
    """A dispatch mode that turns operators and the deaths of storages into a RawRecording."""

    def __init__(
        self, workspaces_of: Callable[[str, tuple[Any, ...]], list[cuda_ops.Workspace]] = cuda_ops.workspaces
    ) -> None:
        """``workspaces_of``: what a device's kernel takes inside an operator."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.workspaces_of = workspaces_of
        self.recording = RawRecording()
        self.adds_masks_up = False
        """Whether code that reads how many tokens a mask leaves is told it, and not 1."""

        self.knows_numbers = False
        """Whether numbers of masks and places are worked out, by which lengths are"""

        self.place: Place | None = None
        """The block that runs; in the optimizer, the block whose parameter the latest operator worked on."""

        self.phase = "load"
        self._uniform = Uniform()
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._number: dict[int, int] = {}
        self._event_of: list[int] = []
        """Per allocation: the index of its event."""

        self._from_nothing: set[int] = set()
        """What the optimizer made without looking at a parameter, until it meets one."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing that records is compiled: torch would look at every call, which takes as long as many a call."""
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
        self.recording.ops.add(name)
        inputs = _plain((*args, *kwargs.values()))
        outputs = _plain((out,))
        if name in cuda_ops.LAST_OUTPUT_FIRST:
            outputs.reverse()
        by_tensor = name.startswith("aten._foreach") and isinstance(args[0], list | tuple)
        if self.phase == "optimizer":
            self.place = self._common_place(inputs)
        before = len(self.recording.events)
        inside = [] if name in COPYING_BEHIND_OUTPUTS else self._copies(name, inputs)
        if name in cuda_ops.BEFORE_OUTPUTS:
            inside += self._workspaces(name, args)
        for position, tensor in enumerate(outputs):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._alive:
                source = args[0][position] if by_tensor and len(outputs) == len(args[0]) else None
                number = self._allocate(storage, name, self.place if source is None else self._common_place([source]))
                if self.phase == "optimizer" and not inputs:
                    self._from_nothing.add(number)
                if rounded := cuda_ops.rounded_output(name, position, tuple(tensor.shape), args):
                    self.recording.allocations[number].rounded = (rounded.exact, rounded.multiple, int(rounded))
                    if name == "aten.constant_pad_nd":
                        self.recording.allocations[number].copied = self._number.get(inputs[0].untyped_storage()._cdata)
        if name not in cuda_ops.BEFORE_OUTPUTS:
            inside = self._workspaces(name, args) + inside
        if name in COPYING_BEHIND_OUTPUTS:
            inside += self._copies(name, inputs)
        for number in inside:
            self._event(~number, self.place)
        if work := work_of(func, args, kwargs, out, inputs, outputs):
            self.recording.work.append((before, work))

    def _common_place(self, tensors: list[Tensor]) -> Place | None:
        """The block that all tensors belong to; None when they are of several; where we are when they say nothing."""
        allocations = (self._number.get(tensor.untyped_storage()._cdata) for tensor in tensors)
        numbers = {number for number in allocations if number is not None}
        places = {self.recording.allocations[number].place for number in numbers - self._from_nothing}
        if not places:
            return self.place
        if len(places) > 1:
            return None
        place = places.pop()
        fresh = numbers & self._from_nothing
        for number in fresh:  # a state, and all since, belongs to what it is first used with
            self._from_nothing.remove(number)
            self.recording.allocations[number].place = place
            since = self._event_of[number]
            # one call for many parameters, all of them outside of blocks, says nothing of what was made between them
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
        """Allocates the copies that CUDA makes of inputs that are not contiguous."""
        copies = []
        for tensor in inputs:
            if is_copied(name, tensor):
                copies.append(len(self.recording.allocations))
                self.recording.allocations.append(RawAllocation(tensor.nbytes, name, self.place, self.phase))
                self._event_of.append(len(self.recording.events))
                self._event(copies[-1], self.place)
        return copies

    def _workspaces(self, name: str, args: Any) -> list[int]:
        """Allocates what a kernel takes inside the operator."""
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
        """Has a step's values followed as far as a family's model asks for them."""
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
        """Says that an allocation's bytes are ``exact`` rounded up, so that a tape can keep them symbolic."""
        allocation = self.recording.allocations[self._number[tensor.untyped_storage()._cdata]]
        assert allocation.nbytes == -(-exact // multiple) * multiple
        allocation.rounded = exact, multiple, allocation.nbytes

    def label(self, tensor: Tensor, category: str, name: str, place: Place | None = None) -> None:
        """Sets what an existing allocation holds. The category ``host`` marks what a run on a GPU keeps in host RAM.

        Gradients may be parts of one storage, as of biases that a block joins: autograd keeps each as it comes
        (torch/csrc/autograd/functions/accumulate_grad.h, ``accumulateGrad``). The first has all of its bytes then, and
        each other one is a gradient of none.
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
    """The name of an operator, without that of its overload."""
    return f"{func.namespace}.{func.overloadpacket.__name__}"


def _plain(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among arguments or results, also in lists; one that wraps others (as torchao's) as those."""
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


class Dispatch(NamedTuple):
    """What decides, beside its arguments, which operators a device runs a call as."""

    older_torch: bool = False
    """autocast as it was before `planner.tape.variants.torch_and_card.RMS_NORM_IN_FP32`"""
    cudnn: bool = False
    """the card's attention is cuDNN's, of a model that attends by card (`trainers.recording.cuda_ops.CudaAttention`)"""
    mps: bool = False
    """the card is Apple's (`trainers.recording.mps_ops`)"""

    @classmethod
    def of(cls, variant: StepVariant | SampleVariant) -> Dispatch:
        """That of a variant of a tape."""
        return cls(variant.older, variant.cudnn, isinstance(variant, StepVariant) and variant.mps)

    def semantics(self) -> contextlib.AbstractContextManager[object]:
        """What makes fake tensors behave as the device's."""
        if self.mps:
            return mps_ops.mps_semantics()
        return cuda_ops.cuda_semantics(rms_norm_in_fp32=not self.older_torch, cudnn=self.cudnn)


USUAL = Dispatch()


def record_step(
    profile: ModelProfile,
    job: Job,
    strategy: Strategy,
    grid: Mapping[str, int],
    config: dict[str, Any] | None = None,
    dispatch: Dispatch = USUAL,
    code: TrainerCode | None = None,
    version: str = "",
) -> RawRecording:
    """Records loading (piece ``load``) and one forward and backward (``step``) at the shape of ``grid``.

    ``config`` replaces the published architecture, e.g. by one of fewer blocks. ``code``: another trainer's own model
    and step, of a ``version``.
    """
    build = step.build_model if code is None else functools.partial(code.build_model, version=version)
    with _recording(profile, job, strategy, grid, config, dispatch, build) as (recorder, trainee, places):
        watch_blocks(trainee.model, recorder, places)
        watch_gradients(trainee.trainable, recorder, places)
        watch_casts(trainee.model, recorder, places)
        before = recorder.weights()
        buffers = list(trainee.model.buffers())  # where a step makes one anew, the old one stays
        kind = family(profile)
        recorder.follow(kind)
        recorder.piece("step")
        recorder.begin("forward")
        dtype = step.compute_dtype(strategy)
        batch = kind.batch(grid, "cpu", dtype) if code is None else code.batch(profile, grid, dtype)
        for name, tensor in batch.items():
            recorder.label(tensor, "batch", name)
        if code is None:
            loss = step.forward(trainee, kind, batch, strategy)
        else:
            loss = code.loss(trainee.model, batch, strategy)
        recorder.label(loss, "batch", "loss")
        recorder.begin("backward")
        loss.backward()
        assert recorder.weights() == before, "a step leaves the weights stored as it found them"
        recorder.piece("end")
        del buffers
    if code is not None:
        for allocation in recorder.recording.allocations:
            allocation.name = code.published_name(allocation.name)
    return recorder.recording


def record_sample(
    profile: ModelProfile,
    job: Job,
    strategy: Strategy,
    grid: Mapping[str, int],
    config: dict[str, Any] | None = None,
    dispatch: Dispatch = USUAL,
) -> RawRecording:
    """Records loading and one forward without gradients (``denoise``), as sampling calls it at every noise level."""
    with _recording(profile, job, strategy, grid, config, dispatch) as (recorder, trainee, places):
        watch_blocks(trainee.model, recorder, places)
        kind = family(profile)
        recorder.follow(kind)
        trainee.model.eval()
        recorder.piece("denoise")
        recorder.begin("forward")
        batch = kind.batch(grid, "cpu", step.compute_dtype(strategy))
        for name, tensor in batch.items():
            recorder.label(tensor, "batch", name)
        out = step.sample_forward(trainee, kind, batch, strategy)
        recorder.place = None
        for index, tensor in enumerate(tree_leaves(out)):
            recorder.label(tensor, "batch", f"prediction {index}" if index else "prediction")
        recorder.piece("end")
        return recorder.recording


def record_optimizer(
    profile: ModelProfile, job: Job, strategy: Strategy, grid: Mapping[str, int], config: dict[str, Any] | None = None
) -> RawRecording:
    """Records the first optimizer step (``optimizer_first``: it creates the states) and a later one (``optimizer``).

    What the step does depends on the parameters and their gradients alone, so gradients are simply put there: on all
    parameters but those that a backward never reaches, which the optimizer skips.
    """
    kind = family(profile)
    with _recording(profile, job, strategy, grid, config) as (recorder, trainee, places):
        with _disable_current_modes():  # bitsandbytes fills its quantisation tables with real numbers
            trainee.optimizer = make_optimizer(trainee.trainable, strategy)
        recorder.begin("optimizer")
        for piece in ("optimizer_first", "optimizer"):
            recorder.piece("gradients")
            for name, parameter in trainee.trainable.items():
                if kind.without_gradient(name, len(places)):
                    continue
                parameter.grad = torch.empty_like(parameter)
                recorder.label(parameter.grad, "gradient", name, place_of_name(name, places))
            recorder.piece(piece)
            if isinstance(trainee.optimizer, SteppedInBackward):
                for parameter in reversed(trainee.trainable.values()):  # the order of backward
                    trainee.optimizer.step_parameter(parameter)
            else:
                trainee.engine.step(trainee)
            _label_states(trainee, recorder, places, strategy)
        recorder.piece("end")
        return recorder.recording


@contextlib.contextmanager
def _recording(
    profile: ModelProfile,
    job: Job,
    strategy: Strategy,
    grid: Mapping[str, int],
    config: dict[str, Any] | None,
    dispatch: Dispatch = USUAL,
    build: Callable[..., nn.Module] = step.build_model,
) -> Iterator[tuple[Recorder, step.Trainee, dict[str, Place]]]:
    """A loaded model of fake tensors, with the recorder on."""
    recorder = Recorder(mps_ops.workspaces if dispatch.mps else cuda_ops.workspaces)
    model = build(profile, job.model_copy(update={"lora_rank": grid["R"]}), strategy, config)
    if strategy.weights(job.method) == "nf4":  # a table of numbers that all layers share, computed at its first use
        functional.name2qmap.setdefault("dynamic", functional.create_dynamic_map())
    fake = FakeTensorMode(allow_non_fake_inputs=True)  # buffers, tables and noise schedules are real
    gc.collect(1)
    # Frees must come from reference counts, not from a collection that runs at a random moment.
    with without_garbage_collection(), dispatch.semantics(), fake:
        lists = [stack.list for stack in profile.stacks]
        partial = strategy.checkpointed_blocks if strategy.gradient_checkpointing == "partial" else None
        recorder.recording.runs, places = find_runs(model, lists, partial)
        with recorder:
            recorder.piece("load")
            load(model, recorder, places)
            yield recorder, step.Trainee(model, step.trainable_parameters(model)), places


def load(model: nn.Module, recorder: Recorder, places: dict[str, Place]) -> None:
    """Loads the model's weights and buffers, and labels their allocations."""

    def allocated(name: str, weight: Tensor) -> None:
        recorder.place = place_of_name(name, places)
        recorder.label(weight, "weight", "", recorder.place)  # its name goes to what is left of it

    step.materialise(model, "cpu", allocated)
    for name, tensor in named_tensors(model):
        recorder.label(tensor, "weight", name, place_of_name(name, places))
    recording = recorder.recording
    numbers = [event if event >= 0 else ~event for event in recording.events]
    freed = {~event for event in recording.events if event < 0}
    stay = [recording.allocations[number] for number in numbers if number not in freed]
    assert all(allocation.name for allocation in stay), "what stays loaded is a weight"
    recording.places[:] = [recording.allocations[number].place for number in numbers]


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(full name, tensor) of all plain tensors that hold a model's parameters and buffers."""
    for name, parameter in model.named_parameters():
        yield from quantise.stored_tensors(name, parameter)
    yield from model.named_buffers()


QUANTISED_PER_BYTE = 64
"""bitsandbytes keeps an fp32 for every 256 numbers of an 8-bit state, or what is left of them (functional.py)."""


def _label_states(trainee: step.Trainee, recorder: Recorder, places: dict[str, Place], strategy: Strategy) -> None:
    """Marks optimizer states; torch's step counters stay in host memory unless the step is fused.

    So is what else is one number, made anew in every step (Adafactor's RMS): 512 bytes for a parameter.
    """
    assert trainee.optimizer is not None
    for name, parameter in trainee.trainable.items():
        for key, value in trainee.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                host = value.ndim == 0 and strategy.optimizer_step != "fused"
                recorder.label(value, "host" if host else "optimizer", f"{name}:{key}", place_of_name(name, places))
                if key.startswith("absmax") and "lora_" in name and parameter.numel() % QUANTISED_PER_BYTE == 0:
                    recorder.rounds_up(value, parameter.numel() // QUANTISED_PER_BYTE, value.itemsize)
