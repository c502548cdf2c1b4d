"""Probes: a few real steps of one plan in fresh processes, measured and returned as one row.

Each rank runs `trainers/probe.py`, under torch's launcher if there are several. It reports facts in a JSON file of its
own, which is replaced atomically before and after each phase, so that even a killed rank has reported its phase.
The ranks and all their child processes are gone when `probe` returns.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from planner.catalog import card_lookup
from planner.catalog.plan_id import row_id
from planner.errors import VplanError, quoted
from planner.evidence.measurement import REHEARSED, ProbeRow
from planner.hardware import doctor
from planner.hardware.nvml import CONTEXT_BYTES
from planner.launch import launch
from planner.launch.supported import supported_plan
from planner.probe.reported_facts import classify, facts_of_all_ranks, measurement_of, steady_retries, with_encoding
from planner.probe.worker_python import WorkerPython
from planner.spec.job import Machine, Strategy
from planner.spec.plan import VIRTUAL, Environment, Outcome, Plan
from planner.worker_process import (
    REQUEST,
    SCRATCH,
    Ended,
    read_json,
    result_file,
    run_worker,
    vplan_command,
    write_json,
)

STEPS = 3
"""Steady steps, after the first step and a warm-up."""
TIME_LIMIT = 900.0
"""Seconds for a whole probe, including imports and the first step."""
SETTLE_SECONDS = 5.0
"""Time that a driver may take to free the memory of a process that has ended."""
LOG, ENCODE = "log.txt", "encode"
"""The log file in the folder that parent and workers share, and the subfolder of the encoding worker."""
UNTRUE = ("device_hertz", "first_step_seconds", "losses", "step_seconds", "trace")
"""Details of a row about time and about values of large tensors, which are meaningless on virtual cards."""


@dataclass(frozen=True, kw_only=True)
class RealRunner:
    """A `planner.probe.runner.Runner` that measures in fresh processes on this machine, see `probe`."""

    device: Literal["cuda", "cpu"] = "cuda"
    weights: str | Path | None = None
    """folder of published weights; random ones, the default, take the same memory"""
    config: Mapping[str, Any] | None = None
    """replacements for keys of the model's published architecture, to shrink it"""
    history: str | Path | None = None
    """file to write the allocator's history to, with every event"""
    encode: bool = False
    """always runs the encoding before training too, even if `run` is not asked to"""
    profiles: bool = False
    """also times the operators of one additional step"""
    command: str = "vplan probe"
    """the command to name in the row as its source"""
    python: WorkerPython = field(default_factory=WorkerPython)
    """the interpreter that runs the processes"""

    @property
    def name(self) -> str:
        return "real"

    def run(self, plan: Plan, *, steps: int, time_limit: float, encode: bool = False) -> ProbeRow:
        return probe(plan, self, steps=steps, time_limit=time_limit, encode=encode or self.encode)


HERE = RealRunner()
"""On this machine's GPU, with random weights."""


def probe(
    plan: Plan,
    runner: RealRunner = HERE,
    *,
    steps: int = STEPS,
    time_limit: float = TIME_LIMIT,
    encode: bool = False,
) -> ProbeRow:
    """Runs a few steps of a plan in separate processes. Running out of memory or time, and NaNs, are outcomes in the
    row, not errors.

    `steps` steady steps are timed. `time_limit` is in seconds; if a checkpoint is being written then, the process gets
    its time once more, as a disk takes minutes for a large model. `encode` also runs the encoding that is cached before
    training, in another process: text encoders with random weights, and the VAE on the largest clip. On a card with
    more memory than the plan's, a process is limited to what the plan's card has. Raises a VplanError for a plan that
    cannot be run here as it is (no GPU, a switch that our step lacks).
    """
    device, weights, config, history = runner.device, runner.weights, runner.config, runner.history
    plan = supported_plan(plan)
    _check_installed(plan.strategy, runner.python)
    if history and device == "cpu":
        raise VplanError("the allocator's history needs a GPU", "leave out --record-history, or --device cpu")
    if history and not Path(history).absolute().parent.is_dir():
        raise VplanError(f"there is no folder for {quoted(str(history))}", "create it, or choose another file")
    card = card_lookup.parse_gpus(plan.machine.gpu)[1]
    request = {
        "plan": {"schema": 1, **{part: getattr(plan, part).to_json() for part in ("job", "strategy", "machine")}},
        "device": device,
        "steps": steps,
        "weights": str(Path(weights).absolute()) if weights else None,
        "config": dict(config or {}),
        "history": str(Path(history).absolute()) if history else None,
        "capacity_bytes": card.allocatable_bytes - plan.machine.reserve,
        "saves": not runner.python.is_virtual,  # else gigabytes without content would be written to disk
        "profiles": runner.profiles and not runner.python.is_virtual,
    }
    started = datetime.now(UTC).isoformat(timespec="seconds")
    ended = _run(plan, request, time_limit, encode, runner.python)
    facts, details = ended.facts, ended.details
    row = ProbeRow(
        id=row_id(plan, config),
        job=plan.job,
        strategy=plan.strategy,
        machine=_machine(plan.machine, facts.get("gpu"), facts.get("capped_bytes"), runner.python),
        planned_gpu=plan.machine.gpu,
        measured=measurement_of(ended.outcome, facts),
        env=_environment(facts, runner, started),
        capped_bytes=facts.get("capped_bytes"),
        requested_bytes=facts.get("requested_bytes"),
        details={**details, "config": dict(config)} if config else details,
    )
    return rehearsed(row) if runner.python.is_virtual else row


