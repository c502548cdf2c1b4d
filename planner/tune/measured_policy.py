"""The policy of a search that measures: what its probes showed replaces the margin of the estimate."""

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
"""Probabilities of fitting. Once a plan is proved, faster ones are tried only at the first level. Until then the levels
are tried in turn; plans below the last are ruled out."""

PARTS = 8
"""Partial checkpointing is tried in eighths of the model: an eighth costs about 4 % of a step, and a probe has to
promise about that much."""

Key = tuple[Job, Strategy]
Applicable = Callable[[Job, Strategy], bool]
"""Whether the runner that measures can apply a strategy."""


class MeasuredPolicy:
    """Decides like `EstimatePolicy` until the first probe, then by an error model; from then on it also proposes
    partial checkpointing, beyond what `suggest` searches.

    Cached encoders need the least memory and no time in a step, so encoders are resident or swapped only when the user
    asked for it.
    """

    def __init__(self, question: Question, screen: Screen, applicable: Applicable) -> None:
        self.question = question
        self.error_model: ErrorModel | None = None
        """None before the first probe: the margin of the estimate applies, and only what `suggest` searches"""
        self.taken: Collection[Key] = ()
        """plans that were measured, or that another worker is measuring"""
        self.chance = CHANCES[0]
        """probability of fitting above which a plan counts as fitting"""
        self._screen = screen
        self._applicable = applicable
        self._applied: dict[Key, bool] = {}
        self._estimate_policy = EstimatePolicy(question)
        self._parts: dict[Key, list[ResolvedStrategy]] = {}

    def about(self, question: Question) -> MeasuredPolicy:
        """This policy for another question, with the same measurements."""
        other = MeasuredPolicy(question, self._screen, self._applicable)
        other.error_model, other.taken, other.chance = self.error_model, self.taken, self.chance
        return other

    def strategies(self, job: Job, listed: Sequence[ResolvedStrategy]) -> Sequence[ResolvedStrategy]:
        """All of ``listed``: our own trainer, which is the one measured, applies them all."""
        return listed

    def loss(self, job: Job, strategy: Strategy) -> int:
        """As `EstimatePolicy`."""
        return self._estimate_policy.loss(job, strategy)

    def candidates(self, job: Job, recorded: Sequence[ResolvedStrategy]) -> Sequence[ResolvedStrategy]:
        """The strategies that the runner can apply; after the first probe also their variants with partial
        checkpointing."""
        whole = [strategy for strategy in recorded if self._is_applied(job, strategy)]
        if self.error_model is None:
            return whole
        return whole + [part for strategy in whole for part in self._partly_checkpointed(job, strategy)]

    def _partly_checkpointed(self, job: Job, strategy: ResolvedStrategy) -> Sequence[ResolvedStrategy]:
        """Variants of a strategy that checkpoint only some blocks, if they can be estimated and applied."""
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
        """Whether a strategy contradicts nothing, and its two recordings can be combined."""
        try:
            refuse_contradictions(self.question.candidate(job, strategy))
            self._screen.floor_seconds(self.question.candidate(job, strategy))
        except VplanError:
            return False
        return True

    def _is_applied(self, job: Job, strategy: Strategy) -> bool:
        """Whether the runner can apply a strategy (cached)."""
        if (job, strategy) not in self._applied:
            self._applied[job, strategy] = self._applicable(job, strategy)
        return self._applied[job, strategy]

    def may_swap(self, strategy: Strategy) -> bool:
        """As `EstimatePolicy`, except that block swap is not combined with partial checkpointing."""
        return strategy.gradient_checkpointing != "partial" and self._estimate_policy.may_swap(strategy)

    def swap_count(self, blocks: int, up: bool) -> int:
        """``blocks`` unchanged: our trainer can swap any number."""
        return blocks

    def may_checkpoint_partly(self, job: Job, strategy: Strategy) -> bool:
        """Whether the runner applies it. False after the first probe, since `candidates` then adds the variants."""
        return self.error_model is None and self._is_applied(job, strategy)

    def is_open(self, job: Job, strategy: Strategy) -> bool:
        """Whether no worker has taken this plan yet."""
        return (job, strategy) not in self.taken

    def exceeds_gpu(self, device_bytes: int, strategy: Strategy, verdict: str) -> bool:
        """Whether `device_bytes` is ruled out: by measurements, or before the first one by the margin."""
        if self.error_model is None:
            return self._estimate_policy.exceeds_gpu(device_bytes, strategy, verdict)
        return device_bytes > self._limit(self.error_model)

    def exceeds_ram(self, host_bytes: int) -> bool:
        """Whether `host_bytes`, corrected by measurements, exceed the host's RAM."""
        ratio = self.error_model.host_ratio if self.error_model else 1.0
        return self._estimate_policy.exceeds_ram(int(host_bytes * ratio))

    def reaches(self, estimate: Estimate, verdict: str) -> bool:
        """Whether a replayed plan is likely enough to fit: by measurements, or before the first one by its verdict."""
        if self.error_model is None:
            return self._estimate_policy.reaches(estimate, verdict)
        return estimate.limit != "host" and estimate.peak.device_bytes <= self._limit(self.error_model)

    def _limit(self, error_model: ErrorModel) -> int:
        return error_model.limit(self.chance, self.question.budget_bytes)
