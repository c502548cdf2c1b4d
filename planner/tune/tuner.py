"""Which plan to measure next: the estimate proposes, every measurement corrects it, and no probe is spent on a plan
that cannot fit or could not win.

This module does no I/O: a `Tuner` is told measurements, in any order and from any worker, and answers with the next
plan, or None when none is worth a probe. `planner.tune.study` stores, `planner.tune.worker` measures.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from planner.errors import VplanError
from planner.search.cost import loss
from planner.search.objectives.largest import largest, largest_by
from planner.search.objectives.objective import Objective
from planner.search.question import Question
from planner.search.screening import Screen
from planner.search.search import Search
from planner.spec.job import SPLIT, Job
from planner.spec.plan import Estimate, Measured
from planner.spec.rules import ResolvedStrategy
from planner.tune.error_model import ErrorModel, FinishedProbe
from planner.tune.measured_policy import CHANCES, Applicable, Key, MeasuredPolicy

WORTH_A_PROBE = 1.05
"""A plan is measured only if it is expected to beat the best one by this factor."""


@dataclass(frozen=True)
class Goal:
    """What a search maximises: an objective (frames, batch, resolution), or without one the speed alone."""

    objective: Objective | None = None

    def size(self, job: Job) -> int:
        """The job's value of the objective, as a number; 0 without an objective."""
        return Objective.size(self.objective.read(job)) if self.objective else 0


