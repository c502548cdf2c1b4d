"""The loop of one worker in a search that measures: take a waiting plan or propose one, measure it, tell the study.

A measurement is written to the ledger before the study is told. If the worker dies in between, nothing is lost: the
next worker finds the plan still taken, and its row in the ledger.
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
"""Interval between two checks on the other workers."""

MEMORY, FAILED = "missing GiB", "failed"
"""Names of the constraints; a trial is feasible when neither is above 0."""

FAILURES = 3
"""A search stops after this many consecutive probes that failed for a reason other than memory: the cause is then the
machine, not the plans."""

TIME_LIMIT = 900.0
"""Smallest time limit of a probe, in seconds."""
START_SECONDS = 300.0
"""Allowance for imports, building the model and the first step."""
SLOWER = 3.0
"""Factor by which a step may be slower than estimated before its probe is ended."""

NOTHING = "nothing fits by estimate, so nothing was measured"

Watch = Callable[["Tuning", str], None]
"""Called at every change, with a description of what happens next."""


@dataclass(frozen=True)
class Limits:
    """The limits of a search."""

    probes: int
    """of the whole study, including those of other workers and earlier sessions"""
    seconds: float
    """of this worker"""
    steps: int
    """steady steps of one probe"""
    time_limit: float | None
    """seconds of one probe; None: derived from the estimated step"""


@dataclass
class Tuning:
    """One worker of a study: it proposes plans, measures them and records the results."""

    tuner: Tuner
    study: Study
    runner: Runner
    ledger: Ledger
    limits: Limits
    setup: Setup | None = None
    """hardware and software this worker measures on; ledger rows from the same setup count as measured"""
    trainer: str = "vplan"
    trials: list[StudyTrial] = field(default_factory=list)
    rows: dict[str, ProbeRow] = field(default_factory=dict)
    """measurements for this question, by row ID"""
    probes: list[ProbeRow] = field(default_factory=list)
    """measurements made by this study, in order"""

    def run(self, watch: Watch) -> str:
        """Searches until a limit is reached or nothing is left to try; returns the reason as a phrase."""
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
            if self.study.being_taken:  # its worker may be dead, and then that plan itself is the one to measure
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
        """The plan of an estimate, without the estimate itself."""
        return Plan.under(estimate.configuration, self.trainer)

    def _time_limit(self, plan: Plan) -> float:
        """Seconds the probe of a plan may take."""
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
            self.study.give_up(taken)  # other workers have taken the remaining probes
            return
        watch(self, "measuring")
        try:
            limit = self._time_limit(taken.plan)
            row = self.runner.run(
                taken.plan, steps=self.limits.steps, time_limit=limit, encode=self._encodes(taken.plan)
            )
            self.ledger.append(row)
        except (KeyboardInterrupt, VplanError):  # e.g. a missing package or a full disk: other workers may succeed
            self.study.give_up(taken)
            raise
        self.rows[row_id(taken.plan)] = row  # with its details (message, log path), which the study does not store
        self._tell(taken, row)
        self._learn()
        watch(self, "choosing")

    def _encodes(self, plan: Plan) -> bool:
        """Whether the plan's memory peak is in encoding, before training: then probing steps alone proves nothing."""
        estimate = self.tuner.search.try_estimate(plan.job, plan.configuration.strategy)
        return estimate is not None and estimate.peak.phase == "encode"

    def _tell(self, taken: Taken, row: ProbeRow) -> None:
        self.study.tell(taken, row, self._result(taken.plan, row))

    def _result(self, plan: Plan, row: ProbeRow) -> Result:
        """The study's value and constraints of a row. When no recording covers the plan, the value is its seconds."""
        seen = self.tuner.tell(plan.job, plan.configuration.strategy, row.measured)
        if seen is None:
            return Result(row.measured.step_seconds or 0.0, {MEMORY: 0.0, FAILED: float(row.measured.outcome != "ok")})
        return Result(self.tuner.value(seen), {MEMORY: missing(seen), FAILED: float(failed(row))})

    def _learn(self) -> None:
        """Reads the measurements of other workers and earlier sessions from the study."""
        self.trials = self.study.trials()
        for trial in self.trials:
            name = row_id(trial.plan)
            if trial.row is not None and name not in self.rows:
                self.rows[name] = trial.row
                self.tuner.tell(trial.plan.job, trial.plan.configuration.strategy, trial.row.measured)
        self.probes = [self.rows[row_id(trial.plan)] for trial in self.trials if trial.row and not trial.from_ledger]

    def _seed(self) -> None:
        """Adds the ledger's measurements of this question, made on the same setup, to the study."""
        if self.setup is None:
            return
        in_study = {row_id(trial.plan) for trial in self.trials}
        for row in self.ledger.rows():
            machine = self.tuner.question.machine
            plan = Plan(job=row.job, strategy=row.strategy, machine=machine, trainer=self.trainer)
            here = row.runner == self.runner.name and Setup.of(row.env) == self.setup and row.id == row_id(plan)
            # A failure is not taken over: its cause may have been removed since.
            if here and row.id not in in_study and not failed(row) and self._is_asked(plan):
                in_study.add(row.id)
                self.study.add(plan, row, self._result(plan, row))

    def _is_asked(self, plan: Plan) -> bool:
        """Whether a plan is an answer to the question: it differs only in what the search may choose."""
        question, objective = self.tuner.question, self.tuner.goal.objective
        searched = {name: getattr(question.job, name) for name in (objective.fields if objective else ())}
        typed = question.strategy.model_fields_set.intersection(question.fixed)
        return plan.job.replace(**searched) == question.job and all(
            getattr(plan.strategy, name) == getattr(question.strategy, name) for name in typed
        )

    def _tidy(self) -> None:
        """Tells or gives up the plans of dead workers."""
        for taken in self.study.abandoned():
            found = self.ledger.find(taken.plan, self.setup, self.runner.name)
            rows = [row for row in found if not failed(row)]  # a failed one may belong to an earlier study
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


def missing(probe: FinishedProbe) -> float:
    """GiB of device memory or host RAM a plan is short of, as far as is known; negative if it has some to spare."""
    if probe.measured.outcome == "host-oom":
        ram = probe.estimate.machine.host_ram or 0
        return max(probe.estimate.host_ram_bytes - ram, 2**20) / GIB
    return probe.excess_bytes / GIB
