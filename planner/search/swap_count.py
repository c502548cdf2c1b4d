"""How many blocks to swap: as few as do, because each is a transfer a step, and no more than the host's RAM holds.

Memory falls and host RAM rises with every swapped block, so both are searched by bisection: first beside what a lower
bound rules out, which is seldom more than a block away, then with a guess instead of the middle, because blocks are
much alike.
"""

from __future__ import annotations

import bisect
import math

from planner.layout.single_gpu import SWAP_RING_BUFFERS
from planner.search.feasibility import NEVER, Feasibility
from planner.search.pruning import Pruning
from planner.search.screening import QuickEstimate
from planner.search.space import at_the_end
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
        low = self._too_few(job, strategy, verdict)
        if low < strategy.swap_blocks:  # nothing is ruled out
            if feasibility.may_reach(quick := feasibility.quick_estimate(job, strategy), verdict):
                return quick
            low = strategy.swap_blocks
        family = (job, at_the_end(strategy), verdict)
        needed = self._needed.get(family, 0)
        likely = [needed, needed - 1] if needed > low else [low + 1] if low > strategy.swap_blocks else []
        best, high = self._narrow(job, strategy, verdict, low, likely)
        if best is None:
            return None
        self._needed.setdefault(family, high)
        if (count := feasibility.policy.swap_count(high, up=True)) == high:
            return best
        if not high < count <= self.most_in_ram(job, strategy).swap_blocks:
            return None
        return feasibility.quick_estimate(job, strategy.replace(swap_blocks=count))

    def most_despite_replays(self, job: Job, strategy: ResolvedStrategy, verdict: str) -> QuickEstimate | None:
        """The quick estimate with the most swapped blocks, where it reaches the verdict but for what replays with fewer
        of them lost to fragmentation: with more they may lose less. None elsewhere."""
        feasibility = self.feasibility
        if not 1.0 < feasibility.overhead(strategy) < NEVER:
            return None
        most = self.most_in_ram(job, strategy)
        if most.swap_blocks <= strategy.swap_blocks:
            return None
        quick = feasibility.quick_estimate(job, most)
        too_large = feasibility.exceeds_gpu(quick.device_bytes, most, verdict)
        return None if quick.outcome is not None or too_large or not feasibility.has_ram(quick) else quick

    def _too_few(self, job: Job, strategy: ResolvedStrategy, verdict: str) -> int:
        """How many swapped blocks are too few by a lower bound; less than the strategy has where that says nothing."""
        nothing, feasibility, last = (
            strategy.swap_blocks - 1,
            self.feasibility,
            self.pruning.most_swapped(job, strategy),
        )
        if last <= strategy.swap_blocks or not self.pruning.above_budget(job, strategy, verdict):
            return nothing
        if self.question.learned.proofs:  # some number of them may have been tried
            return strategy.swap_blocks
        swapping = self.question.candidate(job, strategy.replace(swap_blocks=last))
        floor, overhead = self.screen.floor_by_swap(swapping), feasibility.overhead(strategy)
        may_do = bisect.bisect_left(
            range(last + 1),
            True,
            lo=strategy.swap_blocks + 1,
            key=lambda blocks: not feasibility.exceeds_gpu(int(overhead * floor(blocks)), strategy, verdict),
        )
        return may_do - 1

    def _narrow(
        self, job: Job, strategy: ResolvedStrategy, verdict: str, low: int, likely: list[int]
    ) -> tuple[QuickEstimate | None, int]:
        """The quick estimate with the fewest swapped blocks, more than ``low``, that reach the verdict, and their
        number; None where as many as the host's RAM holds do not. ``likely``: numbers to ask about first."""
        feasibility = self.feasibility
        best, high = None, self.pruning.most_swapped(job, strategy) + 1
        bytes_below: int | None = None
        failed = fitted = 0  # times in a row; of numbers that fit, since half-way was asked about
        while high - low > 1:
            if likely:
                middle = likely.pop(0)
            else:
                most = self.most_in_ram(job, strategy)
                high = min(high, most.swap_blocks + 1)
                if best is None and failed != 1:  # one guess beside what is likely, then whether any number does
                    middle = most.swap_blocks
                elif fitted > 2:  # what is short is not all in the blocks
                    middle, fitted = (low + high) // 2, 0
                else:
                    room = feasibility.room(verdict) / feasibility.overhead(most)
                    middle = self._guess(self._block_bytes(job, most), room, best, low, high, bytes_below)
            if not low < middle < high:
                continue
            quick = feasibility.quick_estimate(job, strategy.replace(swap_blocks=middle))
            if feasibility.may_reach(quick, verdict):
                best, high, failed, fitted = quick, middle, 0, fitted + 1
            else:
                low, bytes_below, failed, fitted = middle, quick.device_bytes, failed + 1, 0
        return best, high

    def _guess(
        self,
        of_block: float,
        room: float,
        best: QuickEstimate | None,
        low: int,
        high: int,
        bytes_below: int | None,
    ) -> int:
        """How many swapped blocks are likely the fewest, more than ``low`` and less than ``high``: memory falls almost
        evenly with every block. ``of_block``: bytes by which; ``room``: device bytes to come down to; ``bytes_below``:
        those with ``low`` blocks, where these were asked about, else those with ``high`` are counted back from."""
        if bytes_below is None:
            assert best is not None
            low = max(low, min(SWAP_RING_BUFFERS, high - 1))
            bytes_below = best.device_bytes + int((high - low) * of_block)
        return min(high - 1, low + max(1, math.ceil((bytes_below - room) / of_block)))

    def _block_bytes(self, job: Job, most: ResolvedStrategy) -> float:
        """What a swapped block takes off the device in the mean: the first ones only make room for the ring of buffers
        that all come through."""
        blocks = most.swap_blocks - min(SWAP_RING_BUFFERS, most.swap_blocks - 1)
        return max(1, self.screen.swapped_bytes(self.question.candidate(job, most)) / blocks)

    def most_in_ram(self, job: Job, strategy: ResolvedStrategy) -> ResolvedStrategy:
        """The strategy with the most blocks swapped that it allows and the host's RAM holds."""
        if not self.feasibility.policy.may_swap(strategy):
            return strategy
        key = (job, strategy)
        if key not in self._most:
            last = self.pruning.most_swapped(job, strategy)
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
        rise, flat = (most - least) / high, least == limit
        while high - low > 1:  # blocks are much alike, so guess before halving
            guess = (low + high) // 2 if flat else high - math.ceil((most - limit) / rise)
            middle = min(high - 1, max(low + 1, guess))
            if (ram := self._ram(job, strategy, middle)) <= limit:
                flat = ram == least  # another phase needs that much, and nothing says where swapped blocks begin to
                low, least, rise = middle, ram, (most - ram) / (high - middle)
            else:
                high, most, rise, flat = middle, ram, max(1, (most - ram) / (high - middle)), False
        return low

    def _ram(self, job: Job, strategy: ResolvedStrategy, swapped: int) -> int:
        return self.screen.host_ram_bytes(self.question.candidate(job, strategy.replace(swap_blocks=swapped)))
