"""Memory over a run: its composition in every phase, and its course through one step.

The replay behind an estimate, in more detail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.allocator.caching import BLOCK_ROUND_BYTES
from planner.catalog.shapes import grids
from planner.estimate.estimate import counter_maxima, outside_bytes, phase_peak
from planner.estimate.fragmentation import reserved_bytes
from planner.estimate.peak_moment import BREAKDOWN, PHASE_MOMENTS, breakdown_at, describe_moment
from planner.estimate.stages import allocator_of, replay_stages
from planner.layout.pipeline import lay_out
from planner.layout.run import Facts, Run
from planner.spec.configuration import Configuration
from planner.spec.plan import Breakdown, PhaseName
from planner.tape.program import Stage

POINTS = 360
"""Points of a step's timeline. The peaks are among them."""
MIN_POINTS = 24
"""Fewest points of a stage."""
STEADY: tuple[PhaseName, ...] = ("train", "optimizer")
"""The phases of a step after the first."""


@dataclass(frozen=True)
class PhaseParts:
    """One phase at its peak: device bytes by category, and the moment in words."""

    phase: PhaseName
    moment: str
    breakdown: Breakdown


@dataclass(frozen=True)
class Point:
    """Memory at one moment of a step, bytes."""

    at: int
    """events of the allocator since the step began"""
    parts: tuple[int, ...]
    """allocated bytes by part, as in ``Timeline.parts``"""
    reserved_bytes: int


@dataclass(frozen=True)
class Mark:
    """The beginning of a named stretch (pass, block) within the step."""

    at: int
    name: str


@dataclass(frozen=True)
class Timeline:
    """Memory of one steady step from its first event to its last."""

    parts: tuple[str, ...]
    points: tuple[Point, ...]
    marks: tuple[Mark, ...]
    events: int
    peak: Point
    peak_moment: str
    outside_bytes: int
    """device bytes outside torch's allocator: the CUDA context and libraries"""


def largest_run(configuration: Configuration, facts: Facts, trainer: str = "vplan") -> Run:
    """The run of a configuration: with buckets at the largest shape, and if ranks allocate differently of the one that
    reserves most."""
    job = configuration.job
    largest = max(grids(facts.model, job), key=lambda at: at["B"] * at["F"] * at["H"] * at["W"])
    run = lay_out(configuration, facts, largest, trainer)
    if len(run.ranks) < 2:
        return run
    of_ranks = [lay_out(replace(configuration, rank=rank), facts, largest, trainer) for rank in run.ranks]
    return max(of_ranks, key=lambda of_rank: reserved_bytes(replay_stages(of_rank)))


def phases(run: Run) -> tuple[PhaseParts, ...]:
    """Every phase of a run at its peak, in order."""
    strategy, correction = run.strategy, run.facts.measurements.correction
    played, outside = replay_stages(run), outside_bytes(run)
    parts_of_phases = []
    for phase in dict.fromkeys(entry.phase for entry in played):
        own = [entry for entry in played if entry.phase == phase]
        top = max(reversed(own), key=lambda entry: entry.replayed.allocated_peak_bytes)
        peak = counter_maxima(phase_peak(entry, outside, correction) for entry in own)
        parts = breakdown_at(top, peak, correction)
        moment = describe_moment(top, strategy) if top.stage.ops else PHASE_MOMENTS.get(phase, phase)
        parts_of_phases.append(PhaseParts(phase, moment, parts))
    return tuple(parts_of_phases)


