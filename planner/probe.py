"""A probe: a few real steps of one plan in a fresh process of their own, and what they measured as one row.

The process is `trainers/probe.py`. It tells what it knows in one JSON file, replaced whole after every phase, so that even
one that is killed has said where it was. However it ends, it and everything it started are gone when `probe` returns.
"""

# No `from __future__ import annotations` here: pydantic would compile every field's annotation again at each start.
import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

import vplan
from planner import catalog
from planner.applied import settled
from planner.errors import VplanError
from planner.job import Job, Machine, Strategy
from planner.plan import Environment, Measured, Outcome, Plan
from planner.record import Record

STEPS = 3
"""Steady steps, after the first step and a warm-up."""
TIME_LIMIT = 900.0
"""Seconds for a whole probe, its imports and the first step included."""
REQUEST, RESULT, LOG = "request.json", "result.json", "log.txt"
"""Files in the folder that parent and worker share."""
GRACE_SECONDS = 30.0
"""To wait for a killed process: the driver frees its memory before it is gone."""
NEEDED = {"torch": "torch", "diffusers": "diffusers", "peft": "peft", "accelerate": "accelerate"}
TOP = ("allocated_bytes", "reserved_bytes", "device_bytes")


class ProbeRow(Record):
    """One measured run of our own, as a line of a file of measurements (DESIGN section 9)."""

    id: str
    job: Job
    strategy: Strategy
    machine: Machine
    implementation: Literal["vplan"] = "vplan"
    measured: Measured
    env: Environment
    details: dict[str, Any] = {}
    """what else the worker saw: counters by phase, every step's seconds and loss, and what could not be had (`missing`)"""


class Ended(NamedTuple):
    """How a worker process ended."""

    returncode: int | None
    """None when it was ended at its time limit"""

    @property
    def timed_out(self) -> bool:
        return self.returncode is None


def probe(
    plan: Plan,
    *,
    steps: int = STEPS,
    time_limit: float = TIME_LIMIT,
    device: Literal["cuda", "cpu"] = "cuda",
    config: Mapping[str, Any] | None = None,
    history: str | Path | None = None,
    command: str = "vplan probe",
) -> ProbeRow:
    """Run a few steps of a plan in a process of its own. Running out of memory, time or numbers are results.

    `steps` steady steps are timed; `time_limit` is in seconds; `config` replaces keys of the model's published
    architecture, to shrink it; `history` is a file for the allocator's every event; `command` is what the row says was
    typed. A plan that cannot be run here as it stands (no GPU, a switch our step lacks) is a VplanError.
    """
    plan = settled(plan)
    _check_installed(plan.strategy)
    row = row_id(plan, config)
    folder = Path(tempfile.mkdtemp(prefix="vplan-probe-"))
    started = datetime.now(UTC).isoformat(timespec="seconds")
    request = {
        "plan": {"schema": 1, **{part: getattr(plan, part).to_json() for part in ("job", "strategy", "machine")}},
        "device": device,
        "steps": steps,
        "config": dict(config or {}),
        "history": str(Path(history).absolute()) if history else None,
    }
    keep = False
    try:
        write_json(folder / REQUEST, request)
        ended = run_worker(vplan.command("worker", "probe", str(folder)), folder / LOG, time_limit)
        result = read_result(folder / RESULT)
        if refused := result.get("refused"):
            raise VplanError(refused["message"], refused["fix"])
        outcome = classify(result.get("outcome"), ended)
        keep = outcome in ("crash", "timeout")
        details = _details(result, folder / LOG, ended, keep)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    return ProbeRow(
        id=row,
        job=plan.job,
        strategy=plan.strategy,
        machine=_machine(plan.machine, result.get("gpu")),
        measured=measured(outcome, result),
        env=_environment(result, command, started),
        details=details,
    )


def row_id(plan: Plan, config: Mapping[str, Any] | None = None) -> str:
    """The name of a plan's row: the same for the same job, strategy and machine, whatever the plan's file says besides."""
    strategy = settled(plan).strategy
    said: dict[str, Any] = {
        name: record.model_dump(mode="json", exclude_defaults=True)
        for name, record in (("job", plan.job), ("strategy", strategy), ("machine", plan.machine))
    }
    if config:
        said["config"] = dict(config)
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:12]
    return f"{plan.job.model}-{plan.job.method}-{digest}"


