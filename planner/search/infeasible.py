"""Strategies that cannot come to a verdict, concluded from others that could not.

With the same passes and another optimizer only its step and its states differ. So where a strategy is too large outside
the optimizer's step, every other way of stepping is too; and where it is too large even without its states, so is every
other kind of Adam.
"""

from __future__ import annotations

from planner.search.feasibility import Feasibility
from planner.search.screening import QuickEstimate
from planner.search.space import at_the_end
from planner.search.swap_count import SwapCount
from planner.spec.job import Job
from planner.spec.rules import ResolvedStrategy


class Infeasible:
    """The set of strategies that cannot reach a verdict for one job; all are kept without block swap."""

    def __init__(self, feasibility: Feasibility, swap_count: SwapCount, job: Job, verdict: str) -> None:
        self.feasibility = feasibility
        self.swap_count = swap_count
        self.job = job
        self.verdict = verdict
        self._any_step: set[ResolvedStrategy] = set()
        self._any_adam: set[ResolvedStrategy] = set()

    def add(self, strategy: ResolvedStrategy) -> None:
        """A strategy that no number of swapped blocks helps, and those like it.

        What replays of it were seen to lose to fragmentation says nothing of the others, so quick estimates decide.
        """
        family = at_the_end(strategy)
        most = self.swap_count.most_in_ram(self.job, strategy)
        quick = [self.feasibility.quick_estimate(self.job, most)]
        if not self._too_large(quick[0]):  # it is the RAM, of which fewer swapped blocks need less
            quick.append(self.feasibility.quick_estimate(self.job, strategy))
        if any(one.in_optimizer or (self.feasibility.has_ram(one) and not self._too_large(one)) for one in quick):
            return
        self._any_step.add(family)
        if all(self._too_large(one, one.states_bytes) for one in quick):
            self._any_adam.add(family.replace(optimizer="adamw"))

    def _too_large(self, quick: QuickEstimate, less: int = 0) -> bool:
        return self.feasibility.exceeds_gpu(quick.device_bytes - less, quick.strategy, self.verdict)

    def __contains__(self, strategy: ResolvedStrategy) -> bool:
        family = at_the_end(strategy)
        adam = strategy.optimizer in ("adamw", "adamw-8bit")
        return family in self._any_step or (adam and family.replace(optimizer="adamw") in self._any_adam)
