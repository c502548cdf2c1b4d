"""Turns a configuration into an Estimate. Pure: records in, record out; no clock, file, GPU or torch.

Read in this order: `assess` is what commands call; `replay` lays the run out (`planner.layout.pipeline`) and plays its
stages; `estimate_run` makes an Estimate of the peaks.

All phases run in order on one replayed allocator, because what it holds carries over: load, first step (the optimizer
creates its states), then a later step, which is where most runs die.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from planner.catalog.shapes import grid, grids
from planner.estimate import cache_flushes, fragmentation, host_ram, pinned_ram, working_set
from planner.estimate.assumptions import assumptions_of, splitting_note
from planner.estimate.peak_moment import breakdown_at, describe_moment, peak_stage
from planner.estimate.roofline import step_seconds
from planner.estimate.stages import ReplayedStage, replay_stages, reused_replay
from planner.estimate.traffic import traffic
from planner.estimate.work import attention_of, step_work, total_flops
from planner.layout import margin, phases
from planner.layout.correction import Correction
from planner.layout.pipeline import lay_out
from planner.layout.run import Facts, Run
from planner.layout.sharding.collectives import communicators
from planner.layout.single_gpu import NCCL_BYTES
from planner.spec.configuration import Configuration
from planner.spec.plan import Estimate, HostBreakdown, HostPeak, Peak, PhasePeak, Verdict
from planner.units import format_gib

Layout = Callable[[Configuration, Facts, dict[str, int], str], Run]
"""Lays a run out, as ``planner.layout.pipeline.lay_out`` does."""


def estimate(configuration: Configuration, facts: Facts, trainer: str = "vplan", layout: Layout = lay_out) -> Estimate:
    """The estimate of a configuration, at the worst of the job's buckets. ``layout`` may return runs from a cache, as
    it does in a search."""
    return estimate_run(*replay(configuration, facts, trainer, layout))


def estimate_on_card(configuration: Configuration, facts: Facts, trainer: str = "vplan") -> Estimate:
    """The estimate to compare with a measurement on this card. If the plan would reserve more than the card has,
    PyTorch empties its cache, so the peaks come from a replay at the card's capacity. The verdict is that of
    `estimate`."""
    run, played = replay(configuration, facts, trainer)
    whole, capacity = estimate_run(run, played), _capacity_bytes(run)
    if all(entry.replayed.reserved_peak_bytes <= capacity for entry in played):
        return whole
    run, played = replay(configuration, facts, trainer, capacity_bytes=capacity)
    if cache_flushes.runs_out(played):
        return whole
    return estimate_run(run, played).replace(verdict=whole.verdict, limit=whole.limit)


class Assessment(NamedTuple):
    """The estimate of one plan, with its run and its stages as replayed without a capacity limit."""

    run: Run
    played: list[ReplayedStage]
    estimate: Estimate
    kept_bytes: int = 0
    """on the device with what torch's allocator, as it comes, leaves in pieces; 0 where that decides too"""