def classify(told: str | None, ended: Ended) -> Outcome:
    """What became of a probe: what its worker said last, else what its end says.

    Only the kernel's out-of-memory killer sends SIGKILL to a process of ours that is within its time.
    """
    outcomes: dict[str, Outcome] = {name: name for name in ("ok", "oom", "host-oom", "nan")}  # type: ignore[misc]
    if told in outcomes:
        return outcomes[told]
    if ended.timed_out:
        return "timeout"
    return "host-oom" if ended.returncode in (-9, 137) else "crash"


def measured(outcome: Outcome, result: Mapping[str, Any]) -> Measured:
    """The row's numbers: the highest of each counter over all phases, and the median steady step."""
    phases: Mapping[str, Mapping[str, Any]] = result.get("phases", {})
    peaks = {name: _highest(phase.get(name) for phase in phases.values()) for name in TOP}
    finished = outcome in ("ok", "nan")
    return Measured(
        outcome=outcome,
        phase=_peak_phase(phases) if finished else result.get("phase"),
        **peaks,
        host_bytes=result.get("host_bytes"),
        step_seconds=_median(result.get("step_seconds", ())) if finished else None,
        retries=_total(phase.get("retries") for phase in phases.values()),
    )


def run_worker(command: list[str], log: Path, time_limit: float) -> Ended:
    """Run a process to its end or its time limit (seconds), with its output in `log`; its whole tree is gone after."""
    with log.open("wb") as file:
        # The pipe tells the worker that we died: it then ends itself.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        return Ended(process.wait(time_limit))
    except subprocess.TimeoutExpired:
        return Ended(None)
    finally:
        end_tree(process)


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads its own session, and all it started, and wait until they are gone."""
    started: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).children(recursive=True)
    if sys.platform != "win32":
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody left; only zombies left (macOS)
            os.killpg(process.pid, signal.SIGKILL)
    for child in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.kill()
    if process.stdin:
        process.stdin.close()
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        fix = "the driver holds it; see `dmesg`, and restart the computer if it stays"
        raise VplanError(f"the probe's process {process.pid} cannot be ended", fix, 4) from None
    psutil.wait_procs(started, timeout=GRACE_SECONDS)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Replace a file by one JSON object: whoever reads it sees the old one or the new one, never a part."""
    partial = path.with_name(f"{path.name}.part")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(data, file, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_result(path: Path) -> dict[str, Any]:
    """What the worker has told; nothing when it died before it could tell anything."""
    if not path.exists():
        return {}
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def _check_installed(strategy: Strategy) -> None:
    """Name what is missing before a process is started for nothing."""
    needed = dict(NEEDED)
    if strategy.optimizer == "adamw-8bit":
        needed["bitsandbytes"] = "bitsandbytes"
    for package in needed:
        if importlib.util.find_spec(package) is None:
            raise VplanError(f"a probe of this plan needs {package}", "install it: pip install 'vplan[train]'")


def _details(result: Mapping[str, Any], log: Path, ended: Ended, keep: bool) -> dict[str, Any]:
    """What the row's fixed fields have no place for, and for a failed probe its last words and where all of them are."""
    own = ("outcome", "phase", "host_bytes", "gpu", "driver", "attention_kernel")
    details = {name: value for name, value in result.items() if name not in own}
    if keep:
        words = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        details["log"] = str(log)
        details.setdefault("message", words[-1][:500] if words else f"exit code {ended.returncode}, nothing said")
    return details


def _machine(asked: Machine, gpu: str | None) -> Machine:
    """The machine a row speaks of is the one it was taken on, whatever card the plan is for."""
    with contextlib.suppress(VplanError):  # a card the catalogue does not know: env names it
        card = catalog.gpu(gpu or "")
        if card.name != catalog.parse_gpus(asked.gpu)[1].name:
            ram = psutil.virtual_memory().total
            return Machine(gpu=card.name, host_ram=ram, os=asked.os, unified=card.unified)
    return asked


def _environment(result: Mapping[str, Any], command: str, started: str) -> Environment:
    return Environment(
        gpu=result.get("gpu") or "unknown",
        driver=result.get("driver") or "unknown",
        torch=metadata.version("torch"),
        diffusers=metadata.version("diffusers"),
        attention_kernel=result.get("attention_kernel") or "unknown",
        command=command,
        time=started,
    )


def _peak_phase(phases: Mapping[str, Mapping[str, Any]]) -> Any:
    """The phase whose tensors peak highest, the later among equals, as an estimate names it; None without counters."""
    named = [(name, peak["allocated_bytes"]) for name, peak in phases.items() if name != "step"]
    seen = [(name, nbytes) for name, nbytes in named if nbytes is not None]
    return max(reversed(seen), key=lambda pair: pair[1])[0] if seen else None
