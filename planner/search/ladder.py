"""The ways to train that a job allows, as one sees them at a glance: all of them, and the few that matter.

Pure, given a search.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from planner.search.cost import TIGHTER, loss, slowness
from planner.search.screening import QuickEstimate
from planner.search.search import Search
from planner.search.space import at_the_end, effort
from planner.spec.job import Job
from planner.spec.rules import ResolvedStrategy

MOST_RUNGS = 8


def quick_estimates(search: Search, job: Job) -> tuple[QuickEstimate, ...]:
    """Quick estimates of every candidate, as it is and with the most blocks swapped; kinds of optimizer step are varied
    only where they matter."""
    by_strategy: dict[ResolvedStrategy, QuickEstimate] = {}
    plain: set[ResolvedStrategy] = set()
    for strategy in search.candidates(job):
        family = at_the_end(strategy)
        if family in plain:  # its peak lies outside the optimizer's step, whichever way it steps
            continue
        quick = search.quick_estimate(job, strategy)
        if not quick.in_optimizer:
            plain.add(family)
        most = search.most_in_ram(job, strategy)
        by_strategy[strategy], by_strategy[most] = quick, search.quick_estimate(job, most)
    return tuple(by_strategy.values())


def ladder(search: Search, job: Job, estimates: Iterable[QuickEstimate]) -> tuple[QuickEstimate, ...]:
    """Those of the estimates, in a search's order of preference, that need less memory than all before them; last the
    tightest for which the host lacks RAM, where it needs less than these: a shorter clip may have the RAM, and where
    none has, that is what is short."""
    start = search.space.baseline(job)
    estimates = tuple(estimates)
    within_ram = [quick for quick in estimates if search.feasibility.has_ram(quick)]
    fastest = min((quick.step_seconds for quick in within_ram), default=1.0)

    def preference(quick: QuickEstimate) -> tuple[int, int, int]:
        speed = slowness(quick.step_seconds, fastest, loss(job, quick.strategy))
        return speed, effort(start, quick.strategy), quick.device_bytes

    rungs: list[QuickEstimate] = []
    lacking = [quick for quick in estimates if not search.feasibility.has_ram(quick)]
    for quick in (*sorted(within_ram, key=preference), *sorted(lacking, key=lambda quick: quick.device_bytes)[:1]):
        if not rungs or quick.device_bytes < TIGHTER * min(rung.device_bytes for rung in rungs):
            rungs.append(quick)
    return tuple(rungs[: MOST_RUNGS - 1] + rungs[MOST_RUNGS - 1 :][-1:])


def pareto(estimates: Sequence[QuickEstimate]) -> frozenset[int]:
    """Indices of the estimates that no other beats in both seconds and memory."""
    front, least = set(), math.inf
    order = sorted(enumerate(estimates), key=lambda pair: (pair[1].step_seconds, pair[1].device_bytes))
    for index, quick in order:
        if quick.device_bytes < least:
            front.add(index)
            least = quick.device_bytes
    return frozenset(front)
