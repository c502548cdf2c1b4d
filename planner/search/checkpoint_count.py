"""How many blocks to checkpoint where not all have to be: as few as do, because each one runs forward twice.

Memory falls and seconds rise with every checkpointed block, so the count is searched by bisection. Blocks are
checkpointed in part or swapped, not both: where memory is that short, all of them are checkpointed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from planner.errors import NotEstimatedError
from planner.search.feasibility import Feasibility
from planner.search.screening import QuickEstimate
from planner.spec.job import Job
from planner.spec.rules import ResolvedStrategy

LEAST = 1
"""Checkpointed blocks of the candidate that stands for all counts: nothing that checkpoints in part is faster."""


class CheckpointCount:
    """The candidates of one question that checkpoint a part of the blocks, and the fewest blocks that they need."""

    def __init__(self, feasibility: Feasibility) -> None:
        self.feasibility = feasibility
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
        """A lower bound of the seconds of a step, with any count: those of a step that runs nothing twice."""
        plain = strategy.replace(gradient_checkpointing="none", checkpointed_blocks=None)
        return self.screen.floor_seconds(self.question.candidate(job, plain))

    def fewest(self, job: Job, strategy: ResolvedStrategy, verdict: str) -> QuickEstimate | None:
        """The quick estimate with the fewest checkpointed blocks that reach the verdict; None where all but one do
        not. Raises a NotEstimatedError where the recordings cannot be put together."""
        feasibility = self.feasibility
        low, high = LEAST - 1, self.question.model.blocks - 1
        best = feasibility.quick_estimate(job, self.with_count(strategy, high))
        if not feasibility.may_reach(best, verdict):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            quick = feasibility.quick_estimate(job, self.with_count(strategy, middle))
            if feasibility.may_reach(quick, verdict):
                high, best = middle, quick
            else:
                low = middle
        return best
