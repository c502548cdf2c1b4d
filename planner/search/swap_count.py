"""How many blocks to swap: as few as do, and no more than the host's RAM holds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from planner.layout import margin
from planner.layout.single_gpu import RING
from planner.search.screening import Look
from planner.search.space import most_swapped
from planner.spec.job import Job, Strategy

if TYPE_CHECKING:
    from planner.search.search import Search


class Swaps:
    """What a search found of swapped blocks, strategy by strategy."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.question = search.question
        self.screen = search.screen
        self._most: dict[tuple[Job, Strategy], Strategy] = {}
        self._needed: dict[tuple[Job, Strategy, str], int] = {}
        """Job, strategy without swap stepping by foreach, verdict -> blocks that one of them had to swap."""

    def no_smaller(self, job: Job, strategy: Strategy, verdict: str, nbytes: float) -> bool:
        """Whether a look at a strategy with as few swapped blocks as do is no less than so many bytes: it has to swap,
        and with one block less than such a look's it would do as well."""
        if nbytes == math.inf or not self.search.known.must_swap(job, strategy, verdict):
            return False
        block = self.screen.largest_block_bytes(job, strategy, self.question.machine)
        if block is None:
            return False
        return not self.search.over(int((nbytes + block) * self.search.ratio(strategy)), strategy, verdict)

    def roomiest(self, job: Job, strategy: Strategy, verdict: str = "fits") -> Look | None:
        """The look at a strategy, with as few swapped blocks as seem to do; None when no number does."""
        search = self.search
        if alike := self._as_alike(job, strategy, verdict):
            return alike
        most = search.most_in_ram(job, strategy)
        ruled_out = most != strategy and search.known.above_floor(job, strategy, verdict)
        if not ruled_out and search.seems(look := search.look(job, strategy), verdict):
            return look
        best = search.look(job, most)
        if most == strategy or not search.seems(best, verdict):
            return None
        low, high = strategy.swap_blocks, most.swap_blocks
        above = best.device_bytes + self.screen.swapped_bytes(job, most, self.question.machine)
        while high - low > 1:  # memory falls almost evenly with every block, so guess before halving
            middle = self._guess(above, best.device_bytes, low, high, search.ratio(strategy))
            tried = search.look(job, strategy.replace(swap_blocks=middle))
            if search.seems(tried, verdict):
                high, best = middle, tried
            else:
                low, above = middle, tried.device_bytes
        self._needed.setdefault((job, strategy.replace(optimizer_step="foreach"), verdict), high)
        return best

    def _as_alike(self, job: Job, strategy: Strategy, verdict: str) -> Look | None:
        """The same with as many swapped blocks as another way of stepping needs, if it needs just as many."""
        search = self.search
        count = self._needed.get((job, strategy.replace(optimizer_step="foreach"), verdict), 0)
        if count <= strategy.swap_blocks:
            return None
        look, fewer = (search.look(job, strategy.replace(swap_blocks=blocks)) for blocks in (count, count - 1))
        return look if search.seems(look, verdict) and not search.seems(fewer, verdict) else None

    def _guess(self, above: int, below: int, low: int, high: int, ratio: float) -> int:
        first, second = int(above * ratio), int(below * ratio)
        budget = self.question.budget_bytes
        room = budget**2 / margin.interval(budget, sides=self.search.sides)[1]
        share = (first - room) / max(first - second, 1)
        low += 0 if low else min(RING, high - 1)  # the first blocks only make room for the ring they come through
        return min(high - 1, max(low + 1, low + math.ceil(share * (high - low))))

    def most_in_ram(self, job: Job, strategy: Strategy) -> Strategy:
        """The strategy with the most blocks swapped that it allows and the host's RAM holds."""
        key = (job, strategy)
        if key not in self._most:
            last = most_swapped(job, strategy, self.question.model, self.question.fixed)
            self._most[key] = strategy.replace(swap_blocks=self._most_held(job, strategy, last)) if last else strategy
        return self._most[key]

    def _most_held(self, job: Job, strategy: Strategy, last: int) -> int:
        """The most swapped blocks, up to `last`, whose pinned copies the host's RAM holds, or that need no more of it
        than the run does without."""
        limit = self.question.machine.host_ram
        if limit is None:
            return last
        low, high = 0, last
        most, least = self._ram(job, strategy, last), self._ram(job, strategy, 0)
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

    def _ram(self, job: Job, strategy: Strategy, swapped: int) -> int:
        return self.screen.host_ram_bytes(job, strategy.replace(swap_blocks=swapped), self.question.machine)
