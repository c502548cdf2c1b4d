"""One rehearsal: the command on its virtual cards, watched until it ends, has stepped often enough, or is too long."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from planner.catalog.card_profiles import GpuProfile
from planner.errors import VplanError
from planner.layout.single_gpu import NCCL_BYTES
from planner.rehearsal import launcher
from planner.rehearsal.cards import CardTable, card_environment, read_table
from planner.rehearsal.compiler import libraries_for, preload
from planner.rehearsal.hollow.hollow_data import HollowData
from planner.rehearsal.hollow.hollow_files import hollow_files, hollow_places
from planner.rehearsal.hollow.hollow_request import HollowRequest
from planner.rehearsal.interpreter import Interpreter
from planner.rehearsal.live_memory import ProcessMemory, read_histories
from planner.rehearsal.observations import Observed, read_observed
from planner.rehearsal.process_tree import RamPeak, adopt_orphans, end_all
from planner.rehearsal.ram_guard import spare_ram
from planner.signals import unwind_on_signals

OBSERVER = Path(__file__).resolve().parents[2] / "trainers" / "observer" / "entry"
"""The folder that the command's Python finds our `sitecustomize` in."""

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "WANDB_MODE": "offline",
    "DIFFSYNTH_SKIP_DOWNLOAD": "True",
}
"""What makes libraries fail at once instead of waiting for a network that is not there."""

PLUGINS = "PYDANTIC_DISABLE_PLUGINS"

TICK_SECONDS = 0.25
STRAGGLER_SECONDS = 120.0
"""How long ranks that have done their steps are held for one that has not."""

Ending = Literal["done", "steps", "failed", "time", "host-ram", "machine-ram"]
"""done: exit code 0; steps: all ranks did theirs; host-ram: over the limit; machine-ram: over what is free here."""


@dataclass(frozen=True)
class Rehearsal:
    """What to run, and within which bounds."""

    command: tuple[str, ...]
    card: GpuProfile
    gpus: int
    steps: int
    """optimizer steps; 0: to the command's own end"""
    time_limit: float
    host_ram: int | None
    """bytes the command may take; None: what this machine has to spare"""
    network: bool = False
    values: bool = True
    """whether small tensors are really computed"""
    events: bool = False
    """whether every allocation is recorded, so that the peak's lines and the course of the run are known"""
    hollow: tuple[HollowRequest, ...] = ()
    """weights that are stood in for by files without data"""
    data: HollowData | None = None
    """a data set that is made for the run"""


@dataclass
class RehearsalOutcome:
    """How a rehearsal went."""

    ending: Ending
    exit_code: int | None
    seconds: float
    observed: list[Observed]
    table: CardTable
    host_bytes: int = 0
    """peak host RAM of all processes, with pinned memory, and with weights and states that were not made"""
    pinned_bytes: int = 0
    """the most that was pinned at once"""
    held_bytes: int = 0
    """RAM of this machine that all processes really had at the last look"""
    sandbox: Mapping[str, bool] = field(default_factory=dict)
    """which of `network` and `shared_memory` were the command's own"""
    log: str = ""
    """the end of what the command printed"""
    kept_log: Path | None = None
    """all of it, where the command failed"""
    histories: Mapping[int, ProcessMemory] = field(default_factory=dict)
    """by process id"""


