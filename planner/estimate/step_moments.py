"""What runs at each moment of a step and what holds its memory: the events of `planner.estimate.timeline`, by block,
operator and owner.

Seconds within a step divide the estimated step: forward and the optimizer step take what their rooflines say, backward
the rest. Within a pass, all stretches of blocks are assumed to take equally long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from planner.estimate.estimate import run_seconds
from planner.estimate.peak_moment import BREAKDOWN
from planner.estimate.roofline import forward_seconds
from planner.estimate.timeline import STEADY
from planner.estimate.work import step_work
from planner.layout.run import Run
from planner.tape.levels import whole_blocks
from planner.tape.program import Moment, Program, Stage

MOST_OWNERS = 4
"""Number of owners listed at a moment."""

BY_OPERATOR = ("activations", "temporary", "workspace", "buckets")
"""Parts whose buffers are listed by the operator that allocated them; for weights and states it is meaningless."""


class StepMoment(NamedTuple):
    """One moment of a step."""

    place: str
    """pass and block, such as "backward of blocks.17" """
    operator: str
    """the last one that allocated; empty before the first"""
    seconds: float
    """since the step began, estimated"""
    owners: tuple[tuple[str, int], ...]
    """(owner, allocated bytes), largest first"""


def moments(run: Run, at: Sequence[int]) -> tuple[StepMoment, ...]:
    """The moments of a run's steady step. ``at``: ascending event numbers since the step began, as
    `timeline.Point.at`."""
    steady = ("denoise",) if run.samples_only else STEADY
    indices = [index for index, (phase, _) in enumerate(run.stages) if phase in steady]
    indices = indices[-1:] if run.samples_only else indices
    held: Counter[str] = Counter()
    owners, rounded = _owners(run.program), list(map(whole_blocks, run.sizes))
    live: set[int] = set()
    for _, stage in run.stages[: indices[0]]:
        live = _live_after(stage, live)
    for buffer in live:
        held[owners[buffer]] += rounded[buffer]
    told: list[StepMoment] = []
    wanted = iter((*at, -1))
    following, event, operator = next(wanted), 0, ""
    for place, events, began, seconds in _stretches(run, [run.stages[index][1] for index in indices]):
        for number, buffer in enumerate(events):
            own = buffer if buffer >= 0 else ~buffer
            held[owners[own]] += rounded[own] if buffer >= 0 else -rounded[own]
            operator = run.program.op[own] if buffer >= 0 else operator
            if event == following:
                most = tuple((name, size) for name, size in held.most_common(MOST_OWNERS) if size > 0)
                told.append(StepMoment(place, operator, began + seconds * number / len(events), most))
                following = next(wanted)
            event += 1
    return tuple(told)


def _owners(program: Program) -> list[str]:
    """The owner of each buffer: a part of the breakdown, with the operator that allocated it for BY_OPERATOR."""
    parts = [BREAKDOWN[category] for category in program.category]
    return [
        f"{part}: {operator.lstrip('_')}" if part in BY_OPERATOR else part
        for part, operator in zip(parts, program.op, strict=True)
    ]


def _live_after(stage: Stage, live: set[int]) -> set[int]:
    for event in stage.ops:
        if event >= 0:
            live.add(event)
        else:
            live.discard(~event)
    return live


def _stretches(run: Run, stages: Sequence[Stage]) -> list[tuple[str, list[int], float, float]]:
    """(moment in words, events, start, duration) of each stretch; times in seconds."""
    named = [
        (moment, stage.name.startswith("optimizer"), events) for stage in stages for moment, events in stage.stretches
    ]
    passes = [_pass(moment, in_optimizer) for moment, in_optimizer, _ in named]
    first_backward = passes.index("backward") if "backward" in passes else len(passes)
    passes = [
        "recompute" if name == "forward" and index > first_backward else name for index, name in enumerate(passes)
    ]
    seconds = _seconds_of(run, passes)
    began, told = 0.0, []
    for (moment, _, events), name, each in zip(named, passes, seconds, strict=True):
        block = f" of {moment.module_list}.{moment.block}" if moment.block >= 0 else ""
        place = block or (" outside the blocks" if name != "optimizer" else "")
        told.append((name + place, events, began, each))
        began += each
    return told


def _pass(moment: Moment, in_optimizer: bool) -> str:
    return "optimizer" if in_optimizer else moment.passes


def _seconds_of(run: Run, passes: Sequence[str]) -> list[float]:
    """The seconds of each stretch by its pass, for the last micro-batch and the optimizer step."""
    usual = run_seconds(run)[0] / run.calls
    work = step_work(run)
    forward, optimizer = (
        forward_seconds(run.configuration, of, run.facts.gpu, work.attention).low if of else 0.0
        for of in (work.forward, work.optimizer)
    )
    optimizer = min(optimizer, usual / 2) if "optimizer" in passes else 0.0
    micro = (usual - optimizer) / run.strategy.gradient_accumulation
    forward = min(forward, micro) if "backward" in passes else micro
    whole_pass = {"forward": forward, "optimizer": optimizer}
    counts = Counter("forward" if name == "forward" else "optimizer" if name == "optimizer" else "" for name in passes)
    return [whole_pass.get(name, micro - forward) / counts[name if name in whole_pass else ""] for name in passes]