def assess(
    configuration: Configuration,
    facts: Facts,
    trainer: str = "vplan",
    layout: Layout = lay_out,
    cached: bool = True,
    like: Assessment | None = None,
    flushes: bool = True,
) -> Assessment:
    """One plan's estimate and verdict, as all commands report it.

    If there is room, PyTorch's allocator reserves more than what is allocated; if there is none, it frees cached
    segments (c10/cuda CUDACachingAllocator). So the verdict compares the budget with what must be there, without
    fragmentation, as long as the expected peak with fragmentation is within the card too. `estimate` includes
    fragmentation, because that is what people measure. A plan that reserves too much is replayed once more at the
    card's capacity before its verdict is `no`.

    ``cached``: also assess what is encoded before training. ``like``: the same plan on another card; its replay is
    reused if the allocations are identical. ``flushes``: whether a plan that runs only because PyTorch empties its
    cache is `tight`; otherwise it is `no`, which is faster to find out.
    """
    run, played = replay(configuration, facts, trainer, layout, cached, like.played if like else ())
    whole = estimate_run(run, played)
    if facts.gpu.has_working_set:
        runs = list({id(entry.run): entry.run for entry in played}.values())
        return Assessment(run, played, working_set.with_macos_limits(whole, runs, played))
    if whole.verdict == "no" and whole.limit == "gpu" and flushes:
        capacity = _capacity_bytes(run)
        if max(entry.replayed.allocated_peak_bytes for entry in played) <= capacity:
            whole = _flushed(*replay(configuration, facts, trainer, layout, cached, capacity_bytes=capacity)) or whole
        return Assessment(run, played, whole)
    expected = whole.verdict == "tight" and whole.limit is None and whole.peak.device_bytes <= whole.budget_bytes
    if not expected or whole.strategy.expandable_segments or whole.basis == "measured":
        return Assessment(run, played, whole)
    expandable = replace(configuration, strategy=configuration.strategy.replace(expandable_segments=True))
    lean = estimate_run(*replay(expandable, facts, trainer, layout, cached))
    if lean.verdict != "fits":
        return Assessment(run, played, whole)
    kept = whole.peak.device_bytes
    pieces = (
        f"fits: the cache may grow to about {format_gib(kept)}, but PyTorch frees unused segments when memory is short "
        "(expandable_segments:True keeps less)"
    )
    relabelled = lean.replace(strategy=whole.strategy, assumptions=(pieces, *lean.assumptions))
    return Assessment(run, played, relabelled, kept)


def _flushed(run: Run, played: list[ReplayedStage]) -> Estimate | None:
    """The estimate from a replay at the card's capacity; None if that ran out, or host RAM is short."""
    if cache_flushes.runs_out(played):
        return None
    estimate = estimate_run(run, played)
    if estimate.limit is not None:
        return None
    least, most = cache_flushes.step_seconds(played)
    assert estimate.step_seconds_high is not None
    return estimate.replace(
        verdict="tight",
        step_seconds=estimate.step_seconds + least,
        step_seconds_high=estimate.step_seconds_high + most,
        assumptions=(cache_flushes.describe(played), *estimate.assumptions),
    )


def replay(
    configuration: Configuration,
    facts: Facts,
    trainer: str = "vplan",
    layout: Layout = lay_out,
    cached: bool = True,
    earlier: Sequence[ReplayedStage] = (),
    capacity_bytes: int | None = None,
) -> tuple[Run, list[ReplayedStage]]:
    """The run at the worst of the job's buckets, and its stages replayed in order.

    If ranks allocate differently, the run is that of the rank that reserves most. The stages of the other ranks come
    first, because each counter may peak on another rank; at a capacity only the stages of that one rank are returned.

    ``earlier``: the replay of a run that may be identical. ``capacity_bytes``: as in `replay_stages`.
    """
    shapes = grids(facts.model, configuration.job)
    runs = [layout(configuration, facts, shape, trainer) for shape in shapes]
    other_ranks = [rank for rank in runs[0].ranks if rank != runs[0].configuration.rank]
    if len(runs) == 1 and not other_ranks and (again := reused_replay(runs[0], earlier, cached=cached)):
        return runs[0], again
    run, played = _replay_shapes(runs, cached, capacity_bytes)
    others: list[ReplayedStage] = []
    for rank in other_ranks:
        of_rank = [layout(replace(configuration, rank=rank), facts, shape, trainer) for shape in shapes]
        other, stages = _replay_shapes(of_rank, cached, capacity_bytes)
        if _worse(stages) > _worse(played):
            run, played, stages = other, stages, played
        others += stages
    return run, played if capacity_bytes is not None else [*others, *played]


