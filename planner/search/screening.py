"""A quick estimate of a strategy: allocated peak, seconds and host RAM without the allocator's replay.

The replay (`planner.estimate.estimate`) says what is reserved. A search makes hundreds of quick estimates first, and
they are exact but for fragmentation: what is allocated is a lower bound of what is reserved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from planner.allocator.implementation import held
from planner.catalog.shapes import grid
from planner.errors import NotEstimatedError, NotRecordedError
from planner.estimate import host_ram
from planner.estimate.estimate import outside_bytes
from planner.estimate.roofline import StepWork, Traffic, step_seconds
from planner.estimate.stages import replay_encoding
from planner.estimate.traffic import Passes, passes_work, step_work, traffic
from planner.layout.phases import encoding_runs
from planner.layout.pipeline import drop_other_workspaces, free_leftovers, transforms, workspace_kernels
from planner.layout.run import Facts, Run, unfold_recording
from planner.layout.single_gpu import SWAP_RING_BUFFERS
from planner.layout.unpriced import refuse_unpriced, refuse_untaken
from planner.search import lower_bounds
from planner.spec.configuration import Configuration
from planner.spec.job import Bucket, Job, Machine, Strategy
from planner.tape.program import Stage

FactsGetter = Callable[[Job, Strategy, Machine], Facts]
"""Gives what is known about a question, or raises a VplanError when there is no recording for it."""


PastOutcome = Literal["ran", "ran out"] | None
"""Of runs of one plan, where some were measured: it had memory enough, or ran out."""


class QuickEstimate(NamedTuple):
    """What a strategy needs at the worst of the job's shapes, from its tape without a replay: bytes and seconds."""

    strategy: Strategy
    allocated_bytes: int
    device_bytes: int
    """A lower bound: as if nothing were lost to fragmentation."""

    host_ram_bytes: int
    step_seconds: float
    in_optimizer: bool
    """Whether the peak is where the optimizer's own step decides it."""

    states_bytes: int
    """What the optimizer's states take of it."""

    outcome: PastOutcome = None
    """What this very plan did where it was tried."""


