"""How many blocks to checkpoint where not all have to be: as few as do, because each one runs forward twice.

Memory falls and seconds rise with every checkpointed block, so the count is searched by bisection. Blocks are
checkpointed in part or swapped, not both: where memory is that short, all of them are checkpointed.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from planner.errors import NotEstimatedError
from planner.search.feasibility import Feasibility
from planner.search.pruning import Pruning
from planner.search.screening import QuickEstimate
from planner.spec.job import Job
from planner.spec.rules import ResolvedStrategy

LEAST = 1
"""Checkpointed blocks of the candidate that stands for all counts: nothing that checkpoints in part is faster."""


class CheckpointCount:
    """The candidates of one question that checkpoint a part of the blocks, and the fewest blocks that they need."""

    def __init__(self, feasibility: Feasibility, pruning: Pruning) -> None:
        self.feasibility = feasibility
        self.pruning = pruning
        self._brackets: dict[tuple[Job, ResolvedStrategy, str], Bracket] = {}
        self.question = feasibility.question
        self.screen = feasibility.screen

    def candidates(self, job: Job, whole: Iterable[ResolvedStrategy]) -> Iterator[ResolvedStrategy]:
        """Of strategies that checkpoint all blocks the same with `LEAST` blocks, as far as that has recordings."""
        if "gradient_checkpointing" in self.question.fixed or self.question.model.blocks <= LEAST:
            return
        for strategy in whole:
            if strategy.gradient_checkpointing != "full" or strategy.swap_blocks:
                continue
            part = self.with_count(strategy, LEAST)
            if not self.feasibility.policy.may_checkpoint_partly(job, part):
                continue
            try:
                self.screen.facts(self.question.candidate(job, part))
            except NotEstimatedError:  # of all blocks there are recordings, and that is a candidate
                continue
            yield part

    def is_open(self, strategy: ResolvedStrategy) -> bool:
        """Whether the search says how many blocks a strategy checkpoints."""
        return strategy.gradient_checkpointing == "partial" and "gradient_checkpointing" not in self.question.fixed

    def with_count(self, strategy: ResolvedStrategy, count: int) -> ResolvedStrategy:
        """The strategy with its first ``count`` blocks checkpointed."""
        return strategy.replace(gradient_checkpointing="partial", checkpointed_blocks=count)

    def floor_seconds(self, job: Job, strategy: ResolvedStrategy) -> float:
        """A lower bound of the seconds of a step, with as many checkpointed blocks or more."""
        if strategy.checkpointed_blocks == LEAST:  # known sooner: those of a step that runs nothing twice
            strategy = strategy.replace(gradient_checkpointing="none", checkpointed_blocks=None)
        return self.screen.floor_seconds(self.question.candidate(job, strategy))

    def narrow(self, job: Job, strategy: ResolvedStrategy, verdict: str) -> QuickEstimate | ResolvedStrategy | None:
        """One step towards the fewest checkpointed blocks that reach a verdict: the quick estimate with them, the
        strategy with the fewest that may, or None where all but one do not. Raises a NotEstimatedError where the
        recordings cannot be put together."""
        feasibility, most = self.feasibility, self.question.model.blocks - 1
        key = (job, self.with_count(strategy, LEAST), verdict)
        if key not in self._brackets:
            self._brackets[key] = Bracket(self._ruled_out(job, strategy, verdict, most))
            if self._brackets[key].low >= LEAST:
                return self._from(strategy, self._brackets[key].low)
        bracket = self._brackets[key]
        if bracket.high is not None and not feasibility.may_reach(self._quick(job, strategy, bracket.high), verdict):
            bracket.low, bracket.high, bracket.is_known = bracket.high, None, True  # a replay taught otherwise
        if bracket.low >= most:
            return None
        if bracket.high != bracket.low + 1:
            probed = self._next(job, strategy, verdict, bracket)
            if feasibility.may_reach(self._quick(job, strategy, probed), verdict):
                bracket.high = probed
            else:
                bracket.low, bracket.is_known = probed, True
        if bracket.high == bracket.low + 1:
            return self._quick(job, strategy, bracket.high)
        return self._from(strategy, bracket.low)

    def needs_at_least(self, nbytes: float, job: Job, strategy: ResolvedStrategy, verdict: str) -> bool:
        """Whether the quick estimate with as few checkpointed blocks as do is at least so many bytes: where more than
        one must be, one less than brings it there would do as well."""
        if nbytes == math.inf or self.question.learned.proofs:
            return False
        if self.pruning.least_in_part(job, strategy) >= nbytes:
            return True
        if not self.pruning.above_budget(job, self.with_count(strategy, LEAST), verdict):
            return False
        block = max(self._block_bytes(job, strategy), default=None)
        if block is None:
            return False
        expected = int((nbytes + block) * self.feasibility.overhead(strategy))
        return not self.feasibility.exceeds_gpu(expected, strategy, verdict)

    def _next(self, job: Job, strategy: ResolvedStrategy, verdict: str, bracket: Bracket) -> int:
        """The number of checkpointed blocks to ask about next: memory falls evenly with every block of a kind, so guess
        from one that is too few before halving."""
        most = self.question.model.blocks - 1 if bracket.high is None else bracket.high - 1
        if self.question.learned.proofs:  # some number of them may have been tried
            return most if bracket.high is None else (bracket.low + bracket.high) // 2
        if not bracket.is_known:  # what a lower bound leaves is close
            return bracket.low + 1
        expected = self.feasibility.expected_bytes(self._quick(job, strategy, bracket.low))
        blocks = self._block_bytes(job, strategy)
        if not blocks or not min(blocks):
            return (bracket.low + most + 1) // 2
        short = expected - self.feasibility.room(verdict)
        return min(most, bracket.low + max(1, math.ceil(short / max(blocks))))

    def _block_bytes(self, job: Job, strategy: ResolvedStrategy) -> list[int]:
        """What checkpointing one more block takes off the device, for one of each kind of blocks."""
        kinds = self.screen.first_of_kinds(self.question.candidate(job, self.with_count(strategy, LEAST)))
        bounds = [
            [self.pruning.floor_bytes(job, self.with_count(strategy, count)) for count in (first, first + 1)]
            for first in kinds
        ]
        return [before - after for before, after in bounds]

    def _from(self, strategy: ResolvedStrategy, low: int) -> ResolvedStrategy | None:
        return self.with_count(strategy, low + 1) if low + 1 < self.question.model.blocks else None

    def _ruled_out(self, job: Job, strategy: ResolvedStrategy, verdict: str, most: int) -> int:
        """How many checkpointed blocks are too few by a lower bound of what they need."""
        if self.question.learned.proofs:  # some number of them may have been tried
            return LEAST - 1
        if self.feasibility.exceeds_gpu(self.pruning.least_in_part(job, strategy), strategy, verdict):
            return most
        if self.pruning.never_fits(job, self.with_count(strategy, most), verdict):
            return most
        counts = range(LEAST, most + 1)
        found = bisect.bisect_left(
            counts,
            True,
            key=lambda count: not self.pruning.above_budget(job, self.with_count(strategy, count), verdict),
        )
        return LEAST - 1 + found

    def _quick(self, job: Job, strategy: ResolvedStrategy, count: int) -> QuickEstimate:
        return self.feasibility.quick_estimate(job, self.with_count(strategy, count))


@dataclass
class Bracket:
    """Between which numbers of checkpointed blocks the fewest lie that reach a verdict."""

    low: int
    """too few"""

    high: int | None = None
    """enough"""

    is_known: bool = False
    """whether ``low`` was asked about, and is not ruled out by a bound alone"""
