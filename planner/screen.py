"""A cheap look at a strategy: allocated peak, seconds and host RAM without the allocator's replay.

The replay (`planner.estimate`) says what is reserved. A search looks at hundreds of strategies first, and what a look
says is exact but for fragmentation: what is allocated is a lower bound of what is reserved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from planner import dialects, host
from planner.estimate import outside_bytes, replayed_alone
from planner.job import Bucket, Job, Machine, Strategy
from planner.layout import TRANSFORMS, choose_kernels, end_of_step, refuse_unpriced
from planner.phases import caching
from planner.replay import BLOCK_ROUND_BYTES
from planner.run import Facts, Run, recorded
from planner.shapes import grid
from planner.tape import Block, Program, Stage
from planner.timing import StepWork, Traffic, step_seconds
from planner.traffic import Passes, passes_work, step_work, traffic

FactsGetter = Callable[[Job, Strategy, Machine], Facts]
"""Gives what is known about a question, or raises a VplanError when there is no recording for it."""


@dataclass(frozen=True)
class Look:
    """What one look at a strategy said, at the worst of the job's shapes."""

    strategy: Strategy
    allocated_bytes: int
    device_bytes: int
    """A lower bound: as if nothing were lost to fragmentation."""

    host_ram_bytes: int
    step_seconds: float
    in_optimizer: bool
    """Whether the peak is where the optimizer's own step decides it."""


class Screen:
    """Looks at strategies, and keeps what they share: tapes laid out at full depth, sizes at a shape, counted work."""

    def __init__(self, facts: FactsGetter, trainer: str = "vplan") -> None:
        self.facts = facts
        self.trainer = trainer
        self._steps: dict[tuple[object, ...], tuple[Program, Stage, Stage, frozenset[Block]]] = {}
        self._laid_out: dict[tuple[object, ...], Run] = {}
        self._sizes: dict[tuple[object, ...], list[int]] = {}
        self._work: dict[tuple[object, ...], Passes] = {}
        self._looks: dict[tuple[object, ...], Look] = {}

    def floor_seconds(self, job: Job, strategy: Strategy, machine: Machine) -> float:
        """Seconds of a step's passes if nothing had to be moved: never more than a look says, and known sooner."""
        facts = self.facts(job, strategy, machine)
        return max(
            step_seconds(StepWork(self._passes(run)[0]), facts.gpu, strategy, job, machine, Traffic()).total
            for run in (self._empty(job, strategy, machine, facts, grid(facts.model, job, at)) for at in job.shapes)
        )

    def look(self, job: Job, strategy: Strategy, machine: Machine) -> Look:
        """What a resolved strategy needs, at the worst of the job's shapes."""
        key = (job, strategy, machine)
        if key not in self._looks:
            shapes = [self._look_at(job, strategy, machine, shape) for shape in job.shapes]
            worst = max(shapes, key=lambda look: look.allocated_bytes)
            self._looks[key] = Look(
                strategy,
                worst.allocated_bytes,
                worst.device_bytes,
                max(look.host_ram_bytes for look in shapes),
                max(look.step_seconds for look in shapes),
                worst.in_optimizer,
            )
        return self._looks[key]

    def host_ram_bytes(self, job: Job, strategy: Strategy, machine: Machine) -> int:
        """Host RAM alone, for less than a look."""
        facts = self.facts(job, strategy, machine)
        runs = (self._bare(job, strategy, machine, facts, grid(facts.model, job, shape)) for shape in job.shapes)
        return max(host.ram_bytes(run, machine) for run in runs)

    def encoding_bytes(self, job: Job, strategy: Strategy, machine: Machine) -> int:
        """Device bytes of what is cached before training, at the worst of the job's shapes."""
        facts = self.facts(job, strategy, machine)
        runs = [self._bare(job, strategy, machine, facts, grid(facts.model, job, shape)) for shape in job.shapes]
        peaks = [replayed_alone(encoding).reserved_peak_bytes for run in runs for encoding in caching(run)]
        return max(peaks, default=0) + facts.gpu.context_bytes

    def _look_at(self, job: Job, strategy: Strategy, machine: Machine, shape: Bucket) -> Look:
        facts = self.facts(job, strategy, machine)
        where = grid(facts.model, job, shape)
        run = self.lay_out(job, strategy, machine, facts, where, self.trainer)
        allocated, in_optimizer = allocated_peak(run)
        encoding = max((entry.encode_peak_bytes for entry in caching(run)), default=0)
        if encoding > allocated:
            allocated, in_optimizer = encoding, False
        outside = outside_bytes(run)
        work = step_work(run, self._passes(run))
        seconds = step_seconds(work, facts.gpu, strategy, job, machine, traffic(run)).total * run.calls
        ram = host.ram_bytes(run, machine)
        return Look(strategy, allocated, allocated + outside, ram, seconds, in_optimizer)

    def _empty(self, job: Job, strategy: Strategy, machine: Machine, facts: Facts, where: dict[str, int]) -> Run:
        """A run that knows which work it does: laid out only where that says which blocks are checkpointed."""
        if facts.checkpointed is not None:
            return self._bare(job, strategy, machine, facts, where)
        return Run(job, strategy, machine, facts, grid=where)

    def _passes(self, run: Run) -> Passes:
        key = (id(run.facts.step), run.checkpointed, *run.grid.values())
        if key not in self._work:
            self._work[key] = passes_work(run)
        return self._work[key]

    def lay_out(
        self, job: Job, strategy: Strategy, machine: Machine, facts: Facts, where: dict[str, int], trainer: str
    ) -> Run:
        """As `planner.layout.lay_out`, from a copy of the tapes laid out before."""
        refuse_unpriced(job, strategy)
        base = self._bare(job, strategy, machine, facts, where)
        run = _shared(
            base,
            program=_copy_of(base.program),
            load=_stage(base.load),
            step=_stage(base.step),
            emptied_after=[],
            optimizer_first=_stage(base.optimizer_first),
            optimizer=_stage(base.optimizer),
            sizes=base.sizes.copy(),
        )
        choose_kernels(run)
        for transform in (*TRANSFORMS, *dialects.terms(trainer)):
            transform(run)
        return run

    def _bare(self, job: Job, strategy: Strategy, machine: Machine, facts: Facts, where: dict[str, int]) -> Run:
        """The tapes laid out once, at a shape, before any transformation. Not to be changed."""
        tapes = (id(facts.step), id(facts.checkpointed), strategy.checkpointed_blocks, id(facts.optimizer))
        if tapes not in self._laid_out:
            self._laid_out[tapes] = self._unfolded(Run(job, strategy, machine, facts))
        base = self._laid_out[tapes]
        shape = (*tapes, *where.values())
        if shape not in self._sizes:
            self._sizes[shape] = base.program.bytes_of(where)
        sizes = self._sizes[shape]
        return _shared(base, job=job, strategy=strategy, machine=machine, facts=facts, sizes=sizes, grid=where)

    def _unfolded(self, run: Run) -> Run:
        """Both tapes laid out; the step's, which is most of the work, only once per recording."""
        facts, optimizer, blocks = run.facts, run.facts.optimizer, run.strategy.checkpointed_blocks
        key = (id(facts.step), id(facts.checkpointed), blocks)
        if key not in self._steps:
            program = Program()
            self._steps[key] = program, *recorded(program, facts, run.strategy)
        program, run.load, run.step, run.checkpointed = self._steps[key]
        run.program = _copy_of(program)
        run.optimizer_first = run.program.unfold(optimizer, "optimizer_first")
        run.optimizer = run.program.unfold(optimizer, "optimizer")
        end_of_step(run)
        return run