class Screen:
    """Makes quick estimates, and keeps what they share: tapes laid out at full depth, sizes at a shape, work."""

    def __init__(self, facts: FactsGetter, trainer: str = "vplan") -> None:
        self._find = facts
        self.trainer = trainer
        self._facts: dict[tuple[Job, Strategy, Machine], Facts | NotEstimatedError] = {}
        self._steps: dict[tuple[object, ...], Run | NotRecordedError] = {}
        self._laid_out: dict[tuple[object, ...], Run] = {}
        self._sizes: dict[tuple[object, ...], TapeSizes] = {}
        self._work: dict[tuple[object, ...], Passes] = {}
        self._floors: dict[tuple[object, ...], lower_bounds.Walked] = {}
        self._quick_estimates: dict[tuple[object, ...], QuickEstimate] = {}

    def facts(self, job: Job, strategy: Strategy, machine: Machine) -> Facts:
        """What is known about a question, looked up once; a NotEstimatedError where nothing is, or not enough."""
        key = (job, strategy, machine)
        if key not in self._facts:
            try:
                refuse_unpriced(job, strategy, machine)
                self._facts[key] = found = self._find(job, strategy, machine)
                refuse_untaken(job, strategy, machine, found)
            except NotEstimatedError as error:
                self._facts[key] = error
        known = self._facts[key]
        if isinstance(known, NotEstimatedError):
            raise known
        return known

    def floor_seconds(self, job: Job, strategy: Strategy, machine: Machine) -> float:
        """Seconds of a step's passes if nothing had to be moved: never more than a quick estimate's, and
        known sooner."""
        facts = self.facts(job, strategy, machine)
        return max(
            step_seconds(StepWork(self._passes(run)[0]), facts.gpu, strategy, job, machine, Traffic()).total
            for run in (self._empty(job, strategy, machine, facts, grid(facts.model, job, at)) for at in job.shapes)
        )

    def floor_bytes(self, job: Job, strategy: Strategy, machine: Machine) -> int:
        """What a strategy takes on the device for certain, with as many swapped blocks or fewer: never more than
        its quick estimate, and known sooner."""
        facts = self.facts(job, strategy, machine)
        nbytes = max(
            lower_bounds.parameter_bytes(job, strategy, facts.model.parameters),
            max((walked.device_bytes(strategy) for walked in self._walked(job, strategy, machine)), default=0),
        )
        return facts.measurements.correction.peak(nbytes, nbytes, facts.gpu.context_bytes).device_bytes

    def parameter_bytes(self, job: Job, strategy: Strategy, machine: Machine) -> int:
        """A lower bound of device bytes from weights, gradients and optimizer states alone; needs no tape."""
        facts = self.facts(job, strategy, machine)
        nbytes = lower_bounds.parameter_bytes(job, strategy, facts.model.parameters)
        return facts.measurements.correction.peak(nbytes, nbytes, facts.gpu.context_bytes).device_bytes

    def largest_block_bytes(self, job: Job, strategy: Strategy, machine: Machine) -> int | None:
        """The most that one swapped block more takes off the device; None where that is not known."""
        if not (walked := self._walked(job, strategy, machine)):
            return None
        copies = 2 if strategy.inactive_expert == "gpu" else 1
        nbytes = copies * max(max(each.frozen_blocks, default=0) for each in walked)
        return self.facts(job, strategy, machine).measurements.correction.peak(nbytes, nbytes, 0).reserved_bytes

    def swapped_bytes(self, job: Job, strategy: Strategy, machine: Machine) -> int:
        """What the swapped blocks of the expert that runs would take on the GPU beyond the ring they come through."""
        facts = self.facts(job, strategy, machine)
        run = self._bare(job, strategy, machine, facts, grid(facts.model, job))
        blocks = [run.total_bytes(buffers) for buffers in run.swapped_blocks.values()]
        return sum(blocks) - min(SWAP_RING_BUFFERS, len(blocks)) * max(blocks, default=0)

    def floor_ram_bytes(self, job: Job, strategy: Strategy, machine: Machine) -> int:
        """A lower bound of host RAM in bytes per node: at most `host_ram_bytes`, and faster to compute."""
        parameters = self.facts(job, strategy, machine).model.parameters
        offloaded = host_ram.floor_bytes(job, strategy, machine, parameters)
        waiting = max((walked.host_bytes(strategy) for walked in self._walked(job, strategy, machine)), default=0)
        return offloaded + machine.gpus * waiting

    def _walked(self, job: Job, strategy: Strategy, machine: Machine) -> list[lower_bounds.Walked]:
        """The recorded step at the job's shapes; nothing where it says too little of what will be there."""
        if self.trainer != "vplan" or not lower_bounds.is_walked(job, strategy):  # others store some weights otherwise
            return []
        facts, found = self.facts(job, strategy, machine), []
        for shape in job.shapes:
            where = grid(facts.model, job, shape)
            key = (id(facts.step), *where.values())
            if key not in self._floors:
                self._floors[key] = lower_bounds.walked(facts.step, where)
            found.append(self._floors[key])
        return found

    def quick_estimate(self, job: Job, strategy: Strategy, machine: Machine) -> QuickEstimate:
        """What a resolved strategy needs at the worst of the job's shapes, without a replay; cached."""
        key = (job, strategy, machine)
        if key not in self._quick_estimates:
            shapes = [self._quick_estimate_at(job, strategy, machine, shape) for shape in job.shapes]
            worst = max(shapes, key=lambda at_shape: at_shape.allocated_bytes)
            self._quick_estimates[key] = QuickEstimate(
                strategy,
                worst.allocated_bytes,
                worst.device_bytes,
                max(at_shape.host_ram_bytes for at_shape in shapes),
                max(at_shape.step_seconds for at_shape in shapes),
                worst.in_optimizer,
                worst.states_bytes,
                self.outcome(job, strategy, machine),
            )
        return self._quick_estimates[key]

    def outcome(self, job: Job, strategy: Strategy, machine: Machine) -> PastOutcome:
        """How earlier runs of exactly this plan ended: "ran", "ran out", or None."""
        return self.facts(job, strategy, machine).measurements.past_outcome(job, strategy, machine, self.trainer)

    def host_ram_bytes(self, job: Job, strategy: Strategy, machine: Machine) -> int:
        """Host RAM in bytes per node at the worst of the job's shapes; faster than a quick estimate."""
        if strategy.context_parallel > 1:  # what waits there is divided once it is laid out
            return self.quick_estimate(job, strategy, machine).host_ram_bytes
        facts = self.facts(job, strategy, machine)
        runs = (self._bare(job, strategy, machine, facts, grid(facts.model, job, shape)) for shape in job.shapes)
        return max(host_ram.ram_bytes(run, machine) for run in runs)

    def encoding_bytes(self, job: Job, strategy: Strategy, machine: Machine) -> int:
        """Device bytes of what is cached before training, at the worst of the job's shapes, and at the most."""
        facts = self.facts(job, strategy, machine)
        runs = [
            Run(Configuration(job, strategy, machine), facts, grid(facts.model, job, shape)) for shape in job.shapes
        ]
        each = [encoding for run in runs for encoding in encoding_runs(run)]
        peaks = (replay_encoding(one).reserved_peak_bytes + one.device.split_bytes["encode"] for one in each)
        reserved = max(peaks, default=0)
        return facts.measurements.correction.peak(reserved, reserved, facts.gpu.context_bytes, "encode").device_bytes

    def allocated_bytes(self, job: Job, strategy: Strategy, machine: Machine) -> int:
        """The peak that a quick estimate begins with, at the job's own shape: what tensors hold once loading has begun,
        without what is cached before."""
        facts = self.facts(job, strategy, machine)
        where = grid(facts.model, job)
        run = self.lay_out(job, strategy, machine, facts, where, self.trainer)
        return allocated_peak(run, self._sizes_at(job, strategy, machine, facts, where))[0]

    def _quick_estimate_at(self, job: Job, strategy: Strategy, machine: Machine, shape: Bucket) -> QuickEstimate:
        facts = self.facts(job, strategy, machine)
        where = grid(facts.model, job, shape)
        run = self.lay_out(job, strategy, machine, facts, where, self.trainer)
        allocated, in_optimizer = allocated_peak(run, self._sizes_at(job, strategy, machine, facts, where))
        correction, outside = facts.measurements.correction, outside_bytes(run)
        device = correction.peak(allocated, allocated, outside).device_bytes
        encoding = max((entry.encoding_only.peak_bytes for entry in encoding_runs(run)), default=0)
        if encoding > allocated:
            allocated, in_optimizer = encoding, False
        device = max(device, correction.peak(encoding, encoding, outside, "encode").device_bytes)
        work = step_work(run, self._passes(run))
        seconds = step_seconds(work, facts.gpu, strategy, job, machine, traffic(run)).total * run.calls
        ram = host_ram.ram_bytes(run, machine)
        states = run.total_bytes(run.named("optimizer").values())
        return QuickEstimate(strategy, allocated, device, ram, seconds, in_optimizer, run.trained_experts * states)

    def _empty(self, job: Job, strategy: Strategy, machine: Machine, facts: Facts, where: dict[str, int]) -> Run:
        """A run that knows which work it does: laid out only where that says which blocks are checkpointed."""
        if facts.checkpointed is not None:
            return self._bare(job, strategy, machine, facts, where)
        return Run(Configuration(job, strategy, machine), facts, where)

    def _passes(self, run: Run) -> Passes:
        key = (id(run.facts.step), run.checkpointed, *run.grid.values())
        if key not in self._work:
            self._work[key] = passes_work(run)
        return self._work[key]

    def lay_out(
        self, job: Job, strategy: Strategy, machine: Machine, facts: Facts, where: dict[str, int], trainer: str
    ) -> Run:
        """`planner.layout.pipeline.lay_out`, starting from a copy of tapes that were unfolded before."""
        run = self._bare(job, strategy, machine, facts, where).untransformed_copy()
        for transform in transforms(trainer):
            transform(run)
        return run

    def _bare(self, job: Job, strategy: Strategy, machine: Machine, facts: Facts, where: dict[str, int]) -> Run:
        """The tapes laid out once, at a shape, before any transformation. Not to be changed."""
        base = self._unfolded(job, strategy, machine, facts)
        sizes = self._sizes_at(job, strategy, machine, facts, where).nbytes
        configuration = Configuration(job, strategy, machine)
        return replace(base, base=base, configuration=configuration, facts=facts, sizes=sizes, grid=where)

    def _sizes_at(
        self, job: Job, strategy: Strategy, machine: Machine, facts: Facts, where: dict[str, int]
    ) -> TapeSizes:
        """What every buffer and stretch of the tapes takes at a shape."""
        shape = (*_tapes(facts, strategy, machine), *where.values())
        if shape not in self._sizes:
            self._sizes[shape] = TapeSizes.of(self._unfolded(job, strategy, machine, facts), where)
        return self._sizes[shape]

    def _unfolded(self, job: Job, strategy: Strategy, machine: Machine, facts: Facts) -> Run:
        """Both tapes laid out; the step's, which is most of the work, only once per recording."""
        tapes = _tapes(facts, strategy, machine)
        if tapes not in self._laid_out:
            step = self._step(job, strategy, machine, facts)
            configuration = step.configuration._replace(strategy=strategy)
            program, copy = step.program.copy(), step.step.copy()
            run = replace(step, base=step, configuration=configuration, facts=facts, program=program, step=copy)
            run.optimizer_first = run.program.unfold(facts.optimizer, "optimizer_first")
            run.optimizer = run.program.unfold(facts.optimizer, "optimizer")
            free_leftovers(run)
            self._laid_out[tapes] = run
        return self._laid_out[tapes]

    def _step(self, job: Job, strategy: Strategy, machine: Machine, facts: Facts) -> Run:
        key = _tapes(facts, strategy, machine)[:-1]
        if key not in self._steps:
            run = Run(Configuration(job, strategy, machine), facts)
            try:
                run.load, run.step, run.checkpointed = unfold_recording(run.program, facts, strategy)
                drop_other_workspaces(run)
                self._steps[key] = run
            except NotRecordedError as error:  # two recordings that cannot be put together, of which many ask
                self._steps[key] = error
        found = self._steps[key]
        if isinstance(found, NotRecordedError):
            raise found
        return found


