"""The state of a search that measures: an Optuna study, so that the search can be resumed and shared by several
workers, on one node or many.

Every plan worth a probe is enqueued as a waiting trial; `ask` hands it to one worker. When two workers propose the same
plan at once, the trial with the lower number counts and the other is dropped unmeasured. Running out of memory
completes a trial, with the excess as a constraint; it is not a failed trial.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import psutil

from planner.catalog.plan_id import row_id
from planner.errors import VplanError, quoted
from planner.evidence.measurement import ProbeRow
from planner.schema import choices
from planner.search.space import SAMPLED, SEARCHED
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Plan
from planner.tune.storage import import_optuna, open_storage, plain_errors, quoted_storage

GRACE_SECONDS = 60.0
"""Time beyond a probe's limit, for starting and ending processes, before its worker counts as dead."""

TAKING_SECONDS = 5.0
"""Longest time between taking a trial and writing the worker's name to it: two calls of a storage that responds."""

DIGEST, PLAN, ROW, WORKER, KNOWN, QUESTION = "digest", "plan", "row", "worker", "known", "question"
"""Attributes of trials and studies."""

PARTS = ("job", "strategy", "machine")
SHAPE = ("frames", "height", "width", "batch_size")
COUNTS = ("swap_blocks", "checkpointed_blocks", "fsdp_replicas")

LARGEST = 100_000
"""Upper bound of the integer parameters."""


@dataclass(frozen=True)
class Taken:
    """A plan this worker has reserved for measuring."""

    trial: Any
    number: int
    plan: Plan


@dataclass(frozen=True)
class Result:
    """How the study ranks a measurement."""

    value: float
    """lower is better"""
    constraints: Mapping[str, float]
    """the plan is proved when none is above 0"""


@dataclass(frozen=True)
class StudyTrial:
    """A plan of the study: its trial's number, and its row once it is measured."""

    number: int
    plan: Plan
    row: ProbeRow | None
    from_ledger: bool
    """whether the row was in a ledger before the study began"""


class Study:
    """The Optuna study of one question in a storage. Every method raises a VplanError when the storage fails."""

    def __init__(self, storage: str, name: str, question: Mapping[str, Any]) -> None:
        """`storage`: a database URL, or the path of a journal file; `question`: what all its trials share. Raises a
        VplanError when the study exists and answers another question."""
        self.storage = storage
        self.name = name
        self._optuna = import_optuna()
        self._nameless: dict[int, float] = {}
        """trial number -> when (`time.monotonic`) it was first seen running without a worker's name"""
        with self._answering():
            self._study = self._optuna.create_study(
                storage=open_storage(self._optuna, storage),
                study_name=name,
                load_if_exists=True,
                sampler=self._optuna.samplers.RandomSampler(seed=0),  # never asked: every trial is proposed
            )
            known = self._study.user_attrs.get(QUESTION)
            if known is None:
                self._study.set_user_attr(QUESTION, json.loads(json.dumps(question)))
                known = question
        others = [field for field in question if known.get(field) != json.loads(json.dumps(question[field]))]
        if others:
            fault = f"is of another question: other {' and '.join(others)}"
            raise VplanError(
                f"study {quoted(name)} in {quoted_storage(storage)} {fault}",
                "choose another with --study, or leave --study out",
            )

    # ---- what is known

    def trials(self) -> list[StudyTrial]:
        """All plans that were or are being measured, each once, in the order they were proposed."""
        by_digest: dict[str, StudyTrial] = {}
        for trial in self._trials("COMPLETE", "RUNNING"):
            digest = trial.user_attrs[DIGEST]
            row = trial.user_attrs.get(ROW)
            from_ledger = bool(trial.user_attrs.get(KNOWN))
            probe_row = ProbeRow.read(json.loads(row)) if row else None
            one = StudyTrial(trial.number, _plan(trial), probe_row, from_ledger)
            if digest not in by_digest or (one.row and not by_digest[digest].row):
                by_digest[digest] = one
        return sorted(by_digest.values(), key=lambda entry: entry.number)

    @property
    def waiting(self) -> bool:
        """Whether a proposed plan waits for a worker to take it."""
        return bool(self._trials("WAITING"))

    @property
    def being_taken(self) -> bool:
        """Whether a worker has taken a plan and not yet written its name to it; it may have died in between."""
        return any(WORKER not in trial.user_attrs for trial in self._trials("RUNNING"))

    # ---- what is done

    def propose(self, plan: Plan) -> None:
        """Adds a plan to the study for a worker to measure."""
        with self._answering():
            self._study.enqueue_trial(_parameters(plan), user_attrs=_attributes(plan))

    def take(self, time_limit: Callable[[Plan], float]) -> Taken | None:
        """Reserves a waiting plan for this worker; None when none waits or another worker was faster. `time_limit`:
        seconds the probe of a plan may take, by which other hosts tell whether this worker is still alive."""
        with self._answering():
            trial = self._study.ask(_distributions(self._optuna))
            digest = trial.user_attrs.get(DIGEST)
            # No digest: another worker took the last waiting trial, and Optuna created an empty one.
            if digest is None or self._is_taken(digest, trial.number):
                self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
                return None
            trial.set_user_attr(WORKER, _me(0.0))  # at once: others wait for the name of a running trial's worker
            plan = _plan(trial)
            trial.set_user_attr(WORKER, _me(time_limit(plan)))
        return Taken(trial, trial.number, plan)

    def _is_taken(self, digest: str, number: int) -> bool:
        """Whether an earlier trial has the same plan, because two workers proposed it at once."""
        same = (each for each in self._trials("WAITING", "RUNNING", "COMPLETE") if each.number < number)
        return any(each.user_attrs.get(DIGEST) == digest for each in same)

    def tell(self, taken: Taken, row: ProbeRow, result: Result) -> None:
        """Records the measurement of a plan; a no-op when another worker has already recorded it."""
        with self._answering(), contextlib.suppress(self._optuna.exceptions.UpdateFinishedTrialError):
            taken.trial.set_user_attr(ROW, _line(row))
            for name, value in result.constraints.items():
                taken.trial.set_constraint(name, value)
            self._study.tell(taken.trial, result.value, skip_if_finished=True)

    def add(self, plan: Plan, row: ProbeRow, result: Result) -> None:
        """Adds a plan that was measured before the study began, with its row and result."""
        made = self._optuna.trial.create_trial(
            value=result.value,
            params=_parameters(plan),
            distributions=_distributions(self._optuna),
            user_attrs={**_attributes(plan), ROW: _line(row), KNOWN: True},
            constraints=result.constraints,
        )
        with self._answering():
            self._study.add_trial(made)

    def give_up(self, taken: Taken) -> None:
        """Releases a plan that could not be measured, so that other workers may propose it again."""
        with self._answering(), contextlib.suppress(self._optuna.exceptions.UpdateFinishedTrialError):
            self._study.tell(taken.trial, state=self._optuna.trial.TrialState.FAIL, skip_if_finished=True)

    def abandoned(self) -> Iterator[Taken]:
        """Plans whose worker died while measuring; the caller records them or gives them up."""
        for frozen in self._trials("RUNNING"):
            if self._is_dead(frozen):
                yield Taken(self._optuna.trial.Trial(self._study, frozen._trial_id), frozen.number, _plan(frozen))

    def _is_dead(self, frozen: Any) -> bool:
        """Whether a running trial's worker is gone: its process on this host has ended, it is far beyond its time limit
        on another host, or it never wrote its name."""
        worker = frozen.user_attrs.get(WORKER)
        if worker is None:
            now = time.monotonic()
            return now - self._nameless.setdefault(frozen.number, now) > TAKING_SECONDS
        if worker["host"] == socket.gethostname():
            try:
                return bool(abs(psutil.Process(worker["pid"]).create_time() - worker["started"]) > 1)
            except psutil.NoSuchProcess:
                return True
        seconds = (datetime.now(UTC) - frozen.datetime_start.astimezone(UTC)).total_seconds()
        return bool(seconds > 2 * worker["limit"] + GRACE_SECONDS)  # saving may take as long as the steps

    def _trials(self, *states: str) -> Sequence[Any]:
        wanted = tuple(self._optuna.trial.TrialState[name] for name in states)
        with self._answering():
            trials = self._study.get_trials(deepcopy=False, states=wanted)
        return [trial for trial in trials if DIGEST in trial.user_attrs]

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """Turns a storage failure into a one-line VplanError."""
        with plain_errors(self.storage):
            yield


