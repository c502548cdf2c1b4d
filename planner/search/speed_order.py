"""The order in which a search takes the strategies of one shape, and those that it need not take.

With the same passes and another optimizer only its step and its states differ. So where a strategy is too large outside
the optimizer's step, every other way of stepping is too; and where it is too large even without its states, so is every
other kind of Adam.
"""

from __future__ import annotations

import heapq
import itertools

from planner.search.checkpoint_count import CheckpointCount
from planner.search.cost import WORTH_PART, slowness
from planner.search.feasibility import Feasibility
from planner.search.policy import Policy
from planner.search.pruning import Pruning
from planner.search.screening import QuickEstimate
from planner.search.space import at_the_end, effort
from planner.search.swap_count import SwapCount
from planner.spec.job import Job
from planner.spec.rules import ResolvedStrategy


class SpeedQueue:
    """Strategies of one shape, the fastest first; of equally fast ones the one with the fewest switches, then the one
    with the least memory. Each is there with its quick estimate, or without one by a lower bound of its seconds."""

    def __init__(
        self,
        job: Job,
        verdict: str,
        start: ResolvedStrategy,
        by_loss: bool,
        fastest: float,
        policy: Policy,
        pruning: Pruning,
        checkpoint_count: CheckpointCount,
    ) -> None:
        """``start``: the strategy from which switches are counted. ``by_loss``: whether one that loses more precision
        counts as slower. ``fastest``: the lowest bound, around which steps of speed are taken."""
        self.job, self.verdict, self.start = job, verdict, start
        self.by_loss, self.fastest = by_loss, fastest
        self.policy, self.pruning, self.checkpoint_count = policy, pruning, checkpoint_count
        self._ties = itertools.count()
        self._heap: list[tuple[tuple[int, int, int], int, ResolvedStrategy, QuickEstimate | None]] = []

    def __bool__(self) -> bool:
        return bool(self._heap)

    def push(self, strategy: ResolvedStrategy, seconds: float, quick: QuickEstimate | None) -> None:
        """Adds a strategy by its seconds. Without a quick estimate they and all else are a lower bound, so that what
        comes first with one is the best."""
        worth = 1 + WORTH_PART if self.checkpoint_count.is_open(strategy) else 1
        speed = slowness(worth * seconds, self.fastest, self.policy.loss(self.job, strategy) if self.by_loss else 0)
        swaps = quick is None and self.pruning.weights_force_swap(self.job, strategy, self.verdict)
        work = effort(self.start, strategy.replace(swap_blocks=1) if swaps else strategy)
        memory = quick.device_bytes if quick else 0
        heapq.heappush(self._heap, ((speed, work, memory), next(self._ties), strategy, quick))

    def pop(self) -> tuple[ResolvedStrategy, QuickEstimate | None]:
        """Takes the first strategy."""
        _, _, strategy, quick = heapq.heappop(self._heap)
        return strategy, quick


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
