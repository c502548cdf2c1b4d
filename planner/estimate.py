"""Job + Strategy + Machine -> Estimate. Pure: records in, record out; no clock, file, GPU or torch.

The phases run in order on one replayed allocator, because what it holds carries over: load, first step (the optimizer
creates its states), then a later step, which is where most runs die.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from planner import attention, host, margin
from planner.job import Job, Machine, Strategy
from planner.layout import lay_out
from planner.plan import Breakdown, Estimate, Peak, PhaseName, PhasePeak
from planner.replay import BLOCK_ROUND_BYTES, CachingAllocator, Replayed
from planner.rules import resolve
from planner.run import Facts, Run
from planner.shapes import grid
from planner.tape import Moment, Stage
from planner.timing import StepWork, optimizer_work_of, step_seconds, total_flops, work_of
from planner.traffic import traffic
from planner.units import MIB

Layout = Callable[[Job, Strategy, Machine, Facts, dict[str, int], str], Run]
"""Lays a run out, as ``planner.layout.lay_out`` does."""

NCCL_BYTES = 600 * MIB
"""One communicator: 544 to 688 MB on four A100 (NVIDIA/nccl#964), 512 MiB even for one rank (nccl#2363)."""

BREAKDOWN = {
    "weight": "weights",
    "gradient": "gradients",
    "optimizer": "optimizer",
    "batch": "activations",
    "activation": "activations",
    "temporary": "temporary",
    "workspace": "workspace",
    "residents": "residents",
    "buckets": "buckets",
}
"""A buffer's category -> its part of the breakdown."""


@dataclass(frozen=True)
class Played:
    """One stage replayed: its phase, its peaks, and what stayed allocated behind it."""

    phase: PhaseName
    stage: Stage
    replayed: Replayed
    allocated_after_bytes: int


def estimate(
    job: Job, strategy: Strategy, machine: Machine, facts: Facts, trainer: str = "vplan", layout: Layout = lay_out
) -> Estimate:
    """What happens when ``job`` runs under ``strategy`` on ``machine``; the worst of the job's buckets.

    ``layout`` may give runs from a cache, as a search does.
    """
    strategy = resolve(job, strategy, machine)
    return max(
        (
            _of_run(layout(job, strategy, machine, facts, where, trainer), where)
            for where in (grid(facts.model, job, shape) for shape in job.shapes)
        ),
        key=lambda found: found.peak.device_bytes,
    )


def after_step_bytes(
    job: Job, strategy: Strategy, machine: Machine, facts: Facts, trainer: str = "vplan"
) -> int:
    """What stays allocated once a step is over: weights, optimizer states, residents and persistent buffers."""
    strategy = resolve(job, strategy, machine)
    run = lay_out(job, strategy, machine, facts, grid(facts.model, job), trainer)
    return play(run)[-1].allocated_after_bytes


def _of_run(run: Run, shape: dict[str, int]) -> Estimate:
    """The estimate of a laid-out run; ``shape`` is the grid it was laid out at."""
    job, strategy, machine, facts = run.job, run.strategy, run.machine, run.facts
    played = play(run)
    outside = facts.gpu.context_bytes + (NCCL_BYTES if machine.world > 1 else 0)
    phases: dict[PhaseName, PhasePeak] = {}
    for entry in played:
        seen = _phase_peak(entry.replayed, outside)
        known = phases.get(entry.phase)
        phases[entry.phase] = seen if known is None or seen.device_bytes > known.device_bytes else known
    top = _peak_stage(played)
    peak = PhasePeak(**{name: max(getattr(seen, name) for seen in phases.values()) for name in PhasePeak.model_fields})
    optimizer = optimizer_work_of(facts.optimizer, "optimizer", shape, run.optimizer_scale)
    work = StepWork(work_of(facts.step, "step", shape), optimizer)
    seconds = step_seconds(work, facts.gpu, strategy, job, machine, traffic(run))
    budget = facts.gpu.allocatable_bytes - machine.reserve
    low, high = margin.interval(peak.device_bytes)
    host_bytes = host.ram_bytes(run, machine)
    limit = _limit(low, budget, host_bytes, machine)
    return Estimate(
        job=job,
        strategy=strategy,
        machine=machine,
        peak=Peak(**peak.__dict__, phase=top.phase, moment=describe(top, strategy)),
        phases=phases,
        breakdown=_breakdown(run, played, top, peak, outside),
        host_ram_bytes=host_bytes,
        disk_bytes=host.disk_bytes(run),
        step_seconds=seconds.total,
        flops=total_flops(work, strategy),
        budget_bytes=budget,
        verdict="no" if limit else margin.verdict(peak.device_bytes, budget),
        limit=limit,
        low_bytes=low,
        high_bytes=high,
        basis="recorded",
        lossy=strategy.lossy_fields(job),
        attention_kernel=attention.kernel(strategy, machine, facts.gpu),
        assumptions=(),
    )


def _limit(low: int, budget: int, host_bytes: int, machine: Machine) -> Literal["gpu", "host"] | None:
    if low > budget:
        return "gpu"
    return "host" if machine.host_ram is not None and host_bytes > machine.host_ram else None


def play(run: Run) -> list[Played]:
    """Replays the run's stages in order on one allocator."""
    allocator = CachingAllocator(expandable_segments=run.strategy.expandable_segments)
    more = [run.accumulate] if run.accumulate else []
    stages: list[tuple[PhaseName, Stage]] = [
        ("load", run.load),
        *(("first_step", stage) for stage in (run.step, *more, run.optimizer_first)),
        *(("train", stage) for stage in (run.step, *more)),
        ("optimizer", run.optimizer),
    ]
    played = []
    with _without_garbage_collection():
        for phase, stage in stages:
            replayed = allocator.run(stage.ops, run.sizes)
            played.append(Played(phase, stage, replayed, allocator.allocated_bytes))
            if phase == "load" and run.empty_cache_after_load:
                allocator.empty_cache()
    return played


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Python's collector takes 40 % of a replay and finds nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _phase_peak(replayed: Replayed, outside: int) -> PhasePeak:
    reserved = replayed.reserved_peak_bytes
    return PhasePeak(
        allocated_bytes=replayed.allocated_peak_bytes, reserved_bytes=reserved, device_bytes=reserved + outside
    )


def _peak_stage(played: list[Played]) -> Played:
    """The stage whose tensors peak highest, the later among equals.

    Reserved is no guide: what was reserved once stays.
    """
    return max(reversed(played), key=lambda entry: entry.replayed.allocated_peak_bytes)


def describe(played: Played, strategy: Strategy) -> str:
    """The moment of a stage's allocated peak, in words."""
    index = played.replayed.allocated_peak_at
    moment: Moment = played.stage.moment(max(index, 0))
    what = moment.passes
    if what == "backward" and moment.block >= 0 and strategy.gradient_checkpointing in ("full", "offload"):
        what = "recompute and backward"
    if played.phase == "optimizer" or played.stage.name.startswith("optimizer"):
        return "optimizer step"
    if played.phase == "load":
        return "loading the weights"
    return f"{what} of {moment.module_list}.{moment.block}" if moment.block >= 0 else f"{what} outside the blocks"


def _breakdown(run: Run, played: list[Played], top: Played, peak: PhasePeak, outside: int) -> Breakdown:
    """The device's bytes at the allocated peak by category; what is reserved beyond it is fragmentation."""
    live: dict[int, None] = {}
    for entry in played:
        ops = entry.stage.ops
        for event in ops[: entry.replayed.allocated_peak_at + 1] if entry is top else ops:
            if event >= 0:
                live[event] = None
            else:
                live.pop(~event, None)
        if entry is top:
            break
    parts: dict[str, int] = {}
    for buffer in live:
        part = BREAKDOWN[run.program.category[buffer]]
        rounded = -(-run.sizes[buffer] // BLOCK_ROUND_BYTES) * BLOCK_ROUND_BYTES
        parts[part] = parts.get(part, 0) + rounded
    fragmentation = peak.device_bytes - outside - sum(parts.values())
    return Breakdown(**parts, fragmentation=fragmentation, context=outside)
