"""The memory of a search that measures: an Optuna study, so that it goes on where it was stopped and several workers,
on one node or many, share it.

Every plan worth a probe is a waiting trial; `ask` gives each to one worker. Two workers may propose the same plan at
once: the trial with the lower number is the plan's, and the other is dropped unmeasured. Out of memory is a completed
trial with its excess as a constraint, never a failed one.
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
from planner.tune.storage import imported, opened, said_plainly, shown

GRACE_SECONDS = 60.0
"""What a probe may take beyond its time limit before its worker is given up: starting and ending processes."""

TAKING_SECONDS = 5.0
"""Between a plan's being taken and its having its worker's name, which are two calls of a storage that answers."""

DIGEST, PLAN, ROW, WORKER, KNOWN, QUESTION = "digest", "plan", "row", "worker", "known", "question"
"""Attributes of trials and studies."""

PARTS = ("job", "strategy", "machine")
SHAPE = ("frames", "height", "width", "batch_size")
COUNTS = ("swap_blocks", "checkpointed_blocks", "fsdp_replicas")

LARGEST = 100_000
"""Bound of the whole numbers among the parameters."""


@dataclass(frozen=True)
class Taken:
    """A plan that this worker has reserved for measuring."""

    trial: Any
    number: int
    plan: Plan


@dataclass(frozen=True)
class Result:
    """How good a measurement is for the study: its value (lower is better), and constraints that a proved plan
    meets."""

    value: float
    """less is better"""
    constraints: Mapping[str, float]
    """the plan is proved where none is above 0"""


@dataclass(frozen=True)
class StudyTrial:
    """A plan of the study: its trial's number, and its row once it is measured."""

    number: int
    plan: Plan
    row: ProbeRow | None
    from_ledger: bool
    """whether the row was in a ledger before the study began"""


class Study:
    """The Optuna study of one question in a storage. Every method may raise the VplanError of a storage that fails."""

    def __init__(self, storage: str, name: str, question: Mapping[str, Any]) -> None:
        """`storage`: a database URL, or the path of a journal file; `question`: what all its trials are of."""
        self.storage = storage
        self.name = name
        self._optuna = imported()
        self._nameless: dict[int, float] = {}
        """trial -> when, by our own clock, it was first seen taken without its worker's name"""
        with self._answering():
            self._study = self._optuna.create_study(
                storage=opened(self._optuna, storage),
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
            fault = f"study {quoted(name)} in {shown(storage)} is of another question: other {' and '.join(others)}"
            raise VplanError(fault, "choose another with --study, or leave --study out")

    # ---- what is known

    def trials(self) -> list[StudyTrial]:
        """All plans that were measured or are being measured, each once, in the order they were taken."""
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
        """Whether a worker, or one that died at it, is about to put its name to a plan."""
        return any(WORKER not in trial.user_attrs for trial in self._trials("RUNNING"))

    # ---- what is done

    def propose(self, plan: Plan) -> None:
        """Adds a plan to the study for a worker to measure."""
        with self._answering():
            self._study.enqueue_trial(_parameters(plan), user_attrs=_attributes(plan))

    def take(self, time_limit: Callable[[Plan], float]) -> Taken | None:
        """Takes a waiting plan for this worker alone; None when none waits or another worker was faster. `time_limit`:
        seconds after which a worker of another host counts as dead."""
        with self._answering():
            trial = self._study.ask(_distributions(self._optuna))
            digest = trial.user_attrs.get(DIGEST)
            # Without: another worker was faster, nothing waited, and Optuna made an empty trial.
            if digest is None or self._is_taken(digest, trial.number):
                self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
                return None
            trial.set_user_attr(WORKER, _me(0.0))  # at once: one that dies without leaves the others waiting
            plan = _plan(trial)
            trial.set_user_attr(WORKER, _me(time_limit(plan)))
        return Taken(trial, trial.number, plan)

    def _is_taken(self, digest: str, number: int) -> bool:
        """Whether a plan has an earlier trial, proposed by two workers at once."""
        same = (each for each in self._trials("WAITING", "RUNNING", "COMPLETE") if each.number < number)
        return any(each.user_attrs.get(DIGEST) == digest for each in same)

    def tell(self, taken: Taken, row: ProbeRow, result: Result) -> None:
        """Records the measurement of a plan. Does nothing when another worker has recorded it already."""
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
        """A plan that could not be measured after all: it is free for others."""
        with self._answering(), contextlib.suppress(self._optuna.exceptions.UpdateFinishedTrialError):
            self._study.tell(taken.trial, state=self._optuna.trial.TrialState.FAIL, skip_if_finished=True)

    def abandoned(self) -> Iterator[Taken]:
        """Plans whose worker died while it measured them; the worker that finds them records them, or gives them up."""
        for frozen in self._trials("RUNNING"):
            if self._is_dead(frozen):
                yield Taken(self._optuna.trial.Trial(self._study, frozen._trial_id), frozen.number, _plan(frozen))

    def _is_dead(self, frozen: Any) -> bool:
        """Whether a running trial's worker is no process of this host any more, is long past its time limit, or never
        came to put its name to it."""
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
        return bool(seconds > 2 * worker["limit"] + GRACE_SECONDS)  # saving has as long again

    def _trials(self, *states: str) -> Sequence[Any]:
        wanted = tuple(self._optuna.trial.TrialState[name] for name in states)
        with self._answering():
            trials = self._study.get_trials(deepcopy=False, states=wanted)
        return [trial for trial in trials if DIGEST in trial.user_attrs]

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """Says in one line what a storage that fails says in many."""
        with said_plainly(self.storage):
            yield


# ---- what stands in a trial


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
    """A row without what only people read: every worker reads all of a study at every turn."""
    return json.dumps(row.replace(details={}).to_json(), allow_nan=False)


def _parameters(plan: Plan) -> dict[str, Any]:
    """What a search varies, as Optuna shows it."""
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