def _replay_shapes(runs: list[Run], cached: bool, capacity_bytes: int | None) -> tuple[Run, list[ReplayedStage]]:
    """Replays the runs of one rank at all shapes. Returns the run of the largest shape, with the stages of all."""
    if len(runs) == 1:
        return runs[0], replay_stages(runs[0], cached=cached, capacity_bytes=capacity_bytes)
    # Training shuffles: the large one may come into the holes of the small ones, or the other way round.
    runs = sorted(runs, key=lambda run: fragmentation.reserved_bytes(replay_stages(run, cached=cached)))
    return runs[-1], max(
        replay_stages(*runs, cached=cached, capacity_bytes=capacity_bytes),
        replay_stages(*reversed(runs), cached=cached, capacity_bytes=capacity_bytes),
        key=_worse,
    )


def _worse(played: list[ReplayedStage]) -> tuple[bool, int]:
    return cache_flushes.runs_out(played), fragmentation.reserved_bytes(played)


def after_step_bytes(configuration: Configuration, facts: Facts, trainer: str = "vplan") -> int:
    """Bytes that stay allocated after a step: weights, optimizer states, residents and persistent buffers."""
    run = lay_out(configuration, facts, grid(facts.model, configuration.job), trainer)
    steps = (run.optimizer, run.optimizer_first)
    return next(entry for entry in reversed(replay_stages(run)) if entry.stage in steps).allocated_after_bytes


def estimate_run(run: Run, played: list[ReplayedStage]) -> Estimate:
    """The estimate of a run, from its replayed stages."""
    facts = run.facts
    job, strategy, machine = run.job, run.strategy, run.machine
    correction, outside = facts.measurements.correction, outside_bytes(run)
    by_phase = {
        phase: counter_maxima(phase_peak(entry, outside, correction) for entry in played if entry.phase == phase)
        for phase in dict.fromkeys(entry.phase for entry in played)
    }
    where = max(by_phase, key=lambda phase: by_phase[phase].device_bytes)
    peak = counter_maxima(by_phase.values())
    top = peak_stage(played)
    at_most, most = _most(played, correction, outside)
    splitting = splitting_note(at_most, most - peak.device_bytes)
    breakdown = breakdown_at(top, peak, correction)
    sides = margin.on_card(
        fragmentation.peak_sides(played, correction, where, peak.device_bytes, most),
        facts.gpu,
    )
    sides = fragmentation.widen(sides, peak.device_bytes, *run.device.kept_for_adapters)
    ram = host_ram.host_ram(run, machine)
    disk_bytes = host_ram.disk_bytes(run)
    unrecorded = phases.unrecorded_passes(run)
    incomplete = any(not each.elsewhere for each in unrecorded)
    slowest, (usual, longest) = _slowest(run, played)
    flops = total_flops(step_work(slowest), strategy)
    words = (*correction.words, *splitting, *pinned_ram.wsl_doubts(machine, ram.pinned_bytes))
    words = (*words, *assumptions_of(run, played, unrecorded))
    verdict, limit = _verdict(run, peak.device_bytes, ram.nbytes, sides)
    low, high = margin.interval(peak.device_bytes, strategy.compile != "none", sides)
    unproved = Estimate(
        job=job,
        strategy=strategy,
        machine=machine,
        peak=Peak(**peak.__dict__, phase=top.phase, moment=describe_moment(top, strategy)),
        phases=by_phase,
        breakdown=breakdown,
        host_ram_bytes=ram.nbytes,
        host=HostPeak(
            phase=ram.phase,
            phases=ram.phases,
            breakdown=HostBreakdown(**ram.parts),
            pinned_bytes=ram.pinned_bytes,
            mapped_bytes=host_ram.mapped_bytes(run, machine),
        ),
        disk_bytes=disk_bytes,
        step_seconds=usual,
        step_seconds_high=longest,
        flops=flops * run.calls,
        budget_bytes=_budget_bytes(run),
        verdict="tight" if verdict == "fits" and incomplete else verdict,
        limit=limit,
        low_bytes=low,
        high_bytes=high,
        basis=correction.basis(where),
        lossy=strategy.lossy_fields(job),
        attention_kernel=attention_of(run).kernel,
        assumptions=words,
        timed=facts.gpu.tells_seconds,
    )
    return facts.measurements.with_proofs(unproved, run.trainer)


