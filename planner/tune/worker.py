"""One worker's turn after turn of a search that measures: take a plan that waits, or propose one; measure; tell.

A measurement is in the ledger before the study hears of it, so whatever dies between, nothing that finished is lost:
who goes on finds the plan taken and its row in the ledger.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from planner.catalog.plan_id import row_id
from planner.errors import VplanError
from planner.evidence.ledger import Ledger
from planner.evidence.measurement import ProbeRow, Setup
from planner.probe.runner import Runner
from planner.spec.plan import Estimate, Plan
from planner.tune.error_model import FinishedProbe
from planner.tune.study import Result, Study, StudyTrial, Taken
from planner.tune.tuner import Tuner
from planner.units import GIB

POLL_SECONDS = 0.5
"""Between two looks at what other workers measure."""

MEMORY, FAILED = "missing GiB", "failed"
"""Constraints: a trial is feasible where neither is above 0."""

FAILURES = 3
"""Probes in a row that ended for another reason than memory, after which a search stops: it is not the plans."""

TIME_LIMIT = 900.0
"""Seconds of a probe, unless its steps take longer."""
START_SECONDS = 300.0
"""Imports, building the model, the first step."""
SLOWER = 3.0
"""How much slower than estimated a step may be before its probe is ended."""

NOTHING = "nothing fits by estimate, so nothing was measured"

Watch = Callable[["Tuning", str], None]
"""Called at every change, with what happens next in words."""


@dataclass(frozen=True)
class Limits:
    """The limits of a search: probes of the whole study, seconds of this worker, and steady steps of one probe."""

    probes: int
    """of the whole study, those of other workers and of earlier days included"""
    seconds: float
    """of this worker"""
    steps: int
    """steady steps of one probe"""
    time_limit: float | None
    """seconds of one probe; None: by what is estimated"""


@dataclass
class Tuning:
    """One worker of a study: it proposes plans, measures them and records the results."""

    tuner: Tuner
    study: Study
    runner: Runner
    ledger: Ledger
    limits: Limits
    setup: Setup | None = None
    """on what this worker measures; rows of the ledger taken on the same count as measured"""
    trainer: str = "vplan"
    trials: list[StudyTrial] = field(default_factory=list)
    rows: dict[str, ProbeRow] = field(default_factory=dict)
    """what was measured of this question, by plan"""
    probes: list[ProbeRow] = field(default_factory=list)
    """what this study measured, in order"""

    def run(self, watch: Watch) -> str:
        """Searches until a limit or the end; returns why it ended, in words. ``watch`` is told what happens."""
        began = time.monotonic()
        self._learn()
        self._seed()
        while True:
            self._tidy()
            self._learn()
            if self._failing():
                return f"the last {FAILURES} probes failed for another reason than memory"
            if len(self.probes) >= self.limits.probes:
                return f"{len(self.probes)} probes were allowed"
            if time.monotonic() - began > self.limits.seconds:
                return f"{self.limits.seconds / 60:g} minutes were allowed"
            if self.study.waiting:
                self._measure(watch)
                continue
            if self.study.being_taken:  # what is chosen meanwhile would be another plan than its own result asks for
                time.sleep(POLL_SECONDS)
                continue
            running = [trial.plan for trial in self.trials if trial.row is None]
            estimate = self.tuner.next([(plan.job, plan.strategy) for plan in running])
            if estimate is not None and len(self.probes) + len(running) < self.limits.probes:
                self.study.propose(self._plan(estimate))
            elif running:
                watch(self, "waiting for other workers' probes")
                time.sleep(POLL_SECONDS)
            else:
                better = "no other plan is expected to be 5 % better"
                return better if self.tuner.best else "no plan that could fit is left" if self.trials else NOTHING

    def _plan(self, estimate: Estimate) -> Plan:
        """The records of a plan, without what is expected of it."""
        return Plan.under(estimate.configuration, self.trainer)

    def _time_limit(self, plan: Plan) -> float:
        """Seconds that a probe of a plan may take."""
        if self.limits.time_limit is not None:
            return self.limits.time_limit
        estimate = self.tuner.search.try_estimate(plan.job, plan.configuration.strategy)
        step = (estimate.step_seconds_high or estimate.step_seconds) if estimate else 0.0
        return max(TIME_LIMIT, START_SECONDS + SLOWER * step * (self.limits.steps + 3))

    def _measure(self, watch: Watch) -> None:
        taken = self.study.take(self._time_limit)
        if taken is None:
            return
        earlier = (trial for trial in self.study.trials() if trial.number < taken.number)
        if sum(not trial.from_ledger for trial in earlier) >= self.limits.probes:
            self.study.give_up(taken)  # more workers than probes are left
            return
        watch(self, "measuring")
        try:
            limit = self._time_limit(taken.plan)
            row = self.runner.run(
                taken.plan, steps=self.limits.steps, time_limit=limit, encode=self._encodes(taken.plan)
            )
            self.ledger.append(row)
        except (KeyboardInterrupt, VplanError):  # a plan that cannot run here, a full disk: it is others' to measure
            self.study.give_up(taken)
            raise
        self.rows[row_id(taken.plan)] = row  # the study's has no details: what was said, and where the log is
        self._tell(taken, row)
        self._learn()
        watch(self, "choosing")

    def _encodes(self, plan: Plan) -> bool:
        """Whether what is cached before training decides if a plan fits: then steps alone would prove nothing."""
        estimate = self.tuner.search.try_estimate(plan.job, plan.configuration.strategy)
        return estimate is not None and estimate.peak.phase == "encode"

    def _tell(self, taken: Taken, row: ProbeRow) -> None:
        self.study.tell(taken, row, self._result(taken.plan, row))

    def _result(self, plan: Plan, row: ProbeRow) -> Result:
        """What a row is worth to the study. Where nothing is recorded of a plan, its value is its seconds alone."""
        seen = self.tuner.tell(plan.job, plan.configuration.strategy, row.measured)
        if seen is None:
            return Result(row.measured.step_seconds or 0.0, {MEMORY: 0.0, FAILED: float(row.measured.outcome != "ok")})
        return Result(self.tuner.value(seen), {MEMORY: missing(seen), FAILED: float(failed(row))})

    def _learn(self) -> None:
        """Takes in what others, and earlier days, have put into the study."""
        self.trials = self.study.trials()
        for trial in self.trials:
            name = row_id(trial.plan)
            if trial.row is not None and name not in self.rows:
                self.rows[name] = trial.row
                self.tuner.tell(trial.plan.job, trial.plan.configuration.strategy, trial.row.measured)
        self.probes = [self.rows[row_id(trial.plan)] for trial in self.trials if trial.row and not trial.from_ledger]

    def _seed(self) -> None:
        """Adds what the ledger knows of this question, measured where we measure, to the study."""
        question, fixed = self.tuner.question, self.tuner.question.fixed
        objective = self.tuner.goal.objective
        free = objective.fields if objective else ()
        in_study = {row_id(trial.plan) for trial in self.trials}
        for row in self.ledger.rows() if self.setup else ():
            plan = Plan(job=row.job, strategy=row.strategy, machine=question.machine, trainer=self.trainer)
            same = {name: getattr(question.job, name) for name in free}
            typed = [name for name in fixed if name in question.strategy.model_fields_set]
            if (
                row.runner == self.runner.name
                and row.job.replace(**same) == question.job
                and all(getattr(row.strategy, name) == getattr(question.strategy, name) for name in typed)
                and Setup.of(row.env) == self.setup
                and row.id == row_id(plan)
                and row.id not in in_study
                and not failed(row)  # its cause may be mended
            ):
                in_study.add(row.id)
                self.study.add(plan, row, self._result(plan, row))

    def _tidy(self) -> None:
        """Tells or gives up the plans of workers that died."""
        for taken in self.study.abandoned():
            found = self.ledger.find(taken.plan, self.setup, self.runner.name)
            rows = [row for row in found if not failed(row)]  # one that failed may be of an earlier study
            if rows:
                self._tell(taken, rows[-1])
            else:
                self.study.give_up(taken)

    def _failing(self) -> bool:
        last = self.probes[-FAILURES:]
        return len(last) == FAILURES and all(map(failed, last))


def failed(row: ProbeRow) -> bool:
    """Whether a probe ended for a reason other than memory: crash, timeout or NaN."""
    return row.measured.outcome in ("crash", "timeout", "nan")


def missing(seen: FinishedProbe) -> float:
    """GiB of device memory or host RAM that a plan is short of, as far as is known."""
    if seen.measured.outcome == "host-oom":
        ram = seen.estimate.machine.host_ram or 0
        return max(seen.estimate.host_ram_bytes - ram, 2**20) / GIB
    return seen.excess_bytes / GIB