# ---- the contents of a trial


def _records(plan: Plan) -> dict[str, Any]:
    return {name: getattr(plan, name).model_dump(mode="json", exclude_unset=True) for name in PARTS}


def _attributes(plan: Plan) -> dict[str, Any]:
    return {DIGEST: row_id(plan), PLAN: json.dumps(_records(plan))}


def _plan(trial: Any) -> Plan:
    parts = json.loads(trial.user_attrs[PLAN])
    return Plan(
        job=Job.read(parts["job"]), strategy=Strategy.read(parts["strategy"]), machine=Machine.read(parts["machine"])
    )


def _line(row: ProbeRow) -> str:
    """A row as JSON, without its details: every worker reads the whole study at every turn."""
    return json.dumps(row.replace(details={}).to_json(), allow_nan=False)


def _parameters(plan: Plan) -> dict[str, Any]:
    """The fields a search varies, as parameters of an Optuna trial."""
    words = {name: str(getattr(plan.strategy, name)) for name in _words()}
    return {**words, **{name: getattr(plan.job, name) for name in SHAPE}, **_counts(plan.strategy)}


def _counts(strategy: Strategy) -> dict[str, int]:
    return {name: getattr(strategy, name) or 0 for name in COUNTS}


def _words() -> list[str]:
    return [name for name in dict.fromkeys((*SEARCHED, *SAMPLED, "text_encoder")) if name not in COUNTS]


def _distributions(optuna: Any) -> dict[str, Any]:
    words = {name: choices(Strategy, name) or ("False", "True") for name in _words()}
    if "weights_dtype" in words:  # it may be left open
        words["weights_dtype"] = (*words["weights_dtype"], "None")
    categorical = {name: optuna.distributions.CategoricalDistribution(values) for name, values in words.items()}
    whole = optuna.distributions.IntDistribution(0, LARGEST)
    return {**categorical, **dict.fromkeys((*SHAPE, *COUNTS), whole)}


# ---- workers


def _me(time_limit: float) -> dict[str, Any]:
    process = psutil.Process()
    host = socket.gethostname()
    return {"host": host, "pid": process.pid, "started": process.create_time(), "limit": time_limit}
