"""Which plan to measure next: the estimate proposes, every measurement corrects it, and no probe is spent on what
cannot fit or could not win.

Pure: a `Tuner` is told what was measured, in whatever order and by whomever, and answers with the next plan, or that
none is worth a probe. Storage, processes and the screen are elsewhere (`planner.tune.study`, `planner.commands.tune`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from planner.errors import VplanError
from planner.search.cost import loss
from planner.search.objectives import Objective, largest, largest_by
from planner.search.question import Question
from planner.search.screening import Look, Screen
from planner.search.search import Search
from planner.spec.job import SPLIT, Job, Strategy
from planner.spec.plan import Estimate, Measured
from planner.spec.rules import check
from planner.tune.error_model import Belief, FinishedProbe

WORTH_A_PROBE = 1.05
"""A plan is measured only when it is expected to beat the best by this much."""

CHANCES = (0.75, 0.5, 0.25, 0.1)
"""Of fitting. Where a plan that fits is known, a faster one is tried from the first on; where none is, less likely ones
in turn. What is less likely than the last is ruled out."""

PARTS = 8
"""Checkpointing of some blocks is tried in eighths of the model: one costs some 4 % of a step, which is what a probe
must be worth."""

Key = tuple[Job, Strategy]
Allowed = Callable[[Job, Strategy], bool]


class Learning(Search):
    """A search that believes what was measured, and looks at checkpointing of some blocks beside what others do.

    Cached encoders need least and cost no step any time, so none is resident or swapped unless the user typed it.
    """

    def __init__(self, question: Question, screen: Screen, allowed: Allowed) -> None:
        super().__init__(question, screen)
        self.belief: Belief | None = None
        """None: the estimate's own margin, and only what `suggest` looks at"""
        self.taken: Collection[Key] = ()
        """what is measured already, or by somebody else just now"""
        self.chance = CHANCES[0]
        """of fitting, from which a plan counts as one that does"""
        self._allowed = allowed
        self._all: dict[tuple[Job, bool], list[Strategy]] = {}

    def candidates(self, job: Job, lossy: bool | None = None) -> list[Strategy]:
        """As a search's, of those that the runner can apply."""
        key = job, self.belief is None
        if key not in self._all:
            found = [each for each in super().candidates(job) if self._allowed(job, each)]
            more = [] if self.belief is None else [part for each in found for part in self._partial(job, each)]
            self._all[key] = found + more
        return [each for each in self._all[key] if lossy is None or bool(each.lossy_fields(job)) == lossy]

    def _partial(self, job: Job, strategy: Strategy) -> Iterator[Strategy]:
        """The same with only some of the blocks checkpointed."""
        question, blocks = self.question, self.question.model.blocks
        free = "gradient_checkpointing" not in question.fixed
        if strategy.gradient_checkpointing != "full" or strategy.swap_blocks or not free:
            return
        for count in sorted({blocks * part // PARTS for part in range(1, PARTS)} - {0, blocks}):
            part = strategy.replace(gradient_checkpointing="partial", checkpointed_blocks=count)
            try:
                check(job, part, question.machine)
                self.screen.floor_seconds(job, part, question.machine)
            except VplanError:  # refused, or its two recordings cannot be put together: it is no candidate
                continue
            if self._allowed(job, part):
                yield part

    def most_in_ram(self, job: Job, strategy: Strategy) -> Strategy:
        """As a search's; blocks are checkpointed in part or swapped, not both."""
        return strategy if strategy.gradient_checkpointing == "partial" else super().most_in_ram(job, strategy)

    def by_speed(
        self,
        job: Job,
        lossy: bool | None,
        verdict: str = "fits",
        wanted: Callable[[Look], bool] = lambda look: True,
        below: Callable[[], float] = lambda: math.inf,
    ) -> Iterator[Estimate]:
        """As a search's, without what is taken."""
        return super().by_speed(
            job, lossy, verdict, lambda look: (job, look.strategy) not in self.taken and wanted(look), below
        )

    def over(self, device_bytes: int, strategy: Strategy, verdict: str) -> bool:
        """Whether measurements, or before the first the margin, rule this verdict out."""
        return super().over(device_bytes, strategy, verdict) if self.belief is None else device_bytes > self._limit()

    def lacks(self, host_bytes: int) -> bool:
        """Whether the host lacks the RAM, after what was measured."""
        return super().lacks(int(host_bytes * (self.belief.host_ratio if self.belief else 1.0)))

    def reaches(self, found: Estimate, verdict: str) -> bool:
        """Whether a replayed plan is likely enough to fit."""
        if self.belief is None:
            return super().reaches(found, verdict)
        return found.limit != "host" and found.peak.device_bytes <= self._limit()

    def _limit(self) -> int:
        assert self.belief is not None
        return self.belief.limit(self.chance, self.question.budget_bytes)


@dataclass(frozen=True)
class Goal:
    """What is wanted most: a wish (clips, batches, sizes) or, without one, speed alone."""

    wish: Objective | None = None

    def size(self, job: Job) -> int:
        """How much of the wish a job has."""
        return Objective.size(self.wish.read(job)) if self.wish else 0


class Tuner:
    """One search for the best plan that was measured."""

    def __init__(
        self, question: Question, screen: Screen, goal: Goal, allowed: Allowed = lambda job, way: True
    ) -> None:
        self.question = question
        self.goal = goal
        self.search = Learning(question, screen, allowed)
        self.seen: dict[Key, FinishedProbe] = {}

    def tell(self, job: Job, strategy: Strategy, measured: Measured) -> FinishedProbe | None:
        """A probe has finished, here or elsewhere. None where nothing is recorded of such a plan."""
        found = self.search.priced(job, strategy)
        if found is None:
            return None
        self.seen[job, strategy] = FinishedProbe(found, measured)
        self.search.belief = Belief(list(self.seen.values()))
        return self.seen[job, strategy]

    @property
    def best(self) -> FinishedProbe | None:
        """The best plan that was proved."""
        return min((each for each in self.seen.values() if each.proved), key=self._rank, default=None)

    def value(self, each: FinishedProbe) -> float:
        """What orders plans, less is better: what is lost, then the wish, then seconds (those estimated, if it did not
        run)."""
        lost, size, seconds = self._rank(each)
        return lost * 1e9 + size + (seconds / (1 + seconds) if self.goal.wish else seconds)

    def _rank(self, each: FinishedProbe) -> tuple[float, float, float]:
        lost = 0.0 if self.question.allow_lossy else float(loss(each.estimate.job, each.strategy))
        return lost, -self.goal.size(each.estimate.job), each.measured.step_seconds or each.estimate.step_seconds

    def next(self, running: Collection[Key] = ()) -> Estimate | None:
        """The plan to measure next, while others measure `running`; None when none is worth a probe."""
        self.search.taken = {*self.seen, *running}
        if not self.seen:
            first = self._suggested()
            if first is None or (first.job, first.strategy) not in self.search.taken:
                return first
            self.search.belief = Belief([])
        best = self.best
        for lossy in (None,) if self.question.allow_lossy else (False, True):
            if best is not None and not self.question.allow_lossy and lossy and not best.estimate.lossy:
                return None
            found = self._first(lossy) if best is None else self._better(best, lossy)
            if found is not None:
                return found
        return None

    def _suggested(self) -> Estimate | None:
        """What `suggest` says."""
        job = self.question.job
        found = largest(self.search, self.goal.wish, False) if self.goal.wish else self.search.best(job, False)
        return found.plan if found else None

    def _first(self, lossy: bool | None) -> Estimate | None:
        """The best plan to expect where none has run yet."""
        job, wish = self.question.job, self.goal.wish
        for chance in CHANCES:
            self.search.chance = chance
            found = largest_by(self.search, job, wish, lossy) if wish else next(self.search.by_speed(job, lossy), None)
            if found is not None:
                return found
        return None

    def _better(self, best: FinishedProbe, lossy: bool | None) -> Estimate | None:
        """The best plan that is likely to fit and to beat the best one by enough."""
        self.search.chance = CHANCES[0]
        if self.goal.wish:
            found = largest_by(self.search, self.question.job, self.goal.wish, lossy)
            if found and self.goal.size(found.job) >= WORTH_A_PROBE * self.goal.size(best.estimate.job):
                return found
        belief = self.search.belief
        seconds = best.measured.step_seconds
        assert belief is not None and seconds is not None
        lost = self._rank(best)[0]
        for found in self.search.by_speed(best.estimate.job, lossy):
            if not self.question.allow_lossy and loss(found.job, found.strategy) > lost:
                return None
            if found.strategy.sharding in SPLIT and best.strategy.sharding not in SPLIT:
                return None  # speed is no reason to change engines, see `Search.by_speed`; what follows splits as well
            if belief.soonest(found.step_seconds) * WORTH_A_PROBE > seconds:
                return None
            if belief.seconds(found.strategy, found.step_seconds) * WORTH_A_PROBE <= seconds:
                return found
        return None

    # ---- the answer

    def answer(self, best: FinishedProbe) -> Estimate:
        """The estimate of a plan with what was measured in its place. The phases are the estimate's still."""
        found, measured = best.estimate, best.measured
        device = measured.device_bytes
        changes: dict[str, object] = {"verdict": "fits", "limit": None, "basis": "measured"}
        if device is not None:
            changes |= {"low_bytes": device, "high_bytes": device}
        if measured.step_seconds is not None:
            changes |= {"step_seconds": measured.step_seconds, "step_seconds_high": None}
        return found.replace(**changes)

    def runners_up(self, best: FinishedProbe, most: int = 3) -> tuple[Estimate, ...]:
        """Other plans that were proved, the best first, then what is next by estimate with less memory."""
        proved = sorted((each for each in self.seen.values() if each.proved and each is not best), key=self._rank)
        self.search.taken, self.search.chance = set(self.seen), CHANCES[0]
        others = map(self._nearby, self.search.runners_up(best.estimate))
        return (*map(self.answer, proved), *others)[:most]

    def _nearby(self, found: Estimate) -> Estimate:
        """A plan that was not measured, with its speed as far from the estimate as its neighbour's."""
        assert self.search.belief is not None
        seconds = self.search.belief.seconds(found.strategy, found.step_seconds)
        return found.replace(step_seconds=seconds, step_seconds_high=None, basis="nearby")

    def tightest(self) -> Estimate:
        """The plan that needs least, where none is to be proved."""
        found = self.search.tightest(self.question.job)
        if found is None:
            raise self.search.missing or VplanError("no strategy to look at", "type fewer switches")
        belief = self.search.belief
        if belief and found.peak.device_bytes > belief.limit(CHANCES[-1], self.question.budget_bytes):
            # whatever was estimated, what ran out rules it out
            return found.replace(verdict="no", limit=found.limit or "gpu")
        return found
