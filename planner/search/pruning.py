"""What a search need not estimate: strategies whose lower bounds already exceed the card or the host's RAM.

Every rule here relies on bounds that hold for certain (`planner.search.lower_bounds`): what they rule out, a quick
estimate would rule out as well, so that pruning changes no answer. Plans that were run are never pruned: a
measurement says more than any bound.
"""

from __future__ import annotations

import bisect

from planner.search.feasibility import Feasibility
from planner.search.space import Space
from planner.spec.job import Job
from planner.spec.rules import ResolvedStrategy


class Pruning:
    """Decides by lower bounds alone, which are known sooner than a quick estimate."""

    def __init__(self, feasibility: Feasibility, space: Space) -> None:
        self.feasibility = feasibility
        self.space = space
        self.question = feasibility.question
        self.screen = feasibility.screen
        self._short_of_ram: dict[tuple[Job, ResolvedStrategy], bool] = {}
        self._most: dict[tuple[Job, ResolvedStrategy], ResolvedStrategy | None] = {}

    def most_swapped(self, job: Job, strategy: ResolvedStrategy) -> int:
        """The most blocks that a search may swap under a strategy, without looking at host RAM."""
        return self.space.most_swapped(job, strategy) if self.feasibility.policy.may_swap(strategy) else 0

    def never_fits(self, job: Job, strategy: ResolvedStrategy, verdict: str) -> bool:
        """Whether this verdict is ruled out, however many blocks are swapped."""
        if not self.most_swapped(job, strategy):
            return self.above_budget(job, strategy, verdict) or self.short_of_ram(job, strategy)
        if self.question.learned.proofs:  # some number of swapped blocks may have been tried
            return False
        most = self._most_in_ram(job, strategy)
        return most is None or self.above_budget(job, most, verdict)

    def weights_force_swap(self, job: Job, strategy: ResolvedStrategy, verdict: str) -> bool:
        """Whether the weights alone rule this verdict out where no blocks are swapped, and some may be."""
        if self._was_run(job, strategy) or not self.most_swapped(job, strategy):
            return False
        nbytes = self.screen.parameter_bytes(self.question.candidate(job, strategy))
        return self.feasibility.exceeds_gpu(nbytes, strategy, verdict)

    def must_swap(self, job: Job, strategy: ResolvedStrategy, verdict: str) -> bool:
        """Whether blocks must be swapped to come to a verdict, and may be."""
        untried = not self.question.learned.proofs
        return untried and bool(self.most_swapped(job, strategy)) and self.above_budget(job, strategy, verdict)

    def above_budget(self, job: Job, strategy: ResolvedStrategy, verdict: str) -> bool:
        """Whether the GPU's memory rules out this strategy, and with fewer swapped blocks."""
        if self._was_run(job, strategy):
            return False
        candidate = self.question.candidate(job, strategy)
        bounds = (
            bound(candidate) for bound in (self.screen.parameter_bytes, self.screen.floor_bytes)
        )  # cheapest first
        return any(self.feasibility.exceeds_gpu(nbytes, strategy, verdict) for nbytes in bounds)

    def floor_bytes(self, job: Job, strategy: ResolvedStrategy) -> int:
        """A lower bound of device bytes, with as many blocks swapped as the host's RAM holds."""
        if self.most_swapped(job, strategy):
            strategy = self._most_in_ram(job, strategy) or strategy
        return self.screen.floor_bytes(self.question.candidate(job, strategy))

    def least_in_part(self, job: Job, strategy: ResolvedStrategy) -> int:
        """A lower bound of device bytes with any number of checkpointed blocks, by what all of them need: one block's
        input less at the most, because the last block, which runs backward first, need not keep its own beside its
        step."""
        whole = strategy.replace(gradient_checkpointing="full", checkpointed_blocks=None)
        return self.screen.floor_bytes(self.question.candidate(job, whole), and_one_input=False)

    def short_of_ram(self, job: Job, strategy: ResolvedStrategy) -> bool:
        """Whether the host's RAM rules out a strategy whose blocks cannot be swapped."""
        if self.question.machine.host_ram is None or self.most_swapped(job, strategy):
            return False
        if self._was_run(job, strategy):
            return False
        if job.trainable:  # which part of the states there are is known once it is laid out
            return False
        if strategy.optimizer_step in ("fused", "backward"):  # how and when it steps is nothing to the host
            strategy = strategy.replace(optimizer_step="foreach")
        if (job, strategy) not in self._short_of_ram:
            candidate = self.question.candidate(job, strategy)
            bounds = (self.screen.floor_ram_bytes, self.screen.host_ram_bytes)  # cheapest first
            self._short_of_ram[job, strategy] = any(self.feasibility.exceeds_ram(bound(candidate)) for bound in bounds)
        return self._short_of_ram[job, strategy]

    def _most_in_ram(self, job: Job, strategy: ResolvedStrategy) -> ResolvedStrategy | None:
        """With the most swapped blocks that the host's RAM may hold; None where it cannot even hold the rest."""
        if (job, strategy) not in self._most:
            self._most[job, strategy] = self._find_most_in_ram(job, strategy)
        return self._most[job, strategy]

    def _find_most_in_ram(self, job: Job, strategy: ResolvedStrategy) -> ResolvedStrategy | None:
        floor = self.screen.floor_ram_by_swap(self.question.candidate(job, strategy))
        most = self.most_swapped(job, strategy)
        if not self.feasibility.exceeds_ram(floor(most)):
            return strategy.replace(swap_blocks=most)
        held = bisect.bisect_left(range(most), True, key=lambda blocks: self.feasibility.exceeds_ram(floor(blocks)))
        return strategy.replace(swap_blocks=held - 1) if held else None

    def _was_run(self, job: Job, strategy: ResolvedStrategy) -> bool:
        """Whether this very plan was run, which says more than any bound."""
        if not self.question.learned.proofs:
            return False
        return self.screen.outcome(self.question.candidate(job, strategy)) is not None
