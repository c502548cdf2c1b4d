"""A run laid out for the replay: load, a first step, a later step, with the strategy's buffers put in.

- A *Program* (`planner.tape.program`) numbers every buffer of the run and knows its category, operator and size.
- A *Stage* is one piece of the run, such as load, step or optimizer: a list of stretches, each a moment (which pass of
  which block) with its events. Event ``n >= 0`` allocates buffer ``n``, event ``~n`` frees it.
- A *Run* is the stages of a whole training run over one Program. The replay (`planner.estimate.stages`) plays them on
  one allocator.
- *Facts* are what a layout reads besides the question.

Each transformation of a strategy is one function on a Run with one source; it adds named buffers or changes lifetimes.
What changes the stream of operators itself (checkpointing, method, precision, optimizer) is recorded, not transformed.

Read the fields of `Run` first, then `Run.stages`. The rest of the class is in three groups: results shared between runs
(`shared` and its like), editing (`new` to `empty`), and what transformations ask (`named` to `swappable_weights`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from planner.allocator.implementation import alive
from planner.catalog.card_profiles import GpuProfile
from planner.catalog.components import calls
from planner.catalog.profiles import ModelProfile
from planner.catalog.swapped_stacks import fetches_again, split_of
from planner.layout.correction import NO_MEASUREMENTS, ModelMeasurements
from planner.layout.run_records import (
    DeviceTerms,
    EmptyCache,
    EncodingOnly,
    EngineTerms,
    Handover,
    HostTerms,
    PhaseStages,
    WorkTerms,
    ZeroSettings,
)
from planner.spec.configuration import Configuration
from planner.spec.job import SPLIT, Job, Machine, Strategy
from planner.spec.plan import PhaseName
from planner.tape.format import Tape
from planner.tape.parameter_table import ParameterTable
from planner.tape.program import Block, Moment, Program, Stage
from planner.tape.variants.precision import Precision, trained_storage

T = TypeVar("T")

PAGED_ELEMENTS = 100_000
"""States of smaller tensors are not paged (bitsandbytes/optim/optimizer.py, get_state_buffer)."""

SAMPLE_STAGES = 2
"""A sample that is made on the GPU denoises and decodes."""

STRATEGY_MOMENT = Moment("", "", "", -1)
"""The moment of what a strategy adds outside the model's code."""


class OwnRecording(NamedTuple):
    """What is recorded of one trainer's own model."""

    step: Tape
    optimizer: Tape | None = None
    """if it trains more than the recording of diffusers' model does"""


class Facts(NamedTuple):
    """Everything that a layout reads besides the question: the model, the card, the tapes and the measurements."""

    model: ModelProfile
    gpu: GpuProfile
    step: Tape
    """one training step; if the job only samples, one forward without gradients"""

    optimizer: Tape
    parameters: ParameterTable = ParameterTable()
    """needed if something is split between GPUs, or copied in another format"""

    around: Mapping[str, Tape] = MappingProxyType({})
    """tapes of the text encoders and the VAE: "component/encode", "component/decode-image" """

    sample: Tape | None = None
    """a forward without gradients, for validation"""

    checkpointed: Tape | None = None
    """for partial checkpointing: the step with checkpointing, in addition to the one without"""

    measurements: ModelMeasurements = NO_MEASUREMENTS
    """what measurements of this model on this card say"""

    own_code: Mapping[str, Callable[[], OwnRecording]] = MappingProxyType({})
    """trainer, or a version of it -> a function that reads the recordings of its own model"""

    zero: ZeroSettings | None = None
    """DeepSpeed's sizes, if a launch sets them"""

    def trained_by(self, trainer: str) -> Facts:
        """These facts with the step of a trainer's own model, if that is recorded. ``trainer`` may include a version,
        such as "diffsynth@model-offload"."""
        read = self.own_code.get(trainer) or self.own_code.get(trainer.partition("@")[0])
        if read is None:
            return self
        own = read()
        return self._replace(step=own.step, optimizer=own.optimizer or self.optimizer)