def run(
    rehearsal: Rehearsal, interpreter: Interpreter, say: Callable[[str], None] = lambda line: None
) -> RehearsalOutcome:
    """Run the command and say how it went; no process of it stays, however this ends, and no file in our folders.

    `say` is told what takes long. The log of a command that failed is kept, and the outcome has its path.
    """
    if sys.platform != "linux":
        raise VplanError("a rehearsal needs Linux, for which CUDA's libraries can be replaced", "use Linux or WSL")
    libraries = libraries_for(interpreter, say=say)
    adopt_orphans()
    unwind_on_signals()
    with tempfile.TemporaryDirectory(prefix="vplan-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        (folder / "tmp").mkdir()
        environment = environment_with_cards(rehearsal, folder, libraries)
        log = folder / "log.txt"
        hollow = hollow_files(rehearsal.hollow, interpreter.path, folder, environment, rehearsal.data)
        with hollow as own, log.open("wb") as output:
            (folder / "environment.json").write_text(json.dumps(environment | own), encoding="utf-8")
            process = _start(rehearsal, folder, output.fileno())
            try:
                outcome = _follow(rehearsal, process, folder)
            finally:
                end_all(process)
        outcome.host_bytes += sum(process.hollow_bytes for process in outcome.observed)
        outcome.log = _tail(log)
        outcome.histories = read_histories(folder)
        outcome.sandbox = _sandbox(folder)
        if outcome.ending in ("failed", "time"):
            outcome.kept_log = _keep(log)
        return outcome


def environment_with_cards(rehearsal: Rehearsal, folder: Path, libraries: Path) -> dict[str, str]:
    """The environment variables of the rehearsed processes: ours, with the virtual GPU before everything else.

    ``folder``: the run's own, with a folder `tmp` in it; ``libraries``: as `libraries_for` gives it.
    """
    environment = dict(os.environ)
    # Which of this machine's cards are hidden says nothing about the virtual ones.
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    if not _inherited(PLUGINS):  # vplan.py set it for this process
        environment.pop(PLUGINS, None)
    environment |= card_environment(rehearsal.card, rehearsal.gpus, NCCL_BYTES)
    environment |= {"VPLAN_GPU_FOLDER": str(folder), "VPLAN_GPU_STEPS": str(rehearsal.steps)}
    environment["VPLAN_GPU_VALUES"] = "1" if rehearsal.values else "0"
    if rehearsal.hollow:
        # Copies of hollow weights are left out where they are seen, which is in the program's own thread.
        environment |= {"VPLAN_HOLLOW": hollow_places(rehearsal.hollow, folder), "HF_DEACTIVATE_ASYNC_LOAD": "1"}
    environment["VPLAN_GPU_EVENTS"] = "1" if rehearsal.events else "0"
    environment |= {"TMPDIR": str(folder / "tmp"), "PYTHONUNBUFFERED": "1"}
    if not rehearsal.network:
        environment |= OFFLINE
    before = {
        "LD_PRELOAD": (" ", " ".join(map(str, preload(libraries)))),
        "LD_LIBRARY_PATH": (":", str(libraries)),
        "PYTHONPATH": (":", str(OBSERVER)),
    }
    for name, (separator, own) in before.items():
        environment[name] = separator.join(filter(None, [own, environment.get(name)]))
    return environment


def _inherited(variable: str) -> bool:
    """Whether this process was started with a variable."""
    before = Path("/proc/self/environ").read_bytes().split(b"\0")
    return any(entry.startswith(f"{variable}=".encode()) for entry in before)


def _start(rehearsal: Rehearsal, folder: Path, output: int) -> subprocess.Popen[bytes]:
    network = "1" if rehearsal.network else "0"
    command = [sys.executable, launcher.__file__, str(folder), network, *rehearsal.command]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )


def _follow(rehearsal: Rehearsal, process: subprocess.Popen[bytes], folder: Path) -> RehearsalOutcome:
    """Watch until one of the endings; the processes may still be there."""
    start, ram = time.monotonic(), RamPeak(spare_ram())
    first_done: float | None = None
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TICK_SECONDS)
        # In this order: a file that is written between would be that of a process which has ended.
        code = process.poll()
        table, observed = read_table(folder), read_observed(folder)
        now = time.monotonic()
        ram.measure(table, now)
        if first_done is None and any(seen.end == "steps" for seen in observed):
            first_done = now
        waited = 0.0 if first_done is None else now - first_done
        ending: Ending | None = None
        if code is not None:
            ending = "done" if code == 0 else "failed"
        elif _all_have_stepped(observed) or waited > STRAGGLER_SECONDS:
            ending = "steps"
        elif rehearsal.host_ram and ram.peak_bytes > rehearsal.host_ram:
            ending = "host-ram"
        elif ram.held_bytes > ram.spare_bytes:  # pinned memory that nobody wrote to takes none
            ending = "machine-ram"
        elif now - start > rehearsal.time_limit:
            ending = "time"
        if ending:
            peaks = ram.peak_bytes, ram.pinned_peak_bytes, ram.held_bytes
            return RehearsalOutcome(ending, code, now - start, observed, table, *peaks)


def _all_have_stepped(observed: Sequence[Observed]) -> bool:
    """Whether every rank, and every other process that is still at work on a card, waits behind its last step."""
    waiting = [process for process in observed if process.end == "steps"]
    world = max((process.world_size or 1 for process in waiting), default=1)
    at_work = [process for process in observed if not process.end and psutil.pid_exists(process.pid)]
    return len(waiting) >= world and not at_work


def _tail(log: Path, most: int = 8_000) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - most))
        return file.read().decode("utf-8", "replace")


def _sandbox(folder: Path) -> dict[str, bool]:
    try:
        answer: dict[str, bool] = json.loads((folder / launcher.SANDBOX).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return answer


def _keep(log: Path) -> Path:
    """A copy of a log that stays after its run."""
    handle, name = tempfile.mkstemp(prefix="vplan-rehearse-", suffix=".log")
    os.close(handle)
    shutil.copyfile(log, name)
    return Path(name)