def timeline(run: Run, points: int = POINTS) -> Timeline:
    """The steady step of a run: allocated bytes by part, and reserved bytes."""
    allocator = allocator_of(run)
    steady = ("denoise",) if run.samples_only else STEADY
    wanted = [index for index, (phase, _) in enumerate(run.stages) if phase in steady]
    # When sampling, the second of two calls, whose cache is warm from the first.
    wanted = wanted[-1:] if run.samples_only else wanted
    live: dict[int, None] = {}
    all_points: list[Point] = []
    marks: list[Mark] = []
    names = tuple(dict.fromkeys(BREAKDOWN.values()))
    events = 0
    total = sum(len(run.stages[index][1].ops) for index in wanted) or 1
    for index, (_, stage) in enumerate(run.stages[: wanted[-1] + 1]):
        if index in wanted:
            share = points * len(stage.ops) // total
            history = thin(allocator.timeline(stage.ops, run.sizes, run.streams), max(share, MIN_POINTS))
            all_points += _points_of(run, stage, history, live, names, events)
            marks += _marks(stage, events)
            events += len(stage.ops)
        else:
            allocator.run(stage.ops, run.sizes, run.streams)
        _track_live(stage.ops, live)
        if any(stage is entry for entry in run.empty_cache.after) or (stage is run.load and run.empty_cache.after_load):
            allocator.empty_cache()
    peak = max(all_points, key=lambda point: sum(point.parts))
    used = [place for place in range(len(names)) if any(point.parts[place] for point in all_points)]
    shown = tuple(
        Point(point.at, tuple(point.parts[place] for place in used), point.reserved_bytes)
        for point in (*all_points, peak)
    )
    moment = next(mark.name for mark in reversed(marks) if mark.at <= peak.at)
    return Timeline(
        tuple(names[place] for place in used), shown[:-1], tuple(marks), events, shown[-1], moment, outside_bytes(run)
    )


def thin(history: list[tuple[int, int, int]], points: int) -> list[tuple[int, int, int]]:
    """At most `points` (at least 4) entries of `history`, including both peaks, the first and the last."""
    points = max(points, 4)
    if len(history) <= points:
        return history
    # The first and the last take two points; each stretch gives two, its highest allocated and its highest reserved.
    stretch = -(-len(history) // ((points - 2) // 2))
    kept = {0, len(history) - 1}
    for start in range(0, len(history), stretch):
        indices = range(start, min(start + stretch, len(history)))
        kept.add(max(indices, key=lambda index: history[index][1]))
        kept.add(max(indices, key=lambda index: history[index][2]))
    return [history[index] for index in sorted(kept)]


def _track_live(ops: Sequence[int], live: dict[int, None]) -> None:
    for event in ops:
        if event >= 0:
            live[event] = None
        else:
            live.pop(~event, None)


def _points_of(
    run: Run,
    stage: Stage,
    history: Sequence[tuple[int, int, int]],
    before: dict[int, None],
    names: Sequence[str],
    first: int,
) -> list[Point]:
    """The points of a stage's history, with allocated bytes by part."""
    place = {name: index for index, name in enumerate(names)}
    part = [place[BREAKDOWN[category]] for category in run.program.category]
    rounded = [-(-size // BLOCK_ROUND_BYTES) * BLOCK_ROUND_BYTES for size in run.sizes]
    held = [0] * len(names)
    for buffer in before:
        held[part[buffer]] += rounded[buffer]
    points, ops, at = [], stage.ops, 0
    for index, _, reserved in history:
        for event in ops[at : index + 1]:
            buffer = event if event >= 0 else ~event
            held[part[buffer]] += rounded[buffer] if event >= 0 else -rounded[buffer]
        at = index + 1
        points.append(Point(first + index, tuple(held), reserved))
    return points


def _marks(stage: Stage, first: int) -> list[Mark]:
    """Where forward, backward and the optimizer step begin. Recomputation belongs to backward."""
    marks: list[Mark] = []
    at = first
    for moment, events in stage.stretches:
        name = "optimizer" if stage.name.startswith("optimizer") else moment.passes
        if name in ("forward", "backward", "optimizer") and events and (not marks or marks[-1].name != name):
            marks.append(Mark(at, name))
        at += len(events)
    return marks or [Mark(first, "step")]