def _tapes(facts: Facts, strategy: Strategy, machine: Machine) -> tuple[object, ...]:
    """What tells one layout from another: the recordings, of how many blocks each is taken, and attention's kernel."""
    step = (
        id(facts.step),
        id(facts.checkpointed),
        strategy.checkpointed_blocks,
        workspace_kernels(strategy, machine, facts),
    )
    return *step, id(facts.optimizer)


@dataclass
class TapeSizes:
    """The sizes of all buffers of a run's tapes at one shape, before any transformation."""

    run: Run | None = None
    nbytes: list[int] = field(default_factory=list)
    """by buffer"""

    @classmethod
    def of(cls, run: Run, where: Mapping[str, int]) -> TapeSizes:
        """The sizes at the shape of the grid `where`."""
        return cls(run, run.program.bytes_of(where))

    @functools.cached_property
    def stretches(self) -> dict[int, tuple[int, int]]:
        """id of a stretch's list of events -> what it adds to what is allocated, and the most on the way.

        Worked out when first asked for: who asks for host RAM alone, at many shapes, does without.
        """
        run = self.run
        stages = (run.load, run.step, run.optimizer_first, run.optimizer) if run else ()
        return {id(events): held(events, self.nbytes) for stage in stages for _, events in stage.stretches if events}


