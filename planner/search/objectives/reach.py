"""How far along an objective a few strategies reach, by quick estimates: which values a search has to replay, from the
largest down."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from planner.search.cost import TIGHTEST
from planner.search.objectives.objective import Objective, Value
from planner.search.search import Search
from planner.spec.job import Job
from planner.spec.plan import Estimate
from planner.spec.rules import ResolvedStrategy


class Reach:
    """The values at which one of the strategies may fit, for one search. What a replay teaches the search between two
    of them counts for the next."""

    def __init__(
        self,
        search: Search,
        job: Job,
        objective: Objective,
        values: Sequence[Value],
        strategies: Sequence[ResolvedStrategy],
    ) -> None:
        self.search = search
        self.job = job
        self.objective = objective
        self.values = values
        self._strategies = list(strategies)
        """the one that fitted last comes first: it may well be the one that fits elsewhere"""
        self._too_large: dict[ResolvedStrategy, int] = {}
        """the least index at which a strategy was found too large, and from which on it is not asked about again"""
        self._left: dict[int, float] = {}
        """what share of memory is left at an index that was asked, at most"""

    def falling(self) -> Iterator[int]:
        """The index of the largest value at which one of the strategies may fit; then of the largest below it, and so
        on."""
        low, high = self._gallop()
        while (last := self._last(low, high)) >= 0:
            yield last
            low, high = self._below(last)

    def at(self, index: int) -> Job:
        """The job with a value."""
        return self.objective.put(self.job, self.values[index])

    def still(self, index: int) -> list[ResolvedStrategy]:
        """The strategies that were not found too large for a value."""
        return [one for one in self._strategies if index < self._too_large.get(one, len(self.values))]

    def _may_fit(self, index: int) -> bool:
        for strategy in self.still(index):
            if self._fits_by(index, strategy):
                self._strategies.remove(strategy)
                self._strategies.insert(0, strategy)
                return True
            self._too_large[strategy] = index
        return False

    def _fits_by(self, index: int, strategy: ResolvedStrategy) -> bool:
        there, search = self.at(index), self.search
        if search.pruning.never_fits(there, strategy, "fits"):
            return False
        quick = search.quick_estimate(there, search.most_in_ram(there, strategy))
        self._left[index] = max(search.feasibility.share_left(quick), self._left.get(index, -math.inf))
        return search.feasibility.may_reach(quick)

    def _gallop(self) -> tuple[int, int]:
        """Two indices with the answer between them, which is nearer the small end: as for `_last`."""
        low, high, step = -1, len(self.values), 1
        while low + step < high:
            if not self._may_fit(low + step):
                return low, low + step
            low, step = low + step, step * 2
        return low, high

    def _below(self, last: int) -> tuple[int, int]:
        """The same below an index that a replay ruled out. What it taught is some percent, so the next is near."""
        low, high, step = last - 1, last, 1
        self._left.clear()
        while low >= 0 and not self._may_fit(low):
            short = int(low / (1 - self._left.get(low, 0.0)))  # as if memory were in proportion to the value
            low, high, step = max(-1, min(low - step, short)), low, step * 2
        return low, high

    def _last(self, low: int, high: int) -> int:
        """The last index at which a plan may fit, where one does at ``low`` (or that is -1), and none at ``high``.

        The share of memory that is left falls almost evenly, so guess before halving.
        """
        halve = False
        while high - low > 1:
            middle = (low + high) // 2
            if not halve and self._left.get(low, -1.0) > 0 > self._left.get(high, 1.0):
                guess = low + int((high - low) * self._left[low] / (self._left[low] - self._left[high]))
                middle = min(max(guess, low + 1), high - 1)
            before = high - low
            low, high = (middle, high) if self._may_fit(middle) else (low, middle)
            halve = not halve and high - low > before // 2
        return low


def anchors(
    search: Search, jobs: Sequence[Job], lossy: bool | None, smallest: Job | None = None
) -> list[ResolvedStrategy]:
    """The strategies that are the tightest at any of the shapes, without their swap: they decide whether any fits.
    ``smallest``: the smallest shape of all that will be asked about."""
    swap = search.question.strategy.swap_blocks
    if search.question.learned.proofs:  # what ran had RAM enough, whatever an estimate says
        smallest = None
    tightest = [quick for job in jobs for quick in search.tightest_first(job, lossy, smallest=smallest)[:TIGHTEST]]
    return list(dict.fromkeys(quick.strategy.replace(swap_blocks=swap) for quick in tightest))


def fitting(search: Search, job: Job, strategies: Sequence[ResolvedStrategy]) -> Iterator[Estimate]:
    """The plans of strategies with as many swapped blocks as the host's RAM holds, of those that may fit and do."""
    for strategy in strategies:
        most = search.most_in_ram(job, strategy)
        if not search.pruning.never_fits(job, strategy, "fits") and search.feasibility.may_reach(
            search.quick_estimate(job, most)
        ):
            plan = search.try_estimate(job, most)
            if plan is not None and search.policy.reaches(plan, "fits"):
                yield plan
