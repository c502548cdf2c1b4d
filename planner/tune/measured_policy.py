"""How a search that measures decides: by what its probes have shown, not by the margin of the estimate."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from planner.errors import VplanError
from planner.search.policy import EstimatePolicy
from planner.search.question import Question
from planner.search.screening import Screen
from planner.spec.combinations.contradictions import refuse_contradictions
from planner.spec.job import Job, Strategy
from planner.spec.plan import Estimate
from planner.spec.rules import ResolvedStrategy
from planner.tune.error_model import ErrorModel

CHANCES = (0.75, 0.5, 0.25, 0.1)
"""Of fitting. Where a plan that fits is known, a faster one is tried from the first on; where none is, less likely ones
in turn. What is less likely than the last is ruled out."""

PARTS = 8
"""Checkpointing of some blocks is tried in eighths of the model: one costs some 4 % of a step, which is what a probe
must be worth."""

Key = tuple[Job, Strategy]
Applicable = Callable[[Job, Strategy], bool]
"""Whether the runner that measures can apply a strategy."""


class MeasuredPolicy:
    """Until the first probe as `EstimatePolicy`; then by an error model, and with checkpointing of some blocks beside
    what `suggest` searches.

    Cached encoders need least and cost no step any time, so none is resident or swapped unless the user typed it.
    """

    def __init__(self, question: Question, screen: Screen, applicable: Applicable) -> None:
        self.question = question
        self.error_model: ErrorModel | None = None
        """None: the estimate's own margin, and only what `suggest` searches"""
        self.taken: Collection[Key] = ()
        """what is measured already, or by somebody else just now"""
        self.chance = CHANCES[0]
        """of fitting, from which a plan counts as one that does"""
        self._screen = screen
        self._applicable = applicable
        self._applied: dict[Key, bool] = {}
        self._estimate_policy = EstimatePolicy(question)
        self._parts: dict[Key, list[ResolvedStrategy]] = {}

    def about(self, question: Question) -> MeasuredPolicy:
        """With the same measurements."""
        other = MeasuredPolicy(question, self._screen, self._applicable)
        other.error_model, other.taken, other.chance = self.error_model, self.taken, self.chance
        return other

    def strategies(self, job: Job, listed: Sequence[ResolvedStrategy]) -> Sequence[ResolvedStrategy]:
        """Those listed: what is measured is our trainer."""
        return listed

    def loss(self, job: Job, strategy: Strategy) -> int:
        """Every lossy field."""
        return self._estimate_policy.loss(job, strategy)

    def candidates(self, job: Job, recorded: Sequence[ResolvedStrategy]) -> Sequence[ResolvedStrategy]:
        """The strategies that the runner can apply; after the first measurements also with partial checkpointing."""
        whole = [strategy for strategy in recorded if self._is_applied(job, strategy)]
        if self.error_model is None:
            return whole
        return whole + [part for strategy in whole for part in self._partly_checkpointed(job, strategy)]

    def _partly_checkpointed(self, job: Job, strategy: ResolvedStrategy) -> Sequence[ResolvedStrategy]:
        """The same with only some of the blocks checkpointed, as far as that can be estimated and applied."""
        if (job, strategy) not in self._parts:
            parts = (part for part in self._parts_of(strategy) if self._is_estimated(job, part))
            self._parts[job, strategy] = [part for part in parts if self._is_applied(job, part)]
        return self._parts[job, strategy]

    def _parts_of(self, strategy: ResolvedStrategy) -> Iterator[ResolvedStrategy]:
        blocks = self.question.model.blocks
        typed = "gradient_checkpointing" in self.question.fixed
        if strategy.gradient_checkpointing != "full" or strategy.swap_blocks or typed:
            return
        for count in sorted({blocks * part // PARTS for part in range(1, PARTS)} - {0, blocks}):
            yield strategy.replace(gradient_checkpointing="partial", checkpointed_blocks=count)

    def _is_estimated(self, job: Job, strategy: ResolvedStrategy) -> bool:
        """Whether nothing forbids a strategy, and its two recordings can be put together."""
        try:
            refuse_contradictions(self.question.candidate(job, strategy))
            self._screen.floor_seconds(self.question.candidate(job, strategy))
        except VplanError:
            return False
        return True

    def _is_applied(self, job: Job, strategy: Strategy) -> bool:
        """Whether the runner can apply a strategy, asked once."""
        if (job, strategy) not in self._applied:
            self._applied[job, strategy] = self._applicable(job, strategy)
        return self._applied[job, strategy]

    def may_swap(self, strategy: Strategy) -> bool:
        """As by estimate; and only where it does not checkpoint in part: blocks are checkpointed so or swapped."""
        return strategy.gradient_checkpointing != "partial" and self._estimate_policy.may_swap(strategy)

    def swap_count(self, blocks: int, up: bool) -> int:
        """``blocks``: our trainer swaps any number."""
        return blocks

    def may_checkpoint_partly(self, job: Job, strategy: Strategy) -> bool:
        """Whether the runner applies it, before the first measurement; `candidates` has parts of its own then."""
        return self.error_model is None and self._is_applied(job, strategy)

    def is_open(self, job: Job, strategy: Strategy) -> bool:
        """Whether no worker has taken this plan yet."""
        return (job, strategy) not in self.taken

    def exceeds_gpu(self, device_bytes: int, strategy: Strategy, verdict: str) -> bool:
        """Whether measurements, or before the first the margin, rule this verdict out."""
        if self.error_model is None:
            return self._estimate_policy.exceeds_gpu(device_bytes, strategy, verdict)
        return device_bytes > self._limit(self.error_model)

    def exceeds_ram(self, host_bytes: int) -> bool:
        """Whether `host_bytes`, corrected by what was measured, are more than the host's RAM."""
        ratio = self.error_model.host_ratio if self.error_model else 1.0
        return self._estimate_policy.exceeds_ram(int(host_bytes * ratio))

    def reaches(self, estimate: Estimate, verdict: str) -> bool:
        """Whether a replayed plan is likely enough to fit, by what was measured; by its verdict before the first
        measurement."""
        if self.error_model is None:
            return self._estimate_policy.reaches(estimate, verdict)
        return estimate.limit != "host" and estimate.peak.device_bytes <= self._limit(self.error_model)

    def _limit(self, error_model: ErrorModel) -> int:
        return error_model.limit(self.chance, self.question.budget_bytes)
