"""Records the allocations of a real training step with fake tensors: no GPU, no weights, no data.

A dispatch mode sees every operator. A storage that an operator returns for the first time is an allocation; the death
of its last reference is the free, in the order autograd really causes them. Module hooks say which block and pass an
event belongs to. Both functions return a Trace, which ``trainers.compress`` turns into a symbolic Tape.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from planner.estimate import without_garbage_collection
from planner.facts import ModelProfile
from planner.job import Job, Strategy
from trainers import cuda_ops, step
from trainers.families import family
from trainers.work import Work, work_of

Place = tuple[int, int]
"""(run, index): the index-th block of a run of like blocks."""


@dataclass
class Alloc:
    """One allocation: its size, what it holds, and where it was made."""

    nbytes: int
    op: str
    place: Place | None
    phase: str
    category: str = ""
    name: str = ""
    kernel: str = "any"
    rounded: tuple[int, int, int] | None = None
    """For a workspace with a rounded dimension: (exact dimension, multiple, rounded dimension)."""


@dataclass
class Run:
    """A maximal run of structurally equal blocks in one module list."""

    module_list: str
    start: int
    count: int


@dataclass
class Trace:
    """The raw recording. ``events[i]`` >= 0 allocates that Alloc, < 0 frees ``allocs[~event]``."""

    allocs: list[Alloc] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    places: list[Place | None] = field(default_factory=list)
    pieces: list[tuple[str, int]] = field(default_factory=list)
    """(piece, index of its first event); ``gradients`` only feeds an optimizer step, ``end`` closes the last."""

    runs: list[Run] = field(default_factory=list)
    passes: list[str] = field(default_factory=list)
    work: list[tuple[int, Work]] = field(default_factory=list)
    """(number of events before it, what an operator computes and moves)."""

    ops: set[str] = field(default_factory=set)


class Recorder(TorchDispatchMode):
    """Turns operators and storage deaths into a Trace."""

    def __init__(self) -> None:
        super().__init__()
        self.trace = Trace()
        self.place: Place | None = None
        """The block that runs; in the optimizer, the block whose parameter the latest operator worked on."""

        self.phase = "load"
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._number: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # more than half of all calls; the fake mode takes 50 times as long
            return args[0].fake_device
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._note(func, f"{func.namespace}.{func.overloadpacket.__name__}", args, kwargs, out)
        return out

    def _note(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        self.trace.ops.add(name)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        each = name.startswith("aten._foreach") and isinstance(args[0], list | tuple)
        if self.phase == "optimizer":
            self.place = self._common_place(inputs)
        before = len(self.trace.events)
        for position, tensor in enumerate(outputs):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._alive:
                source = args[0][position] if each and len(outputs) == len(args[0]) else None
                number = self._allocate(storage, name, self.place if source is None else self._common_place([source]))
                if rounded := cuda_ops.rounded_output(name, position, tuple(tensor.shape), args):
                    self.trace.allocs[number].rounded = (rounded.exact, rounded.multiple, int(rounded))
        self._note_workspaces(name, args)
        if work := work_of(func, args, kwargs, out, inputs, outputs):
            self.trace.work.append((before, work))

    def _common_place(self, tensors: list[Tensor]) -> Place | None:
        """The block that all tensors belong to; None when they are of several; where we are when they say nothing."""
        numbers = [self._number.get(tensor.untyped_storage()._cdata) for tensor in tensors]
        places = {self.trace.allocs[number].place for number in numbers if number is not None}
        if not places:
            return self.place
        return places.pop() if len(places) == 1 else None

    def _allocate(self, storage: torch.UntypedStorage, op: str, place: Place | None) -> int:
        number = len(self.trace.allocs)
        key = storage._cdata
        self.trace.allocs.append(Alloc(storage.nbytes(), op, place, self.phase))
        self._event(number, place)
        self._number[key] = number
        self._alive[key] = weakref.ref(storage, lambda _: self._free(key))
        return number

    def _event(self, event: int, place: Place | None) -> None:
        self.trace.events.append(event)
        self.trace.places.append(place)
        self.trace.passes.append(self.phase)

    def _free(self, key: int) -> None:
        del self._alive[key]
        number = self._number.pop(key)
        self._event(~number, self.place)

    def _note_workspaces(self, name: str, args: Any) -> None:
        made = []
        for kernel, dims in cuda_ops.workspaces(name, args):
            nbytes = 1
            rounded = None
            for dim in dims:
                if isinstance(dim, cuda_ops.Rounded):
                    rounded = (dim.exact, dim.multiple, int(dim))
                nbytes *= int(dim)
            made.append(len(self.trace.allocs))
            self.trace.allocs.append(
                Alloc(nbytes, name, self.place, self.phase, "workspace", kernel=kernel, rounded=rounded)
            )
            self._event(made[-1], self.place)
        for number in made:
            self._event(~number, self.place)

    def begin(self, phase: str) -> None:
        self.phase, self.place = phase, None

    def piece(self, name: str) -> None:
        self.trace.pieces.append((name, len(self.trace.events)))

    def label(self, tensor: Tensor, category: str, name: str, place: Place | None = None) -> None:
        """Says what an existing allocation holds. ``host`` marks what a GPU run keeps in host memory."""
        number = self._number.get(tensor.untyped_storage()._cdata)
        if number is None:
            return
        alloc = self.trace.allocs[number]
        alloc.category, alloc.name = category, name
        if category in ("weight", "optimizer", "gradient", "batch"):
            alloc.place = place


def find_runs(model: nn.Module, lists: list[str], checkpointed: int | None) -> tuple[list[Run], dict[str, Place]]:
    """Groups the blocks of the named module lists into runs of equal structure; maps each block's name to its place.

    ``checkpointed`` is the number of blocks, in execution order, that checkpoint when only some do: it splits runs too.
    """
    runs: list[Run] = []
    places: dict[str, Place] = {}
    seen = 0
    for module_list in lists:
        last: Any = None
        for index, block in enumerate(model.get_submodule(module_list).children()):
            shapes = [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in block.named_parameters()]
            signature = (type(block), shapes, checkpointed is not None and seen < checkpointed)
            if signature != last:
                runs.append(Run(module_list, index, 0))
            last = signature
            places[f"{module_list}.{index}"] = (len(runs) - 1, runs[-1].count)
            runs[-1].count += 1
            seen += 1
    return runs, places


def place_of_name(name: str, places: dict[str, Place]) -> Place | None:
    """The place of the block a parameter belongs to, from its dotted name."""
    parts = name.split(".")
    for end in range(len(parts), 1, -1):
        found = places.get(".".join(parts[:end]))
        if found is not None:
            return found
    return None


def watch_blocks(model: nn.Module, recorder: Recorder, places: dict[str, Place]) -> None:
    """Hooks that keep ``recorder.place`` at the block that runs, forward and backward."""

    def entering(place: Place | None) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if recorder.phase == "forward":
                recorder.place = place

        return hook

    def left(place: Place) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            if recorder.phase != "forward":
                return
            for tensor in tree_leaves(out):
                if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(lambda _: setattr(recorder, "place", place))

        return hook

    lists = {name.rpartition(".")[0] for name in places}
    for name, place in places.items():
        block = model.get_submodule(name)
        block.register_forward_pre_hook(entering(place))
        block.register_forward_hook(left(place))
    for name, child in model.named_children():
        if name not in lists and not any(listed.startswith(f"{name}.") for listed in lists):
            child.register_forward_pre_hook(entering(None))


def record_step(
    profile: ModelProfile, job: Job, strategy: Strategy, grid: Mapping[str, int], config: dict[str, Any] | None = None
) -> Trace:
    """Records loading (piece ``load``) and one forward and backward (``step``) at the shape of ``grid``.

    ``config`` replaces the published architecture, e.g. by one of fewer blocks.
    """
    with _recording(profile, job, strategy, grid, config) as (recorder, trainee, places):
        watch_blocks(trainee.model, recorder, places)
        _watch_gradients(trainee, recorder, places)
        kind = family(profile)
        recorder.piece("step")
        recorder.begin("forward")
        batch = kind.batch(grid, "cpu", step.compute_dtype(strategy))
        for name, tensor in batch.items():
            recorder.label(tensor, "batch", name)
        loss = step.forward(trainee, kind, batch, strategy)
        recorder.label(loss, "batch", "loss")
        recorder.begin("backward")
        loss.backward()
        recorder.piece("end")
        return recorder.trace


def record_sample(
    profile: ModelProfile, job: Job, strategy: Strategy, grid: Mapping[str, int], config: dict[str, Any] | None = None
) -> Trace:
    """Records loading and one forward without gradients (``denoise``), as sampling calls it at every noise level."""
    with _recording(profile, job, strategy, grid, config) as (recorder, trainee, places):
        watch_blocks(trainee.model, recorder, places)
        kind = family(profile)
        trainee.model.eval()
        recorder.piece("denoise")
        recorder.begin("forward")
        batch = kind.batch(grid, "cpu", step.compute_dtype(strategy))
        for name, tensor in batch.items():
            recorder.label(tensor, "batch", name)
        out = step.sample_forward(trainee, kind, batch, strategy)
        recorder.place = None
        recorder.label(out, "batch", "prediction")
        recorder.piece("end")
        return recorder.trace


def record_optimizer(
    profile: ModelProfile, job: Job, strategy: Strategy, grid: Mapping[str, int], config: dict[str, Any] | None = None
) -> Trace:
    """Records the first optimizer step (``optimizer_first``: it creates the states) and a later one (``optimizer``).

    What the step does depends on the parameters and their gradients alone, so gradients are simply put there.
    """
    with _recording(profile, job, strategy, grid, config) as (recorder, trainee, places):
        with _disable_current_modes():  # bitsandbytes fills its quantisation tables with real numbers
            trainee.optimizer = step.make_optimizer(trainee.trainable, strategy)
        recorder.begin("optimizer")
        for piece in ("optimizer_first", "optimizer"):
            recorder.piece("gradients")
            for name, parameter in trainee.trainable.items():
                parameter.grad = torch.empty_like(parameter)
                recorder.label(parameter.grad, "gradient", name, place_of_name(name, places))
            recorder.piece(piece)
            step.optimizer_step(trainee)
            _label_states(trainee, recorder, places, strategy)
        recorder.piece("end")
        return recorder.trace


@contextlib.contextmanager
def _recording(
    profile: ModelProfile, job: Job, strategy: Strategy, grid: Mapping[str, int], config: dict[str, Any] | None
) -> Iterator[tuple[Recorder, step.Trainee, dict[str, Place]]]:
    """A loaded model of fake tensors, with the recorder on."""
    recorder = Recorder()
    model = step.build_model(profile, job.model_copy(update={"lora_rank": grid["R"]}), strategy, config)
    fake = FakeTensorMode(allow_non_fake_inputs=True)  # buffers and noise schedules are real
    gc.collect()
    # Frees must come from reference counts, not from a collection that runs at a random moment.
    with without_garbage_collection(), cuda_ops.cuda_semantics(), fake:
        lists = [stack.list for stack in profile.stacks]
        partial = strategy.checkpointed_blocks if strategy.gradient_checkpointing == "partial" else None
        recorder.trace.runs, places = find_runs(model, lists, partial)
        with recorder:
            recorder.piece("load")
            load(model, recorder, places)
            yield recorder, step.Trainee(model, step.trainable_parameters(model)), places


def load(model: nn.Module, recorder: Recorder, places: dict[str, Place]) -> None:
    """Loads the weights and the tables beside them, and labels them."""
    step.materialise(model, "cpu")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        place = place_of_name(name, places)
        recorder.label(tensor, "weight", name, place)
    trace = recorder.trace
    assert all(alloc.category == "weight" for alloc in trace.allocs), "loading allocates weights and nothing else"
    trace.places[:] = [alloc.place for alloc in trace.allocs]


def _watch_gradients(trainee: step.Trainee, recorder: Recorder, places: dict[str, Place]) -> None:
    def watch(name: str, parameter: nn.Parameter) -> None:
        def accumulated(_: Tensor) -> None:
            assert parameter.grad is not None
            recorder.label(parameter.grad, "gradient", name, place_of_name(name, places))

        parameter.register_post_accumulate_grad_hook(accumulated)

    for name, parameter in trainee.trainable.items():
        watch(name, parameter)


def _label_states(
    trainee: step.Trainee, recorder: Recorder, places: dict[str, Place], strategy: Strategy
) -> None:
    """Marks optimizer states; torch's step counters stay in host memory unless the step is fused."""
    assert trainee.optimizer is not None
    for name, parameter in trainee.trainable.items():
        for key, value in trainee.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                host = key == "step" and strategy.optimizer_step != "fused"
                recorder.label(value, "host" if host else "optimizer", f"{name}:{key}", place_of_name(name, places))