UNKNOWN = TapeSizes()


def allocated_peak(run: Run, base: TapeSizes = UNKNOWN) -> tuple[int, bool]:
    """The most bytes that tensors hold at once in a whole run, and whether that is in the optimizer's step.

    ``base``: of the tapes it was laid out from, so as not to sum up again what is as it was. (Without expandable
    segments a block may keep up to 1 MiB more than was asked for, which is not counted here.)
    """
    known = {} if run.resized else base.stretches.copy()
    stages = run.stages
    rises = {id(stage): _rise_and_peak(stage, run.sizes, known) for _, stage in stages}
    risen = 0
    peaks = {True: 0, False: 0}
    for _, stage in stages:
        rise, peak = rises[id(stage)]
        optimizer = stage.name.startswith("optimizer")
        peaks[optimizer] = max(peaks[optimizer], risen + peak)
        risen += rise
    return max(peaks.values()), peaks[True] > peaks[False]


def _rise_and_peak(stage: Stage, sizes: list[int], known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """What a stage adds to what is allocated, and the most it adds on the way.

    ``known``: the same as is returned, of lists of events by their ids; those of a first step come again in the later
    one.
    """
    risen = peak = 0
    for _, events in stage.stretches:
        if events:
            if id(events) not in known:
                known[id(events)] = held(events, sizes)
            rise, most = known[id(events)]
            peak = max(peak, risen + most)
            risen += rise
    return risen, peak
