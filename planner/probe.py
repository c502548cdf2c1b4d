"""A probe: a few real steps of one plan in a fresh process of their own, and what they measured as one row.

The process is `trainers/probe.py`. It tells what it knows in one JSON file, replaced whole before and after each phase,
so that one that is killed has still said where it was. It and all it started are gone when `probe` returns.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import statistics
import tempfile
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, cast

import psutil

import vplan
from planner import catalog
from planner.applied import settled
from planner.errors import VplanError
from planner.job import Machine, Strategy
from planner.measurement import ProbeRow, row_id
from planner.plan import Environment, Measured, Outcome, Plan
from planner.process import Ended, read_json, run_worker, write_json

STEPS = 3
"""Steady steps, after the first step and a warm-up."""
TIME_LIMIT = 900.0
"""Seconds for a whole probe, its imports and the first step included."""
REQUEST, RESULT, LOG = "request.json", "result.json", "log.txt"
"""Files in the folder that parent and worker share."""
COUNTERS = ("allocated_bytes", "reserved_bytes", "device_bytes")


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
    if history and device == "cpu":
        raise VplanError("the allocator's history is of a GPU", "leave out --record-history, or --device cpu")
    request = {
        "plan": {"schema": 1, **{part: getattr(plan, part).to_json() for part in ("job", "strategy", "machine")}},
        "device": device,
        "steps": steps,
        "config": dict(config or {}),
        "history": str(Path(history).absolute()) if history else None,
    }
    started = datetime.now(UTC).isoformat(timespec="seconds")
    folder = Path(tempfile.mkdtemp(prefix="vplan-probe-"))
    keep = False
    try:
        write_json(folder / REQUEST, request)
        ended = run_worker(vplan.command("worker", "probe", str(folder)), folder / LOG, time_limit)
        told = read_json(folder / RESULT)
        if refused := told.get("refused"):
            raise VplanError(refused["message"], refused["fix"])
        outcome = classify(told.get("outcome"), ended)
        keep = outcome in ("crash", "timeout")
        details = _details(told, ended, folder / LOG if keep else None)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    return ProbeRow(
        id=row_id(plan, config),
        job=plan.job,
        strategy=plan.strategy,
        machine=_machine(plan.machine, told.get("gpu")),
        measured=measured(outcome, told),
        env=_environment(told, command, started),
        details=details,
    )


def classify(told: str | None, ended: Ended) -> Outcome:
    """What became of a probe: what its worker said last, else what its end says.

    SIGKILL within the time limit can only be the kernel, short of host RAM: we send it at the limit alone.
    """
    if told in ("ok", "oom", "host-oom", "nan"):
        return cast(Outcome, told)
    if ended.timed_out:
        return "timeout"
    return "host-oom" if ended.returncode in (-9, 137) else "crash"


def measured(outcome: Outcome, told: Mapping[str, Any]) -> Measured:
    """The row's numbers: the highest of each counter over all phases, and the median steady step."""
    phases: Mapping[str, Mapping[str, Any]] = told.get("phases", {})
    finished = outcome in ("ok", "nan")
    steps = told.get("step_seconds")
    where: Any = "train" if told.get("phase") == "step" else told.get("phase")
    return Measured(
        outcome=outcome,
        phase=_peak_phase(phases) if finished else where,
        **{name: _known(max, (phase[name] for phase in phases.values())) for name in COUNTERS},
        host_bytes=told.get("host_bytes"),
        step_seconds=statistics.median(steps) if finished and steps else None,
        retries=_known(sum, (phase["retries"] for phase in phases.values())),
    )


def _known(how: Any, values: Iterable[int | None]) -> int | None:
    """`how` over the values that are there; None when none is."""
    found = [value for value in values if value is not None]
    return cast(int, how(found)) if found else None


def _peak_phase(phases: Mapping[str, Mapping[str, Any]]) -> Any:
    """The phase whose tensors peak highest, the later among equals, as an estimate names it; None without counters.

    `step` is no phase but whole steady steps: `train` and `optimizer` together.
    """
    seen = [(name, phase["allocated_bytes"]) for name, phase in phases.items() if name != "step"]
    counted = [(name, nbytes) for name, nbytes in seen if nbytes is not None]
    return max(reversed(counted), key=lambda pair: pair[1])[0] if counted else None


LIBRARIES = {
    "adamw-8bit": ("bitsandbytes",),
    "adamw-8bit-paged": ("bitsandbytes",),
    "lion": ("bitsandbytes",),
    "nf4": ("bitsandbytes",),
    "adafactor": ("transformers",),
    "prodigy": ("prodigyopt",),
    "came": ("came_pytorch",),
    "int8": ("torchao",),
}
"""What an optimizer or a format of the weights needs beside torch and diffusers."""


def _check_installed(strategy: Strategy) -> None:
    """Name what is missing before a process is started for nothing."""
    needed = ["torch", "diffusers", "peft", "accelerate"]
    needed += LIBRARIES.get(strategy.optimizer, ()) + LIBRARIES.get(strategy.weights_dtype or "", ())
    for package in needed:
        if importlib.util.find_spec(package) is None:
            raise VplanError(f"a probe of this plan needs {package}", "install it: pip install 'vplan[train]'")


def _details(told: Mapping[str, Any], ended: Ended, log: Path | None) -> dict[str, Any]:
    """What the row's fixed fields have no place for; with a log, its last words and where it is."""
    placed = {"outcome", "phase", "host_bytes", "gpu", "driver", "attention_kernel"}
    details = {name: value for name, value in told.items() if name not in placed}
    if log:
        words = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
        last = next((line for line in reversed(words) if line), "it said nothing")
        how = "ended at its time limit" if ended.timed_out else f"exit code {ended.returncode}"
        details["message"] = f"{how}: {last[:500]}"
        details["log"] = str(log)
    elif "outcome" not in told:
        details["message"] = f"ended by the kernel (exit code {ended.returncode})"
    return details


def _machine(asked: Machine, gpu: str | None) -> Machine:
    """The machine that a row speaks of: the one it was taken on, whatever card the plan is for."""
    with contextlib.suppress(VplanError):  # a card that the catalogue does not know: `env` names it
        card = catalog.gpu(gpu or "")
        if card.name != catalog.parse_gpus(asked.gpu)[1].name:
            ram = psutil.virtual_memory().total
            return Machine(gpu=card.name, host_ram=ram, os=asked.os, unified=card.unified)
    return asked


def _environment(told: Mapping[str, Any], command: str, started: str) -> Environment:
    return Environment(
        gpu=told.get("gpu") or "unknown",
        driver=told.get("driver") or "unknown",
        torch=metadata.version("torch"),
        diffusers=metadata.version("diffusers"),
        attention_kernel=told.get("attention_kernel") or "unknown",
        command=command,
        time=started,
    )
