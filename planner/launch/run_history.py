"""Reads a run's log files as they grow: starts, steps, phases and samples."""

from __future__ import annotations

import math
import os
import re
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from planner.errors import VplanError, quoted
from planner.launch.launch import MEMORY, METRICS, PREPARE_FOLDER, RUN_FOLDER, SAMPLES, RunForecast
from planner.untrusted import json_object
from planner.worker_process import REQUEST, read_json, result_file

PHASES = ("encode", "load", "first_step", "train", "denoise", "decode", "save")
"""In the order of a run. A line for a step (`train`) covers the optimizer too."""

COUNTERS = ("allocated_bytes", "reserved_bytes", "device_bytes", "host_bytes")
BINS = 480
"""Most points in a chart: a page about 100,000 steps is no larger than one about 1,000."""

LAST_SECOND = 253_402_300_799
"""The end of the year 9999 in seconds since 1970; `datetime` has no later dates."""

SAMPLE_NAME = re.compile(r"step-(\d{8})-(\d{1,6})\.(png|mp4)")
"""File names that `trainers.sampling.samples` writes."""


class GrowingFile:
    """A file of JSON lines that another process appends to or replaces."""

    def __init__(self, path: Path, *, skip: bool = False) -> None:
        """``skip``: ignores lines that exist already."""
        self.path = path
        self._inode: int | None = None
        self._read = 0
        if skip and path.is_file():
            with path.open("rb") as file:
                self._inode = os.fstat(file.fileno()).st_ino
                # The writer cuts off an incomplete last line and continues there.
                self._read = file.read().rfind(b"\n") + 1
        self.is_new = False
        """whether the last call read from the beginning of a file"""

    def new_lines(self) -> list[dict[str, Any]]:
        """Complete lines added since the last call; all of them if the file was replaced. Lines that are not JSON
        objects are skipped, so that a damaged line does no harm."""
        self.is_new = False
        if not self.path.is_file():
            return []
        with self.path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino  # of the open file: the path may lead to another one by now
            if inode != self._inode:
                self._inode, self._read, self.is_new = inode, 0, True
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        return [found for line in whole.split(b"\n") if (found := json_object(line)) is not None]


class Columns:
    """Columns of numbers about the intervals of a run: 64 bytes per interval. NaN means not measured."""

    def __init__(self) -> None:
        self.step, self.ended, self.seconds = array("d"), array("d"), array("d")
        self.phase = array("b")
        """index in `PHASES`"""
        self.counters = {name: array("d") for name in COUNTERS}

    def add(self, line: Mapping[str, Any]) -> None:
        """Appends the interval that a line describes."""
        self.step.append(number(line, "step"))
        self.ended.append(number(line, "unix_seconds", LAST_SECOND))
        self.seconds.append(number(line, "seconds"))
        self.phase.append(PHASES.index(line["phase"]) if line.get("phase") in PHASES else PHASES.index("train"))
        for name, column in self.counters.items():
            column.append(math.nan if line.get(name) is None else number(line, name))

    def __len__(self) -> int:
        return len(self.step)


def number(line: Mapping[str, Any], name: str, most: float = 2**63) -> float:
    """The number under a name in a line. Raises a VplanError if it is missing, not a number, or beyond ±``most``."""
    value = line.get(name)
    if value is None:
        raise VplanError(f"a line of the run has no {name}", "runs of earlier versions cannot be shown")
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and -most <= value <= most):  # NaN fails too
        raise VplanError(f"a line of the run has {name} = {quoted(str(value))}, which is no number", "remove that line")
    return float(value)


@dataclass(frozen=True)
class SampleRound:
    """The samples made after one step."""

    step: int
    files: tuple[str, ...]
    """file names in the run's samples folder, in the order of the prompts"""
    prompts: tuple[str, ...]
    note: str
    """why a sample could not be made, if any"""


@dataclass
class RunStart:
    """One start of the run's process."""

    unix_seconds: float
    """when loading finished"""
    step: int
    """steps done before it"""
    device: str
    forecast: RunForecast | None
    missing: tuple[str, ...]
    """counters that cannot be read on that machine, and why"""


@dataclass(frozen=True)
class RunState:
    """Where a run is now."""

    name: Literal["encoding", "loading", "running", "finished", "failed", "stopped"]
    message: str = ""