def _slowest(run: Run, played: list[ReplayedStage]) -> tuple[Run, tuple[float, float]]:
    """The run of the shape with the longest step, and its seconds. It is not always the one that needs most memory."""
    runs = {id(entry.run): entry.run for entry in played if not entry.run.encoding_only.peak_bytes}
    seconds = {key: run_seconds(one) for key, one in {**runs, id(run): run}.items()}
    key = max(seconds, key=lambda key: seconds[key])
    return runs.get(key, run), seconds[key]


def run_seconds(run: Run) -> tuple[float, float]:
    """(usual, longest) seconds of one step of a run, corrected by measurements."""
    seconds = step_seconds(run.configuration, step_work(run), run.facts.gpu, traffic(run))
    usual, longest = run.facts.measurements.correction.step_seconds(seconds.total, seconds.high)
    return usual * run.calls, longest * run.calls


def _most(played: list[ReplayedStage], correction: Correction, outside: int) -> tuple[ReplayedStage, int]:
    """The stage with the most device bytes if a VAE's split convolutions take the most they can, and those bytes."""

    def most(entry: ReplayedStage) -> int:
        return phase_peak(entry, outside, correction).device_bytes + entry.run.device.split_bytes.get(entry.phase, 0)

    top_stage = max(played, key=most)
    return top_stage, most(top_stage)


def outside_bytes(run: Run) -> int:
    """Device bytes outside torch's allocator: the CUDA context, communicators and what a trainer takes."""
    return run.facts.gpu.context_bytes + run.device.outside_bytes + communicators(run) * NCCL_BYTES


def counter_maxima(peaks: Iterable[PhasePeak]) -> PhasePeak:
    """A PhasePeak with the highest value of each counter over all of `peaks`."""
    entries = list(peaks)
    return PhasePeak(**{name: max(getattr(peak, name) for peak in entries) for name in PhasePeak.model_fields})


def _verdict(
    run: Run, device_bytes: int, host_bytes: int, sides: margin.Sides
) -> tuple[Verdict, Literal["gpu", "host"] | None]:
    """The verdict, and which memory is short. With unified memory, the host's share comes out of the same budget."""
    machine = run.machine
    unified = machine.unified or run.facts.gpu.unified
    compiled = run.strategy.compile != "none"
    if run.facts.gpu.has_working_set:
        return _verdict_in_working_set(run, device_bytes, host_bytes, sides)
    verdict = margin.verdict(device_bytes + (host_bytes if unified else 0), _budget_bytes(run), compiled, sides)
    if verdict == "no":
        return "no", "gpu"
    if not unified and machine.host_ram is not None and host_bytes > machine.host_ram:
        return "no", "host"
    return verdict, None


def _verdict_in_working_set(
    run: Run, device_bytes: int, host_bytes: int, sides: margin.Sides
) -> tuple[Verdict, Literal["gpu", "host"] | None]:
    """The verdict on a Mac: the GPU's working set is only a part of the memory, and the process needs the rest too."""
    verdicts = [margin.verdict(device_bytes, _budget_bytes(run), sides=sides)]
    if (usable := run.machine.host_ram) is not None:
        verdicts.append(margin.verdict(device_bytes + host_bytes, usable, sides=sides))
    worst = max(verdicts, key=("fits", "tight", "no").index)
    return worst, "gpu" if worst == "no" else None


def _budget_bytes(run: Run) -> int:
    return run.facts.gpu.allocatable_bytes - run.machine.reserve


def _capacity_bytes(run: Run) -> int:
    """What torch's allocator may reserve on the card, before correction."""
    correction = run.facts.measurements.correction
    return int((_budget_bytes(run) - outside_bytes(run) - correction.outside_bytes) / correction.reserved)


def phase_peak(entry: ReplayedStage, outside: int, correction: Correction) -> PhasePeak:
    """The corrected counters of one replayed stage. ``outside``: device bytes outside torch's allocator."""
    replay = entry.replayed
    return correction.peak(replay.allocated_peak_bytes, replay.reserved_peak_bytes, outside, entry.phase)