def rehearsed(row: ProbeRow) -> ProbeRow:
    """Marks a row as measured on virtual cards.

    Drops what only a real machine can measure: seconds, and host RAM, because weights on virtual cards take none.
    """
    env = row.env.replace(gpu=f"{VIRTUAL} {row.env.gpu}", driver=VIRTUAL)
    details = {name: value for name, value in row.details.items() if name not in UNTRUE}
    measured = row.measured.replace(step_seconds=None, host_bytes=None)
    return row.replace(measured=measured, env=env, runner=REHEARSED, details=details)


class _ProbeEnd(NamedTuple):
    """How a probe ended, over all of its workers."""

    outcome: Outcome
    facts: dict[str, Any]
    """as the workers reported them"""
    details: dict[str, Any]
    """of the row: those facts that it has no field for"""


def _run(plan: Plan, request: Mapping[str, Any], time_limit: float, encode: bool, python: WorkerPython) -> _ProbeEnd:
    """Runs the processes of a request for at most ``time_limit`` seconds. ``encode``: a first one encodes."""
    folder = _folder(request, encode)
    keep = False
    before = used_bytes(plan.machine.gpus) if request["device"] == "cuda" and not python.is_virtual else None
    end = time.monotonic() + time_limit
    try:
        result = encoded = None
        if encode:  # in a separate process, as in training: memory that encoders leave on the GPU is freed with it
            inner = folder / ENCODE
            words = vplan_command("worker", "probe", str(inner))
            result = encoded = _run_worker(words, inner, request, 1, time_limit, python)
        if result is None or result.outcome == "ok":
            words = launch.command(plan, folder, launch.Nodes(), "probe")
            left_seconds = max(0.0, end - time.monotonic())
            result = _run_worker(words, folder, request, plan.machine.gpus, left_seconds, python)
        outcome, facts, ended, log = result
        if encoded:
            facts |= with_encoding(facts, encoded.facts)
        if outcome == "ok" and (times := steady_retries(facts)):
            outcome = "oom"
            message = f"the allocator emptied its cache {times} times in steady steps: it runs at the limit, slowly"
            facts |= {"phase": "step", "message": message}
        keep = outcome in ("crash", "timeout")
        details = _details(facts, ended, log if keep else None)
        if before is not None and (left := _left_bytes(before, plan.machine.gpus)):
            details["left_bytes"] = left
        return _ProbeEnd(outcome, facts, details)
    finally:
        shutil.rmtree(folder / SCRATCH if keep else folder, ignore_errors=True)


class _WorkerEnd(NamedTuple):
    """How a worker ended, and what its ranks reported."""

    outcome: Outcome
    facts: dict[str, Any]
    ended: Ended
    log: Path


def _run_worker(
    words: list[str], folder: Path, request: Mapping[str, Any], ranks: int, time_limit: float, python: WorkerPython
) -> _WorkerEnd:
    """Runs a worker on the request in a folder for at most ``time_limit`` seconds, and as long again if it is saving
    then. Raises a VplanError if the worker refuses the request."""

    def read_facts() -> dict[str, Any]:
        return facts_of_all_ranks([read_json(folder / result_file(rank)) for rank in range(ranks)])

    def saves() -> bool:
        return read_facts().get("phase") == "save"

    log = folder / LOG
    ended = python.run(words, log, time_limit, request["device"], saves)
    if refused := read_facts().get("refused"):
        raise VplanError(refused["message"], refused["fix"])
    if ranks > 1 and not ended.timed_out and _rank_was_killed(log):
        ended = Ended(-9)
    facts = read_facts()
    return _WorkerEnd(classify(facts.get("outcome"), ended), facts, ended, log)


