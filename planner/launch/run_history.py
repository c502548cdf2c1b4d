"""What a run has written about itself, read as it grows: its starts, steps, phases and samples."""

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
"""In the order of a run. What a step's line says is of the optimizer too."""

COUNTERS = ("allocated_bytes", "reserved_bytes", "device_bytes", "host_bytes")
BINS = 480
"""Points of a chart at most: a page of 100,000 steps is as large as one of 1,000."""

LAST_SECOND = 253_402_300_799
"""Of the year 9999, in seconds since 1970: there are no later dates."""

SAMPLE_NAME = re.compile(r"step-(\d{8})-(\d{1,6})\.(png|mp4)")
"""As `trainers.sampling.samples` names its files."""


class GrowingFile:
    """A file of JSON lines that another process adds to, or writes anew and puts in its place."""

    def __init__(self, path: Path, *, skip: bool = False) -> None:
        """``skip``: leaves out what is there already."""
        self.path = path
        self._inode: int | None = None
        self._read = 0
        if skip and path.is_file():
            with path.open("rb") as file:
                self._inode = os.fstat(file.fileno()).st_ino
                # Its writer cuts off a last line that is not whole, and goes on there.
                self._read = file.read().rfind(b"\n") + 1
        self.is_new = False
        """whether the last lines were read from the beginning of a file"""

    def new_lines(self) -> list[dict[str, Any]]:
        """The lines that were added since the last call, without one that is not whole yet; all of a new file. What are
        no JSON objects are left out: a run outlives a damaged line."""
        self.is_new = False
        if not self.path.is_file():
            return []
        with self.path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino  # of what was opened: the path may be another file by now
            if inode != self._inode:
                self._inode, self._read, self.is_new = inode, 0, True
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        return [found for line in whole.split(b"\n") if (found := json_object(line)) is not None]


class Columns:
    """Numbers of many intervals of a run, column by column: 64 bytes each. NaN stands for what was not measured."""

    def __init__(self) -> None:
        self.step, self.ended, self.seconds = array("d"), array("d"), array("d")
        self.phase = array("b")
        """place in `PHASES`"""
        self.counters = {name: array("d") for name in COUNTERS}

    def add(self, line: Mapping[str, Any]) -> None:
        """Adds the interval of one line."""
        self.step.append(number(line, "step"))
        self.ended.append(number(line, "unix_seconds", LAST_SECOND))
        self.seconds.append(number(line, "seconds"))
        self.phase.append(PHASES.index(line["phase"]) if line.get("phase") in PHASES else PHASES.index("train"))
        for name, column in self.counters.items():
            column.append(math.nan if line.get(name) is None else number(line, name))

    def __len__(self) -> int:
        return len(self.step)


def number(line: Mapping[str, Any], name: str, most: float = 2**63) -> float:
    """A number of a line; a VplanError where it has none, or one beyond ``most``."""
    value = line.get(name)
    if value is None:
        raise VplanError(f"a line of the run has no {name}", "runs of earlier versions cannot be shown")
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and -most <= value <= most):  # nor is NaN
        raise VplanError(f"a line of the run has {name} = {quoted(str(value))}, which is no number", "remove that line")
    return float(value)


@dataclass(frozen=True)
class SampleRound:
    """The samples that were made after one step."""

    step: int
    files: tuple[str, ...]
    """names in the run's folder of samples, in the order of the prompts"""
    prompts: tuple[str, ...]
    note: str
    """why there are no more"""


@dataclass
class RunStart:
    """One start of the run's process."""

    unix_seconds: float
    """when it had loaded"""
    step: int
    """steps that were done before"""
    device: str
    forecast: RunForecast | None
    missing: tuple[str, ...]
    """counters that cannot be read there, and why"""


@dataclass(frozen=True)
class RunState:
    """Where a run is now."""

    name: Literal["encoding", "loading", "running", "finished", "failed", "stopped"]
    message: str = ""