@dataclass
class Run:
    """The stages of a run in order, over one Program, with what the transformations need to know.

    `planner.layout.pipeline.lay_out` makes one from the recordings; the transformations then change it in place.
    """

    configuration: Configuration
    """job, resolved strategy and machine; also available as attributes"""

    facts: Facts
    grid: dict[str, int] = field(default_factory=dict)
    """the shape: atoms B, F, H, W, T, R"""

    trainer: str = "vplan"
    """the trainer whose terms are applied"""

    program: Program = field(default_factory=Program)
    sizes: list[int] = field(default_factory=list)
    """per buffer of the program: bytes at the run's shape"""

    side_streams: dict[int, int] = field(default_factory=dict)
    """buffer -> CUDA stream, if it is not the default one (0). Other streams never reuse its memory, even freed"""

    load: Stage = field(default_factory=lambda: Stage("load", []))
    step: Stage = field(default_factory=lambda: Stage("step", []))
    """forward and backward of one micro-batch in a later step; if the job only samples, one call of the model"""

    first_step: Stage | None = None
    """the first one, if it differs: the optimizer steps inside it, or cuBLAS allocates its workspaces"""

    accumulate: Stage | None = None
    """a further micro-batch before the optimizer steps; its gradients are added to the existing ones"""

    optimizer_first: Stage = field(default_factory=lambda: Stage("optimizer_first", []))
    """the first optimizer step, which creates the states"""

    optimizer: Stage = field(default_factory=lambda: Stage("optimizer", []))
    checkpointed: frozenset[Block] = frozenset()
    """for partial checkpointing: the blocks that are checkpointed"""

    ranks: tuple[int, ...] = ()
    """ranks that allocate differently, including this run's, if an engine has such; see `Configuration.rank`"""

    phases: PhaseStages = field(default_factory=PhaseStages)
    empty_cache: EmptyCache = field(default_factory=EmptyCache)
    device: DeviceTerms = field(default_factory=DeviceTerms)
    host: HostTerms = field(default_factory=HostTerms)
    work: WorkTerms = field(default_factory=WorkTerms)
    engine: EngineTerms = field(default_factory=EngineTerms)
    handover: Handover = field(default_factory=Handover)
    encoding_only: EncodingOnly = field(default_factory=EncodingOnly)
    base: Run | None = None
    """the same recordings before any transformation, if a search laid them out: expensive results are shared there"""

    peaks_only: bool = False
    """whether only its stages' peaks are asked for: validation's denoising and decode are then one buffer each, of the
    size of their own peak, instead of thousands that are the same in every strategy"""

    resized: bool = field(init=False, default=False)
    """whether a recorded buffer was given another size"""

    sums: dict[Callable[[Run], int], int] | None = field(init=False, default=None)
    """results of `summed`, if a search keeps them for this shape and nothing was transformed yet"""

    _shared: dict[object, Any] = field(init=False, default_factory=dict)

    @property
    def job(self) -> Job:
        """The job that is laid out."""
        return self.configuration.job

    @property
    def strategy(self) -> Strategy:
        """The strategy that is laid out, resolved."""
        return self.configuration.strategy

    @property
    def machine(self) -> Machine:
        """The machine that it is laid out for."""
        return self.configuration.machine

    @property
    def recording(self) -> Run:
        """The run before any transformation; this run itself if no such copy was kept."""
        return self.base.recording if self.base is not None else self

    def shared(self, compute: Callable[..., T], *also: object) -> T:
        """The result of `compute` on the untransformed run, cached for all runs that are laid out from it. ``also``:
        further arguments of `compute`, part of the cache key."""
        recording = self.recording
        key = (compute, also) if also else compute
        if key not in recording._shared:
            recording._shared[key] = compute(recording, *also)
        result: T = recording._shared[key]
        return result

    def shared_at_shape(self, compute: Callable[[Run], T], *also: object) -> T:
        """Like `shared`, for a result that depends on sizes: computed on this run and cached per shape. What `compute`
        reads must still be as recorded. ``also``: what else the result depends on, such as the card."""
        cache, key = self.recording._shared, (compute, *self.grid.items(), *also)
        if key not in cache:
            cache[key] = compute(self)
        result: T = cache[key]
        return result

    def shared_by_weights(self, compute: Callable[[Run], T], *also: object) -> T:
        """Like `shared`, for a result that depends only on weights and gradients, which have the same sizes at most
        shapes: cached by their names, buffers and bytes. ``also``: what else the result depends on."""
        cache, weights, gradients = self.recording._shared, self.named("weight"), self.named("gradient")
        sizes = (tuple(map(self.sizes.__getitem__, named.values())) for named in (weights, gradients))
        key = (compute, *also, id(self.facts.parameters), *weights.items(), None, *gradients.items(), *sizes)
        if key not in cache:
            cache[key] = compute(self)
        result: T = cache[key]
        return result

    def summed(self, compute: Callable[[Run], int]) -> int:
        """The result of `compute`, which reads only the sizes of recorded buffers. Before any transformation, it is
        taken from other runs of the same recordings and shape."""
        if self.sums is None:
            return compute(self)
        if compute not in self.sums:
            self.sums[compute] = compute(self)
        return self.sums[compute]

    def untransformed_copy(self) -> Run:
        """A copy to apply transformations to. The run itself, which must have had none, then serves as its base."""
        # Lists of events are shared: a stage's stretches are never changed in place (`planner.tape.program.Stage`).
        return Run(
            self.configuration,
            self.facts,
            self.grid,
            program=self.program.copy(),
            sizes=self.sizes.copy(),
            load=self.load.copy(),
            step=self.step.copy(),
            optimizer_first=self.optimizer_first.copy(),
            optimizer=self.optimizer.copy(),
            checkpointed=self.checkpointed,
            base=self,
        )

    @property
    def streams(self) -> list[int] | None:
        """The CUDA stream of every buffer, as `planner.allocator` takes it; None where all are on the default one."""
        if not self.side_streams:
            return None
        streams = [0] * len(self.sizes)
        for buffer, stream in self.side_streams.items():
            streams[buffer] = stream
        return streams

    def new(self, nbytes: int, category: str, name: str, stream: int = 0) -> int:
        """Adds a buffer of `nbytes` bytes under a category and name; returns its number. No stage allocates it yet."""
        if stream:
            self.side_streams[len(self.sizes)] = stream
        self.sizes.append(nbytes)
        return self.program.buffer(nbytes, category, name)

    def add_new(self, sizes: Sequence[int], category: str, name: str) -> range:
        """Adds a buffer for each of ``sizes``, as `new` does one on the default stream; returns their numbers."""
        self.sizes += sizes
        return self.program.add_buffers(sizes, category, name)

    def resize(self, buffer: int, nbytes: int) -> None:
        """Gives a recorded buffer another size, the same at every shape."""
        self.resized = True
        self.sizes[buffer] = nbytes
        self.program.resize(buffer, nbytes)

    def resize_all(self, sizes: Mapping[int, int]) -> None:
        """Gives several recorded buffers other sizes, as `resize` does one. ``sizes``: buffer -> bytes."""
        self.resized = True
        for buffer, nbytes in sizes.items():
            self.sizes[buffer] = nbytes
        self.program.resize_all(sizes)

    def add(self, stage: Stage, nbytes: int, category: str, name: str, *, at: int | None = None) -> int:
        """Allocates a new buffer in a stage, before its ``at``-th stretch (at the end when None).

        Returns its number.
        """
        buffer = self.new(nbytes, category, name)
        position = len(stage.stretches) if at is None else at
        stage.stretches.insert(position, (STRATEGY_MOMENT._replace(passes=name), [buffer]))
        return buffer

    def place(self, stage: Stage, events: list[int], name: str, *, at: int | None = None) -> None:
        """Puts events into a stage, before its ``at``-th stretch (at the end when None)."""
        position = len(stage.stretches) if at is None else at
        stage.stretches.insert(position, (STRATEGY_MOMENT._replace(passes=name), events))

    def free(self, stage: Stage, buffers: Iterable[int], *, at: int | None = None) -> None:
        """Frees buffers in a stage, before its ``at``-th stretch (at the end when None)."""
        position = len(stage.stretches) if at is None else at
        stage.stretches.insert(position, (STRATEGY_MOMENT, [~buffer for buffer in buffers]))

    def drop(self, stage: Stage, buffers: Iterable[int]) -> None:
        """Removes every event of the buffers from a stage."""
        dropped = set(buffers)
        dropped |= {~buffer for buffer in dropped}
        stage.stretches = [
            (moment, events if dropped.isdisjoint(events) else [event for event in events if event not in dropped])
            for moment, events in stage.stretches
        ]

    def empty(self, stage: Stage) -> None:
        """Removes all events of a stage but the frees of buffers that were allocated before it."""
        made = {event for _, events in stage.stretches for event in events if event >= 0}
        stage.stretches = [
            (moment, [event for event in events if event < 0 and ~event not in made])
            for moment, events in stage.stretches
        ]

    def total_bytes(self, buffers: Iterable[int]) -> int:
        """The bytes of these buffers together, at the run's shape."""
        return sum(map(self.sizes.__getitem__, buffers))

    def named(self, category: str) -> dict[str, int]:
        """Name -> buffer number, for the named buffers of a category ("weight", "gradient", ...)."""
        return self.program.named.get(category, {})

    @property
    def samples_only(self) -> bool:
        """Whether the run only samples; ``step`` is then one call of the model without gradients."""
        return self.job.method == "sample"

    @property
    def calls(self) -> int:
        """How many calls of ``step`` its seconds are for: one, or those that one noise level takes."""
        return calls(self.facts.model, self.job.guided) if self.samples_only else 1

    @property
    def first_pass(self) -> Stage:
        """The first stage after loading: forward and backward, or the first call of sampling."""
        return self.step if self.samples_only else self.first_step or self.step

    @property
    def stages(self) -> list[tuple[PhaseName, Stage]]:
        """The run's stages in order, each with its phase. The optimizer creates its states at the end of the first
        step; the later step is what lasts."""
        more = [self.accumulate] if self.accumulate else []
        phases = self.phases
        encode: list[tuple[PhaseName, Stage]] = [("encode", phases.encode)] if phases.encode else []
        if self.samples_only:
            # The second call finds what the first one left; all further ones are like it.
            return [("load", self.load), *encode, ("denoise", self.step), ("denoise", self.step), *phases.validation]
        save: list[tuple[PhaseName, Stage]] = [("save", phases.save)] if phases.save else []
        once: list[tuple[PhaseName, Stage]] = [("encode", phases.encode_once)] if phases.encode_once else []
        unload: list[tuple[PhaseName, Stage]] = [("first_step", phases.unload)] if phases.unload else []
        later: list[tuple[PhaseName, Stage]] = [
            *encode,
            *[("train", stage) for stage in (self.step, *more)],
            ("optimizer", self.optimizer),
        ]
        early = SAMPLE_STAGES if phases.samples_leave else 0
        return [
            *[("load", stage) for stage in phases.before_load],
            ("load", self.load),
            *[("load", stage) for stage in phases.wrap],
            *once,
            *unload,
            *encode,
            *[("first_step", stage) for stage in (self.first_pass, *more, self.optimizer_first)],
            *phases.validation[:early],
            *([] if phases.one_step else later),
            *phases.validation[early:],
            *save,
        ]

    def empties_cache_after(self, phase: PhaseName, stage: Stage, validates: bool) -> bool:
        """Whether the trainer empties the allocator's cache after a stage of ``stages`` (encoding is handled
        elsewhere). ``validates``: whether a validation sample comes next, if the run makes any."""
        cache = self.empty_cache
        loaded = phase == "load" and cache.after_load
        trained = stage is self.optimizer and bool(self.phases.validation) and cache.before_validation
        sampled = not self.samples_only and any(stage is entry for _, entry in self.phases.validation)
        behind = loaded or (trained and validates) or (sampled and cache.around_decode)
        return behind or any(stage is entry for entry in cache.after)

    @functools.cached_property
    def leftovers(self) -> list[int]:
        """Buffers that the recorded step leaves allocated for the next one to replace, such as the batch and the
        loss."""
        if self.base is not None:
            return self.base.leftovers
        stay = {*self.named("gradient").values(), *self.named("weight").values()}
        return [buffer for buffer in alive(self.step.ops, []) if buffer not in stay]

    @property
    def trained_experts(self) -> int:
        """How many copies of the trained weights the run holds: 2 when it trains both experts of a model, else 1."""
        return 2 if self.job.experts == "both" else 1

    @property
    def paged_states(self) -> list[int]:
        """Buffers of the optimizer states that a paged optimizer pages; each has one byte per element."""
        states = self.named("optimizer").items()
        return [b for name, b in states if ":state" in name and self.sizes[b] >= PAGED_ELEMENTS]

    @property
    def gradient_bytes(self) -> int:
        """The bytes of all gradients together, at the run's shape."""
        return self.summed(_gradient_bytes)

    @property
    def trained_parameters(self) -> int:
        """The number of trained parameters, over all experts that the run trains."""
        if self.strategy.sharding in SPLIT:
            return self.trained_experts * self._split_elements
        return self.trained_experts * (self.gradient_bytes // self._trained_size)

    @property
    def in_own_code(self) -> bool:
        """Whether the step was recorded from the trainer's own model, which then needs no terms for what it does
        differently."""
        return bool({self.trainer, self.trainer.partition("@")[0]} & self.facts.own_code.keys())

    @property
    def trained_bytes(self) -> int:
        """Bytes of the trained parameters as the optimizer sees them, 4 or 2 each."""
        return (4 if trained_storage(self.job, self.strategy) == "fp32" else 2) * self.trained_parameters

    @property
    def _trained_size(self) -> int:
        return 4 if Precision.of(self.job, self.strategy).trained == "fp32" else 2

    @functools.cached_property
    def _split_elements(self) -> int:
        """Elements of what is trained. All of it is in 16 bits, including what a recording keeps in fp32."""
        elements, size = self.elements, self._trained_size
        gradients = self.named("gradient").items()
        return sum(elements.get(name) or self.sizes[buffer] // size for name, buffer in gradients)

    @functools.cached_property
    def elements(self) -> Mapping[str, int]:
        """Name -> elements of the weights that are parameters, in the model's order, for engines that split them.

        Read it before a transformation resizes the weights: it is computed from the recorded step, in 16 bits.
        """
        return self.shared_by_weights(_elements)

    @functools.cached_property
    def parameters(self) -> Mapping[str, int]:
        """Name -> buffer of the weights that are parameters, in the model's order."""
        return self.shared_by_weights(_parameters)

    @property
    def optimizer_scale(self) -> float:
        """Bytes of trained parameters of the full model per recorded byte: by this factor an optimizer step's work
        grows."""
        gradients, shares = self.named("gradient"), self.shared(_recorded_shares)
        sizes = list(map(self.sizes.__getitem__, gradients.values()))
        recorded_bytes = sum(map(operator.mul, sizes, map(shares.__getitem__, gradients)))
        return sum(sizes) / recorded_bytes if recorded_bytes else 1.0  # none of those that are recorded may train

    @property
    def swapped_blocks(self) -> dict[Block, list[int]]:
        """Buffers of the weights of the swapped blocks.

        These are the last blocks. If only some blocks are checkpointed, they are the last of those, because backward
        reads the weights of the others without fetching them again (except for trainers in `fetches_again`). Some
        trainers count the blocks of each stack separately.
        """
        blocks, count = self.swappable_weights, self.strategy.swap_blocks
        any_block = not self.checkpointed or fetches_again(self.trainer)
        names = [block for block in blocks if any_block or block in self.checkpointed]
        split = split_of(self.trainer, self.facts.model, count) if count else None
        if split is None:
            return {block: blocks[block] for block in names[len(names) - count :]}
        swapped = []
        for stack, leaving in zip(self.facts.model.stacks, split, strict=True):
            own = [block for block in names if block[0] == stack.list]
            swapped += own[len(own) - leaving :]
        return {block: blocks[block] for block in swapped}

    @property
    def swappable_weights(self) -> dict[Block, list[int]]:
        """Buffers of the weights of each block that need not stay on the GPU, in the order in which blocks run.

        These are the frozen weights; or all weights, if the optimizer steps while the block is there for its backward.
        """
        return self.shared(_weights_by_block if self.strategy.optimizer_step == "backward" else _frozen_by_block)


def _gradient_bytes(run: Run) -> int:
    return run.total_bytes(run.named("gradient").values())


def _parameters(run: Run) -> dict[str, int]:
    table = run.facts.parameters
    return {name: buffer for name, buffer in run.named("weight").items() if table.is_parameter(name)}


def _elements(run: Run) -> dict[str, int]:
    table = run.facts.parameters
    return {name: table.elements(name, run.sizes[buffer]) for name, buffer in run.parameters.items()}


def _weights_by_block(run: Run) -> dict[Block, list[int]]:
    return _by_block(run, run.named("weight"))


def _frozen_by_block(run: Run) -> dict[Block, list[int]]:
    trained = run.named("gradient")
    return _by_block(run, {name: buffer for name, buffer in run.named("weight").items() if name not in trained})


def _by_block(run: Run, weights: Mapping[str, int]) -> dict[Block, list[int]]:
    blocks: dict[Block, list[int]] = {}
    for name, buffer in weights.items():
        block = run.facts.step.block_of(name)
        if block is not None:
            blocks.setdefault(block, []).append(buffer)
    order = [stack.list for stack in run.facts.model.stacks]
    return dict(sorted(blocks.items(), key=lambda entry: order.index(entry[0][0])))


def _recorded_shares(run: Run) -> dict[str, float]:
    return {name: run.facts.step.recorded_share(name) for name in run.named("gradient")}


def main_piece(tape: Tape) -> str:
    """The name of the piece that is a training step, or one call of the model if the job only samples."""
    return "step" if "step" in tape.pieces else "denoise"


Transform = Callable[[Run], None]
"""A transformation: changes a Run in place."""
