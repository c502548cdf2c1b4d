"""The ways to train that a job allows, as one sees them at a glance: all of them, and the few that matter.

Pure, given a search.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from planner.search.cost import loss, slowness
from planner.search.screening import Look
from planner.search.search import Search
from planner.search.space import effort, naive
from planner.spec.job import SPLIT, Job, Strategy

TIGHTER = 0.97
"""A strategy is on the ladder only where it needs less than this share of all before it, as runners-up do."""
MOST_RUNGS = 8


def looks(search: Search, job: Job) -> tuple[Look, ...]:
    """A look at every candidate, as it is and with the most blocks swapped; ways of stepping only where they matter."""
    found: dict[Strategy, Look] = {}
    plain: set[Strategy] = set()
    for strategy in search.candidates(job):
        alike = strategy.replace(optimizer_step="foreach")
        if alike in plain:
            continue
        look = search.look(job, strategy)
        if not look.in_optimizer:
            plain.add(alike)
        most = search.most_in_ram(job, strategy)
        found[strategy], found[most] = look, search.look(job, most)
    return tuple(found.values())


def ladder(search: Search, job: Job, seen: Iterable[Look]) -> tuple[Look, ...]:
    """Of these looks, in a search's order of preference, those that each need less than all before."""
    start = naive(job, search.question.strategy, search.question.machine, search.question.fixed)
    able = [look for look in seen if search.has_ram(look)]
    fastest = min((look.step_seconds for look in able), default=1.0)

    def preference(look: Look) -> tuple[float, ...]:
        engine = look.strategy.sharding in SPLIT
        speed = slowness(look.step_seconds, fastest, loss(job, look.strategy))
        return engine, speed, effort(start, look.strategy), look.device_bytes

    rungs: list[Look] = []
    for look in sorted(able, key=preference):
        if not rungs or look.device_bytes < TIGHTER * min(rung.device_bytes for rung in rungs):
            rungs.append(look)
    return tuple(rungs[: MOST_RUNGS - 1] + rungs[MOST_RUNGS - 1 :][-1:])


def pareto(seen: Sequence[Look]) -> frozenset[int]:
    """Indices of the looks that no other beats in both seconds and memory."""
    front, least = set(), math.inf
    for index in sorted(range(len(seen)), key=lambda index: (seen[index].step_seconds, seen[index].device_bytes)):
        if seen[index].device_bytes < least:
            front.add(index)
            least = seen[index].device_bytes
    return frozenset(front)
