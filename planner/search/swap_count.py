"""How many blocks to swap: as few as do, because each is a transfer a step, and no more than the host's RAM holds.

Memory falls and host RAM rises with every swapped block, so both are searched by bisection, with a guess instead of
the middle because blocks are much alike.
"""

from __future__ import annotations

import math

from planner.layout.single_gpu import SWAP_RING_BUFFERS
from planner.search.feasibility import Feasibility
from planner.search.pruning import Pruning
from planner.search.screening import QuickEstimate
from planner.spec.job import Job
from planner.spec.rules import ResolvedStrategy


class SwapCount:
    """How many blocks a search found must be swapped, for each strategy."""

    def __init__(self, feasibility: Feasibility, pruning: Pruning) -> None:
        self.feasibility = feasibility
        self.pruning = pruning
        self.question = feasibility.question
        self.screen = feasibility.screen
        self._most: dict[tuple[Job, ResolvedStrategy], ResolvedStrategy] = {}
        self._needed: dict[tuple[Job, ResolvedStrategy, str], int] = {}
        """job, strategy without swap stepping by foreach, verdict -> blocks that one of them had to swap"""

    def needs_at_least(self, nbytes: float, job: Job, strategy: ResolvedStrategy, verdict: str) -> bool:
        """Whether the quick estimate with as few swapped blocks as do is at least so many bytes.

        It is where blocks have to be swapped, and where even one block less than brings it there would do as well.
        """
        if nbytes == math.inf or not self.pruning.must_swap(job, strategy, verdict):
            return False
        block = self.screen.largest_block_bytes(self.question.candidate(job, strategy))
        if block is None:
            return False
        expected = int((nbytes + block) * self.feasibility.overhead(strategy))
        return not self.feasibility.exceeds_gpu(expected, strategy, verdict)

    def fewest(self, job: Job, strategy: ResolvedStrategy, verdict: str = "fits") -> QuickEstimate | None:
        """The quick estimate with the fewest swapped blocks that reach the verdict; None when no number does."""
        feasibility = self.feasibility
        if same_count := self._as_many_as_other_steps(job, strategy, verdict):
            return same_count
        most = self.most_in_ram(job, strategy)
        ruled_out = most != strategy and self.pruning.above_budget(job, strategy, verdict)
        if not ruled_out and feasibility.may_reach(quick := feasibility.quick_estimate(job, strategy), verdict):
            return quick
        best = feasibility.quick_estimate(job, most)
        if most == strategy or not feasibility.may_reach(best, verdict):
            return None
        low, high = strategy.swap_blocks, most.swap_blocks
        above = best.device_bytes + self.screen.swapped_bytes(self.question.candidate(job, most))
        while high - low > 1:  # memory falls almost evenly with every block, so guess before halving
            middle = self._guess(above, best.device_bytes, low, high, feasibility.overhead(strategy))
            quick = feasibility.quick_estimate(job, strategy.replace(swap_blocks=middle))
            if feasibility.may_reach(quick, verdict):
                high, best = middle, quick
            else:
                low, above = middle, quick.device_bytes
        if (count := feasibility.policy.swap_count(high, up=True)) != high:
            high, best = count, feasibility.quick_estimate(job, strategy.replace(swap_blocks=count))
        self._needed.setdefault((job, strategy.replace(optimizer_step="foreach"), verdict), high)
        return best

    def _as_many_as_other_steps(self, job: Job, strategy: ResolvedStrategy, verdict: str) -> QuickEstimate | None:
        """With as many swapped blocks as another `optimizer_step` needs, if it needs just as many."""
        feasibility = self.feasibility
        count = self._needed.get((job, strategy.replace(optimizer_step="foreach"), verdict), 0)
        if count <= strategy.swap_blocks:
            return None
        quick, fewer = (
            feasibility.quick_estimate(job, strategy.replace(swap_blocks=blocks)) for blocks in (count, count - 1)
        )
        return quick if feasibility.may_reach(quick, verdict) and not feasibility.may_reach(fewer, verdict) else None

    def _guess(self, above: int, below: int, low: int, high: int, overhead: float) -> int:
        first, second = int(above * overhead), int(below * overhead)
        share = (first - self.feasibility.room("fits")) / max(first - second, 1)
        low += (
            0 if low else min(SWAP_RING_BUFFERS, high - 1)
        )  # the first blocks only make room for the ring they come through
        return min(high - 1, max(low + 1, low + math.ceil(share * (high - low))))

    def most_in_ram(self, job: Job, strategy: ResolvedStrategy) -> ResolvedStrategy:
        """The strategy with the most blocks swapped that it allows and the host's RAM holds."""
        if not self.feasibility.policy.may_swap(strategy):
            return strategy
        key = (job, strategy)
        if key not in self._most:
            last = self.pruning.space.most_swapped(job, strategy)
            held = self._most_held(job, strategy, last) if last else 0
            count = self.feasibility.policy.swap_count(held, up=False)
            self._most[key] = strategy.replace(swap_blocks=count) if last else strategy
        return self._most[key]

    def _most_held(self, job: Job, strategy: ResolvedStrategy, last: int) -> int:
        """The most swapped blocks, up to `last`, whose pinned copies the host's RAM holds, or that need no more of it
        than the run does without."""
        limit = self.question.machine.host_ram
        if limit is None:
            return last
        low, high = 0, last
        if (most := self._ram(job, strategy, last)) <= limit:
            return last
        least = self._ram(job, strategy, 0)
        limit = max(limit, least)  # where another phase needs more anyway, what it leaves unused is free
        if most <= limit:
            return last
        while high - low > 1:  # blocks are much alike, so guess before halving
            guess = low + (high - low) * (limit - least) // max(most - least, 1)
            middle = min(high - 1, max(low + 1, guess))
            if (ram := self._ram(job, strategy, middle)) <= limit:
                low, least = middle, ram
            else:
                high, most = middle, ram
        return low

    def _ram(self, job: Job, strategy: ResolvedStrategy, swapped: int) -> int:
        return self.screen.host_ram_bytes(self.question.candidate(job, strategy.replace(swap_blocks=swapped)))