@dataclass
class RunHistory:
    """All that a run's folder says of the run. `update` reads what is new."""

    output: Path
    steps: Columns = field(default_factory=Columns)
    loss: array[float] = field(default_factory=lambda: array("d"))
    learning_rate: array[float] = field(default_factory=lambda: array("d"))
    others: Columns = field(default_factory=Columns)
    """phases between steps, steps that failed, and steps that were done again"""
    failed: list[int] = field(default_factory=list)
    """places in `others`"""
    repeated: int = 0
    """steps that were done again after a kill"""
    starts: list[RunStart] = field(default_factory=list)
    rounds: dict[int, SampleRound] = field(default_factory=dict)
    """by step"""

    def __post_init__(self) -> None:
        self._metrics = GrowingFile(self.output / METRICS)
        self._memory = GrowingFile(self.output / MEMORY)

    def update(self) -> bool:
        """Reads what was written since the last call; whether that was anything. Raises a VplanError for a folder that
        is no run's, or lines that are damaged."""
        lines = self._metrics.new_lines()
        if self._metrics.is_new:  # a run that was taken up writes its metrics anew
            self.steps, self.loss, self.learning_rate, self.rounds = Columns(), array("d"), array("d"), {}
        for line in lines:
            self._take(line)
        others = self._memory.new_lines()
        if self._memory.is_new:  # lines are only ever added to it; but a copy of a run is replaced whole
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
        """Steps that are done."""
        return int(self.steps.step[-1]) if len(self.steps) else 0

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None before its process has started."""
        steps = read_facts(self.output / RUN_FOLDER / REQUEST).get("steps")
        return steps if isinstance(steps, int) else None

    def state(self) -> RunState:
        """Where the run is now, by what its processes report and whether they are there."""
        paths = [self.output / folder / result_file(0) for folder in (PREPARE_FOLDER, RUN_FOLDER)]
        encoding, training = map(read_facts, paths)
        if "outcome" not in training and is_worker(training.get("pid")):
            return RunState("loading" if training.get("phase") in ("start", "load") else "running")
        if "outcome" not in encoding and is_worker(encoding.get("pid")):
            return RunState("encoding")
        # A run that was started again may have ended before its ranks began: the newer of the two says how.
        in_training = bool(training) and not (encoding and _changed(paths[0]) > _changed(paths[1]))
        result = training if in_training else encoding
        outcome, message = result.get("outcome"), str(result.get("message", ""))
        if outcome == "ok" and in_training:
            return RunState("finished")
        if outcome in (None, "ok", "stopped"):
            return RunState("stopped", message)
        return RunState("failed", message or str(outcome))

    def sample_files(self) -> Iterator[Path]:
        """The files of all samples that are there."""
        for entry in self.rounds.values():
            yield from (path for name in entry.files if (path := self.output / SAMPLES / name).is_file())


def read_facts(path: Path) -> dict[str, Any]:
    """A JSON object that a process of a run has written, empty where there is none; a VplanError where it is none."""
    try:
        facts = read_json(path)
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict):
        raise VplanError(f"{path} is no JSON object", "remove it; the next `vplan train` writes it anew")
    return facts


def _changed(path: Path) -> float:
    """When a file was last written; 0 where it is gone, as when a run is started again just now."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def is_worker(pid: object) -> bool:
    """Whether a process of this computer is one of vplan's workers."""
    try:
        return isinstance(pid, int) and 0 < pid < 2**31 and "worker" in psutil.Process(pid).cmdline()
    except psutil.Error:
        return False


def is_run(folder: Path) -> bool:
    """Whether a folder is the output of a training run: not one with a run in it, which may be called `run` too."""
    own = (METRICS, MEMORY, Path(RUN_FOLDER, REQUEST), Path(PREPARE_FOLDER, REQUEST))
    return any((folder / name).exists() for name in own)