def _shared(base: Run, **changes: Any) -> Run:
    """A run like another of the same tapes, with what takes long to find out and is the same."""
    run = replace(base, **changes)
    run.__dict__.update(block_inputs=base.block_inputs, swappable_weights=base.swappable_weights)
    return run


def _copy_of(program: Program) -> Program:
    return Program(
        program.buffers.copy(),
        program.category.copy(),
        program.op.copy(),
        program.kernel.copy(),
        program.sizes.copy(),
        program.named.copy(),
    )


def _stage(stage: Stage) -> Stage:
    return Stage(stage.name, [(moment, events.copy()) for moment, events in stage.stretches])


def allocated_peak(run: Run) -> tuple[int, bool]:
    """The most bytes that tensors hold at once in a whole run, and whether that is in the optimizer's step.

    (Without expandable segments a block may keep up to 1 MiB more than was asked for, which is not counted here.)
    """
    rounded = [-(-size // BLOCK_ROUND_BYTES) * BLOCK_ROUND_BYTES for size in run.sizes]
    # Freeing ~n reads index -1 - n, which is -rounded[n] in what follows it backwards.
    change = rounded + [-size for size in reversed(rounded)]
    stages = run.stages
    rises = {id(stage): _rise_and_peak(stage, change) for _, stage in stages}
    held = 0
    peaks = {True: 0, False: 0}
    for _, stage in stages:
        rise, peak = rises[id(stage)]
        optimizer = stage.name.startswith("optimizer")
        peaks[optimizer] = max(peaks[optimizer], held + peak)
        held += rise
    return max(peaks.values()), peaks[True] > peaks[False]


def _rise_and_peak(stage: Stage, change: list[int]) -> tuple[int, int]:
    """What a stage adds to what is allocated, and the most it adds on the way."""
    held = list(accumulate(map(change.__getitem__, stage.ops)))
    return (held[-1], max(held)) if held else (0, 0)
