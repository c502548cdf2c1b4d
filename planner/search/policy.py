"""What a search leaves to its caller: which strategies it may answer with, and when a plan counts as one that fits.

`vplan suggest` goes by the margin of the estimate, `vplan tune` by what it has measured
(`planner.tune.measured_policy`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from planner.layout import margin
from planner.search import cost
from planner.search.question import Question
from planner.spec.job import Job, Strategy
from planner.spec.plan import Estimate
from planner.spec.rules import ResolvedStrategy


class Policy(Protocol):
    """Decisions that a search asks for. A verdict is "fits" or "tight"; all sizes are in bytes."""

    def about(self, question: Question) -> Policy:
        """The same policy for another question: another machine, or fewer options set."""
        ...

    def strategies(self, job: Job, listed: Sequence[ResolvedStrategy]) -> Sequence[ResolvedStrategy]:
        """The strategies that may be searched: those listed, and others that only this policy's trainer does."""
        ...

    def candidates(self, job: Job, recorded: Sequence[ResolvedStrategy]) -> Sequence[ResolvedStrategy]:
        """The strategies to search, from those that have recordings; the order is kept."""
        ...

    def loss(self, job: Job, strategy: Strategy) -> int:
        """How much a strategy gives up, as `planner.search.cost.loss` counts it."""
        ...

    def may_swap(self, strategy: Strategy) -> bool:
        """Whether the search may set how many blocks are swapped under a strategy that allows it."""
        ...

    def swap_count(self, blocks: int, up: bool) -> int:
        """The number of swapped blocks nearest to ``blocks``, and no fewer (``up``) or no more, that may be answered
        with; 0 where there is none."""
        ...

    def may_checkpoint_partly(self, job: Job, strategy: Strategy) -> bool:
        """Whether the search may set how many blocks a strategy checkpoints, which `strategy` does in part."""
        ...

    def is_open(self, job: Job, strategy: Strategy) -> bool:
        """Whether a plan may be answered with; one that fits and is not open is passed over."""
        ...

    def exceeds_gpu(self, device_bytes: int, strategy: Strategy, verdict: str) -> bool:
        """Whether a plan that needs `device_bytes` on the GPU cannot reach a verdict ("fits" or "tight")."""
        ...

    def exceeds_ram(self, host_bytes: int) -> bool:
        """Whether `host_bytes` are more than the host's RAM."""
        ...

    def reaches(self, estimate: Estimate, verdict: str) -> bool:
        """Whether a replayed estimate's verdict is at least as good as `verdict`."""
        ...


class EstimatePolicy:
    """By estimate alone: every recorded strategy is a candidate, and the margin of the estimate decides what fits."""

    def __init__(self, question: Question) -> None:
        self.question = question

    def about(self, question: Question) -> Policy:
        """As for the first question."""
        return EstimatePolicy(question)

    def strategies(self, job: Job, listed: Sequence[ResolvedStrategy]) -> Sequence[ResolvedStrategy]:
        """Those listed: our trainer does no others."""
        return listed

    def candidates(self, job: Job, recorded: Sequence[ResolvedStrategy]) -> Sequence[ResolvedStrategy]:
        """All strategies that have recordings."""
        return recorded

    def loss(self, job: Job, strategy: Strategy) -> int:
        """Every lossy field."""
        return cost.loss(job, strategy)

    def may_swap(self, strategy: Strategy) -> bool:
        """Whether the idle expert is not kept whole on the GPU: our trainer swaps blocks of the running one only."""
        return self.question.job.experts != "both" or strategy.inactive_expert != "gpu"

    def swap_count(self, blocks: int, up: bool) -> int:
        """``blocks``: our trainer swaps any number."""
        return blocks

    def may_checkpoint_partly(self, job: Job, strategy: Strategy) -> bool:
        """Always true: the search may set the checkpointed blocks of any strategy."""
        return True

    def is_open(self, job: Job, strategy: Strategy) -> bool:
        """Always true: without probes any plan may be the answer."""
        return True

    def exceeds_gpu(self, device_bytes: int, strategy: Strategy, verdict: str) -> bool:
        """Whether the upper end of the margin (for "tight": the lower) is above the budget."""
        low, high = margin.interval(device_bytes, strategy.compile != "none", self.question.sides)
        return (high if verdict == "fits" else low) > self.question.budget_bytes

    def exceeds_ram(self, host_bytes: int) -> bool:
        """Whether `host_bytes` are more than the machine's host RAM; false when that is not known."""
        return host_bytes > (self.question.machine.host_ram or math.inf)

    def reaches(self, estimate: Estimate, verdict: str) -> bool:
        """Whether the estimate's own verdict is "fits", or the one asked for."""
        return estimate.verdict in ("fits", verdict)
