"""The largest value of an objective for which a plan fits: the longest clip, the largest batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.catalog.shapes import grid
from planner.errors import VplanError
from planner.layout.sharding import context_parallel
from planner.search.objectives.objective import Objective, Value, words
from planner.search.objectives.reach import Reach, anchors, fitting
from planner.search.question import Relaxed, Suggestion
from planner.search.search import Search
from planner.spec.job import Job
from planner.spec.plan import Estimate
from planner.spec.rules import ResolvedStrategy


def largest(search: Search, objective: Objective, explain: bool = True) -> Suggestion | None:
    """The largest value of an objective for which a plan fits, and the fastest plan there; None when none does."""
    job, question = search.question.job, search.question
    if job.buckets:
        raise VplanError(
            f"with buckets the shapes are given, so there is no largest {objective.name}", "leave out --buckets"
        )
    for lossy in (None,) if question.allow_lossy else (False, True):
        plan = largest_by(search, job, objective, lossy)
        if plan is not None:
            return search.suggestion(plan, explain)
    return None


def largest_by(
    search: Search, job: Job, objective: Objective, lossy: bool | None, fastest: bool = True
) -> Estimate | None:
    """The fastest plan at an objective's largest value, of lossless plans (False), lossy ones (True) or all (None).
    ``fastest``: False where only the value is asked for, and any plan there will do."""
    return _largest(search, job, objective, takeable(search, job, objective, objective.values), lossy, fastest)


def other_kind(search: Search, plan: Estimate, objective: Objective, fastest: bool = True) -> Iterator[Relaxed]:
    """The most of an objective for plans of the other kind: without loss where the plan is lossy, else with loss, where
    that is more. Nothing where the shapes are given, or no such plan fits. ``fastest``: as for `largest_by`."""
    job, best = plan.job, objective.size(objective.read(plan.job))
    if job.buckets or search.needs_tiles(job):
        return
    values: Sequence[Value] = [
        value
        for value in objective.values
        if (objective.size(value) < best if plan.lossy else objective.size(value) > best)
    ]
    values = takeable(search, job, objective, values)
    if not plan.lossy and values:  # what is the tightest one value further is the tightest at the plan's own
        job = objective.put(job, values[0])
    other = _largest(search, job, objective, values, not plan.lossy, fastest)
    if other is not None:
        before, after = objective.read(plan.job), objective.read(other.job)
        yield Relaxed(objective.name, words(before), words(after), other)


def largest_by_any_plan(
    search: Search, job: Job, objective: Objective, values: Sequence[Value], lossy: bool | None
) -> Estimate | None:
    """As `_largest`, but any plan there will do: the tightest, which is the first that is asked."""
    tightest = anchors(search, [job], lossy)
    reach = Reach(search, job, objective, values, tightest)
    for index in reach.falling():
        there = reach.at(index)
        for strategy in tightest:
            plan = search.try_estimate(there, search.most_in_ram(there, strategy))
            if plan is not None and plan.verdict == "fits":
                return plan
    return None


def takeable(search: Search, job: Job, objective: Objective, values: Sequence[Value]) -> Sequence[Value]:
    """Those that are recorded, and at which the GPUs that share a clip can divide it."""
    model, parts = search.question.model, search.question.strategy.context_parallel
    if parts > 1:
        values = [
            value for value in values if context_parallel.divides(model, grid(model, objective.put(job, value)), parts)
        ]
    if objective.name == "batch" and model.shape.batches:
        values = [value for value in values if search.is_recorded(objective.put(job, value))]
    return values


def _largest(
    search: Search, job: Job, objective: Objective, values: Sequence[Value], lossy: bool | None, fastest: bool = True
) -> Estimate | None:
    """The fastest plan at the largest value that fits: bisected on what is allocated, believed only when replayed.
    Where any will do, the tightest are asked first, and all others only where none of these fits."""
    smallest = [objective.put(job, value) for value in values[:1]]
    tightest = anchors(search, list(dict.fromkeys([*smallest, job])), lossy, *smallest)
    reach = Reach(search, job, objective, values, tightest)
    refused: list[int] = []
    for index in reach.falling():
        there = reach.at(index)
        first = [] if fastest else [one for one in tightest if one in reach.still(index)]
        plan = next(fitting(search, there, first), None) or next(search.by_speed(there, lossy), None)
        if plan is not None:
            skipped = values[index + 1 : max(refused, default=0)]
            return _larger(search, job, objective, skipped, lossy, () if fastest else tightest) or plan
        refused.append(index)
    return None


def _larger(
    search: Search,
    job: Job,
    objective: Objective,
    skipped: Sequence[Value],
    lossy: bool | None,
    first: Sequence[ResolvedStrategy],
) -> Estimate | None:
    """The fastest plan at the largest of the values that were ruled out only by what replays of larger ones lost to
    fragmentation: each that is asked is asked by itself. Mostly the next does not fit, so steps begin at one value and
    double. ``first``: strategies of which any will do."""
    found, low, high, stride = None, 0, len(skipped), 1
    while low < high:
        index = min(low + stride, high) - 1
        alone = Search(search.question, search.screen, search.policy)
        there = objective.put(job, skipped[index])
        plan = next(fitting(alone, there, first), None) or next(alone.by_speed(there, lossy), None)
        if plan is None:
            high, stride = index, max((index - low) // 2, 1)
        else:
            found, low, stride = plan, index + 1, 2 * stride
    return found