def _folder(request: Mapping[str, Any], encode: bool) -> Path:
    """A new temporary folder with the request, and with one for encoding if asked for. Raises a VplanError if it cannot
    be written."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="vplan-probe-"))
        try:
            write_json(folder / REQUEST, request)
            if encode:
                (folder / ENCODE).mkdir()
                write_json(folder / ENCODE / REQUEST, {**request, "part": "encode", "history": None})
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    except OSError as error:
        fault = f"cannot write into {tempfile.gettempdir()}: {error.strerror}"
        raise VplanError(fault, "free some space there, or set TMPDIR to a folder that has some") from None
    return folder


def used_bytes(gpus: int) -> int | None:
    """Bytes in use on the first ``gpus`` cards that a process started here would see; None if NVML does not say."""
    used = [card["used_bytes"] for card in doctor.visible()[1][:gpus] if card["name"] is not None]
    return sum(used) if used and None not in used else None


def _left_bytes(before: int, gpus: int) -> int:
    """Bytes still in use beyond ``before``, once the driver had time to free them; 0 for less than `CONTEXT_BYTES`."""
    end = time.monotonic() + SETTLE_SECONDS
    while True:
        left = (used_bytes(gpus) or 0) - before
        if left < CONTEXT_BYTES:
            return 0
        if time.monotonic() > end:
            return left
        time.sleep(0.1)


def measure_device(device: Literal["cuda", "cpu"], time_limit: float = TIME_LIMIT) -> dict[str, Any]:
    """Calibrates the device in a fresh process of `trainers/calibrate.py`; returns the fields of a `Calibration`.

    Raises a VplanError if there is no such device (exit 1) or the process fails (exit 4, with its last log line).
    """
    started = datetime.now(UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory(prefix="vplan-calibrate-", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / LOG
        write_json(Path(folder) / REQUEST, {"device": device})
        ended = run_worker(vplan_command("worker", "calibrate", folder), log, time_limit, launch.environment(device))
        facts = read_json(Path(folder) / result_file(0))
        if refused := facts.get("refused"):
            raise VplanError(refused["message"], refused["fix"])
        if facts.get("outcome") != "ok":
            where = f" in {facts['phase']}" if "phase" in facts else ""
            raise VplanError(f"calibrating failed{where}: {_last_words(log, ended)}", "see `vplan doctor`", 4)
    names = ("gpu", "driver", "total_bytes", "context_bytes", "kernels", "workspaces", "rates", "launch_seconds")
    versions = {name: metadata.version(name) for name in ("torch", "diffusers")}
    return {**{name: facts[name] for name in names}, **versions, "time": started}


KILLED = re.compile(r"exitcode\s*:\s*-9\b")
"""How torch's launcher reports a rank that was killed by SIGKILL."""


def _rank_was_killed(log: Path) -> bool:
    return bool(KILLED.search(log.read_text(encoding="utf-8", errors="replace")))


def _check_installed(strategy: Strategy, python: WorkerPython) -> None:
    """Raises a VplanError that names a missing package, before any process is started."""
    needed = ["torch", "diffusers", "peft", "accelerate"]
    for package in (*needed, *launch.libraries(strategy)):
        if not python.has(package):
            raise VplanError(f"a probe of this plan needs {package}", "install it: pip install 'vplan[train]'")


def _details(facts: Mapping[str, Any], ended: Ended, log: Path | None) -> dict[str, Any]:
    """The facts for which a row has no field; given a log, also its last line and its path."""
    placed = {"outcome", "phase", "host_bytes", "gpu", "driver", "attention_kernel", "capped_bytes", "requested_bytes"}
    details = {name: value for name, value in facts.items() if name not in placed | {"pid"}}
    if log:
        details["message"] = _last_words(log, ended)
        details["log"] = str(log)
    elif "outcome" not in facts:
        details["message"] = f"killed by the kernel (exit code {ended.returncode})"
    return details


def _last_words(log: Path, ended: Ended) -> str:
    """How a process ended, with the last line of its log."""
    words = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    last = next((line for line in reversed(words) if line), "no output")
    how = "stopped at its time limit" if ended.timed_out else f"exit code {ended.returncode}"
    return f"{how}: {last[:500]}"


def _machine(planned: Machine, gpu: str | None, capped: int | None, python: WorkerPython) -> Machine:
    """The machine to put into a row: the one that was measured on, whatever card and torch the plan is for.

    Memory of the card that a capped process could not use becomes `reserve`.
    """
    planned = planned.replace(torch=python.torch_release)
    if python.is_virtual:
        return planned
    with contextlib.suppress(VplanError):  # a card that is not in the catalogue: `env` names it
        card = card_lookup.gpu(gpu or "")
        if card.name != card_lookup.parse_gpus(planned.gpu)[1].name:
            ram = psutil.virtual_memory().total
            reserve = 0 if capped is None else max(0, card.allocatable_bytes - capped)
            return planned.replace(gpu=card.name, host_ram=ram, unified=card.unified, reserve=reserve, links=None)
    return planned


def _environment(facts: Mapping[str, Any], runner: RealRunner, started: str) -> Environment:
    return Environment(
        gpu=facts.get("gpu") or "unknown",
        driver=facts.get("driver") or "unknown",
        torch=runner.python.version("torch") or "unknown",
        diffusers=runner.python.version("diffusers") or "unknown",
        attention_kernel=facts.get("attention_kernel") or "unknown",
        command=runner.command,
        time=started,
    )