@dataclass
class RunHistory:
    """Everything that a run's folder says about the run. `update` reads what is new."""

    output: Path
    steps: Columns = field(default_factory=Columns)
    loss: array[float] = field(default_factory=lambda: array("d"))
    learning_rate: array[float] = field(default_factory=lambda: array("d"))
    others: Columns = field(default_factory=Columns)
    """phases between steps, failed steps, and steps that were repeated after a kill"""
    failed: list[int] = field(default_factory=list)
    """indices in `others`"""
    repeated: int = 0
    """number of steps repeated after a kill"""
    starts: list[RunStart] = field(default_factory=list)
    rounds: dict[int, SampleRound] = field(default_factory=dict)
    """by step"""

    def __post_init__(self) -> None:
        self._metrics = GrowingFile(self.output / METRICS)
        self._memory = GrowingFile(self.output / MEMORY)

    def update(self) -> bool:
        """Reads what was written since the last call, and returns whether anything was. Raises a VplanError for lines
        that are damaged, or not of a run."""
        lines = self._metrics.new_lines()
        if self._metrics.is_new:  # a resumed run rewrites its metrics
            self.steps, self.loss, self.learning_rate, self.rounds = Columns(), array("d"), array("d"), {}
        for line in lines:
            self._take(line)
        others = self._memory.new_lines()
        if self._memory.is_new:  # a run only appends to it; but a copy of a run is replaced whole
            self.others, self.failed, self.starts, self.repeated = Columns(), [], [], 0
        for line in others:
            self._take_other(line)
        return bool(lines or others or self._metrics.is_new)

    def _take(self, line: Mapping[str, Any]) -> None:
        if "loss" in line:
            self.steps.add(line)
            self.loss.append(number(line, "loss"))
            self.learning_rate.append(number(line, "learning_rate"))
        elif isinstance(line.get("samples"), list):
            step = int(number(line, "step"))
            files = tuple(name for name in map(str, line["samples"]) if SAMPLE_NAME.fullmatch(name))
            prompts = tuple(str(prompt) for prompt in line.get("prompts") or ())
            self.rounds[step] = SampleRound(step, files, prompts, str(line.get("note") or ""))

    def _take_other(self, line: Mapping[str, Any]) -> None:
        if line.get("failed"):
            self.failed.append(len(self.others))
        self.repeated += bool(line.get("repeated"))
        self.others.add(line)
        if line.get("phase") == "load" and isinstance(line.get("missing"), list):
            forecast = line.get("forecast")
            self.starts.append(
                RunStart(
                    unix_seconds=number(line, "unix_seconds", LAST_SECOND),
                    step=int(number(line, "step")),
                    device=str(line.get("device")),
                    forecast=RunForecast.read(forecast, MEMORY) if isinstance(forecast, dict) else None,
                    missing=tuple(map(str, line["missing"])),
                )
            )

    @property
    def done(self) -> int:
        """Number of steps done."""
        return int(self.steps.step[-1]) if len(self.steps) else 0

    @property
    def total_steps(self) -> int | None:
        """Number of steps of the whole run; None before its training process has been started."""
        steps = read_facts(self.output / RUN_FOLDER / REQUEST).get("steps")
        return steps if isinstance(steps, int) else None

    def state(self) -> RunState:
        """The current state of the run, from what its processes reported and whether they are alive."""
        paths = [self.output / folder / result_file(0) for folder in (PREPARE_FOLDER, RUN_FOLDER)]
        encoding, training = map(read_facts, paths)
        if "outcome" not in training and is_worker(training.get("pid")):
            return RunState("loading" if training.get("phase") in ("start", "load") else "running")
        if "outcome" not in encoding and is_worker(encoding.get("pid")):
            return RunState("encoding")
        # A restarted run may have ended before its ranks began: the newer of the two files says how it ended.
        in_training = bool(training) and not (encoding and _changed(paths[0]) > _changed(paths[1]))
        result = training if in_training else encoding
        outcome, message = result.get("outcome"), str(result.get("message", ""))
        if outcome == "ok" and in_training:
            return RunState("finished")
        if outcome in (None, "ok", "stopped"):
            return RunState("stopped", message)
        return RunState("failed", message or str(outcome))

    def sample_files(self) -> Iterator[Path]:
        """Paths of all sample files that exist."""
        for entry in self.rounds.values():
            yield from (path for name in entry.files if (path := self.output / SAMPLES / name).is_file())


def read_facts(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a run's process; empty without the file. Raises a VplanError for other content."""
    try:
        facts = read_json(path)
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict):
        raise VplanError(f"{path} is no JSON object", "remove it; the next `vplan train` writes it anew")
    return facts


def _changed(path: Path) -> float:
    """Modification time of a file; 0 if it is gone, e.g. because the run is just being restarted."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def is_worker(pid: object) -> bool:
    """Whether a process id on this computer belongs to a vplan worker."""
    try:
        return isinstance(pid, int) and 0 < pid < 2**31 and "worker" in psutil.Process(pid).cmdline()
    except psutil.Error:
        return False


def is_run(folder: Path) -> bool:
    """Whether a folder is the output of a training run. A parent of a run is not, even if that run is called `run`."""
    own = (METRICS, MEMORY, Path(RUN_FOLDER, REQUEST), Path(PREPARE_FOLDER, REQUEST))
    return any((folder / name).exists() for name in own)