class Tuner:
    """One search for the best plan that a measurement, or a rehearsal, has proved."""

    def __init__(
        self,
        question: Question,
        screen: Screen,
        goal: Goal,
        applicable: Applicable = lambda job, strategy: True,
        basis: Literal["rehearsed", "measured"] = "measured",
    ) -> None:
        """``basis``: whether probes are measured or rehearsed. A rehearsal has no seconds, so the estimated ones
        count."""
        self.question = question
        self.basis = basis
        self.goal = goal
        self.policy = MeasuredPolicy(question, screen, applicable)
        self.search = Search(question, screen, self.policy)
        self.finished: dict[Key, FinishedProbe] = {}

    def tell(self, job: Job, strategy: ResolvedStrategy, measured: Measured) -> FinishedProbe | None:
        """Records a finished probe of this or another worker. None when no recording covers the plan."""
        estimate = self.search.try_estimate(job, strategy)
        if estimate is None:
            return None
        self.finished[job, strategy] = FinishedProbe(estimate, measured)
        self.policy.error_model = ErrorModel(list(self.finished.values()))
        return self.finished[job, strategy]

    @property
    def best(self) -> FinishedProbe | None:
        """The best finished probe whose plan is proved; None when there is none."""
        return min((probe for probe in self.finished.values() if probe.proved), key=self._rank, default=None)

    def value(self, probe: FinishedProbe) -> float:
        """The plan's rank as one number, lower is better: loss first, then the objective, then seconds per step
        (estimated ones if it was not timed)."""
        lost, size, seconds = self._rank(probe)
        return lost * 1e9 + size + (seconds / (1 + seconds) if self.goal.objective else seconds)

    def _rank(self, probe: FinishedProbe) -> tuple[float, float, float]:
        lost = 0.0 if self.question.allow_lossy else float(loss(probe.estimate.job, probe.strategy))
        return lost, -self.goal.size(probe.estimate.job), probe.measured.step_seconds or probe.estimate.step_seconds

    def next(self, running: Collection[Key] = ()) -> Estimate | None:
        """The plan to measure next, while others measure `running`; None when none is worth a probe."""
        self.policy.taken = {*self.finished, *running}
        if not self.finished:
            first = self._suggested()
            if first is None or (first.job, first.strategy) not in self.policy.taken:
                return first
            self.policy.error_model = ErrorModel([])
        best = self.best
        for lossy in (None,) if self.question.allow_lossy else (False, True):
            if best is not None and not self.question.allow_lossy and lossy and not best.estimate.lossy:
                return None
            estimate = self._first(lossy) if best is None else self._better(best, lossy)
            if estimate is not None:
                return estimate
        return None

    def _suggested(self) -> Estimate | None:
        """What `suggest` says."""
        job = self.question.job
        objective = self.goal.objective
        suggestion = largest(self.search, objective, False) if objective else self.search.best(job, False)
        return suggestion.plan if suggestion else None

    def _first(self, lossy: bool | None) -> Estimate | None:
        """The best plan to expect where none has run yet."""
        job, objective = self.question.job, self.goal.objective
        for chance in CHANCES:
            self.policy.chance = chance
            by_speed = self.search.by_speed(job, lossy)
            plan = largest_by(self.search, job, objective, lossy) if objective else next(by_speed, None)
            if plan is not None:
                return plan
        return None

    def _better(self, best: FinishedProbe, lossy: bool | None) -> Estimate | None:
        """The best plan that is likely to fit and to beat the best one by enough."""
        self.policy.chance = CHANCES[0]
        if self.goal.objective:
            estimate = largest_by(self.search, self.question.job, self.goal.objective, lossy)
            if estimate and self.goal.size(estimate.job) >= WORTH_A_PROBE * self.goal.size(best.estimate.job):
                return estimate
        error_model = self.policy.error_model
        seconds = best.measured.step_seconds or best.estimate.step_seconds
        assert error_model is not None
        lost = self._rank(best)[0]
        for estimate in self.search.by_speed(best.estimate.job, lossy):
            if not self.question.allow_lossy and loss(estimate.job, estimate.strategy) > lost:
                return None
            if estimate.strategy.sharding in SPLIT and best.strategy.sharding not in SPLIT:
                return None  # speed alone does not justify sharding (see `Search.by_speed`), and all that follow shard
            if error_model.soonest(estimate.step_seconds) * WORTH_A_PROBE > seconds:
                return None
            if error_model.seconds(estimate.strategy, estimate.step_seconds) * WORTH_A_PROBE <= seconds:
                return estimate
        return None

    # ---- the answer

    def answer(self, best: FinishedProbe) -> Estimate:
        """The estimate of a plan, with its measured bytes and seconds. The phases are still estimates."""
        estimate, measured = best.estimate, best.measured
        device = measured.device_bytes
        changes: dict[str, object] = {"verdict": "fits", "limit": None, "basis": self.basis}
        if device is not None:
            changes |= {"low_bytes": device, "high_bytes": device}
        if measured.step_seconds is not None:
            changes |= {"step_seconds": measured.step_seconds, "step_seconds_high": None}
        return estimate.replace(**changes)

    def runners_up(self, best: FinishedProbe, most: int = 3) -> tuple[Estimate, ...]:
        """Other proved plans, best first, followed by the plans that come next by estimate with less memory."""
        others_proved = (probe for probe in self.finished.values() if probe.proved and probe is not best)
        proved = sorted(others_proved, key=self._rank)
        self.policy.taken, self.policy.chance = set(self.finished), CHANCES[0]
        others = map(self._nearby, self.search.runners_up(best.estimate))
        return (*map(self.answer, proved), *others)[:most]

    def _nearby(self, estimate: Estimate) -> Estimate:
        """An unmeasured plan, its seconds corrected by the error of the most similar plan that ran."""
        assert self.policy.error_model is not None
        if not self.policy.error_model.ran:
            return estimate
        seconds = self.policy.error_model.seconds(estimate.strategy, estimate.step_seconds)
        return estimate.replace(step_seconds=seconds, step_seconds_high=None, basis="nearby")

    def tightest(self) -> Estimate:
        """The estimate of the plan that needs least memory, for when no plan can be proved. Raises a VplanError when no
        valid strategy is left."""
        estimate = self.search.tightest(self.question.job, flushes=False)
        if estimate is None:
            raise self.search.missing or VplanError("no valid strategy left", "remove some options")
        error_model = self.policy.error_model
        if error_model and estimate.peak.device_bytes > error_model.limit(CHANCES[-1], self.question.budget_bytes):
            # the probes that ran out of memory rule it out, whatever the estimate says
            return estimate.replace(verdict="no", limit=estimate.limit or "gpu")
        return estimate
