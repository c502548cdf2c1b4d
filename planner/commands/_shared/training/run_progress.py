"""Follows a run from outside by the lines that its first rank writes: progress with the time left, and a summary."""

from __future__ import annotations

import statistics
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from planner.commands._shared.rendering.render import share_bar
from planner.errors import VplanError
from planner.launch import launch
from planner.launch.launch import MEMORY, PREPARE_FOLDER, SAMPLES, Outcome, Preparation
from planner.launch.run_history import GrowingFile
from planner.launch.stop import STOP_REQUEST, STOPPED
from planner.terminal import console, echo
from planner.units import format_gib, format_seconds, plural
from planner.worker_process import read_json, result_file

NAMED = 5
"""Skipped files to name; further ones are only counted."""

BAR = 16
"""Cells of a bar: with its text it stays within 80 columns, because a full line is not erased on Ctrl-C."""

RECENT = 20
"""The number of latest steps whose median is the time of a step."""


class Follower:
    """Reads a metrics file as it grows. Shows progress on a terminal; elsewhere prints a line at each checkpoint."""

    def __init__(
        self, path: Path, steps: int, every: int, high_bytes: int | None, done: int = 0, before: Follower | None = None
    ) -> None:
        """`done`: steps of the checkpoint that is resumed, whose lines were read before. `before`: the follower of the
        same run until it ran out of memory."""
        self.path, self.steps, self.every, self.high_bytes, self.done = path, steps, every, high_bytes, done
        self.last: dict[str, Any] | None = before.last if before else None
        self.peaks: dict[str, int] = dict(before.peaks) if before else {}
        self.warnings: list[str] = []
        self.samples: list[str] = list(before.samples) if before else []
        """files of samples, without repeats"""
        self._warned: set[str] = set()
        self._seconds: deque[float] = deque(maxlen=RECENT)
        # Existing content is from an earlier call; the run rewrites its metrics.
        self._metrics = GrowingFile(path, skip=True)
        self._memory = GrowingFile(path.with_name(MEMORY), skip=True)
        self._console = console(stderr=True)
        watched = self._console.is_terminal
        self._live = Live(console=self._console, transient=True, auto_refresh=False) if watched else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
            self._show(self.done, "loading")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def _show(self, step: int, words: str) -> None:
        """Prints the two lines with which every answer begins: the progress, and the bar next to the highest memory
        use."""
        if self._live is None:
            return
        peak = self.peaks.get("device_bytes")
        used = "" if peak is None else f", peak {format_gib(peak)}"
        self._live.update(
            Group(
                Text(f"step {step} of {self.steps}: {words}", "bold", no_wrap=True, overflow="ellipsis"),
                share_bar(self._console, step, self.steps, "bold green", f"done{used}"),
            ),
            refresh=True,
        )

    def tick(self) -> None:
        """Reads what was written since the last call: metrics of steps, and memory of other phases."""
        for numbers in self._metrics.new_lines():
            if "loss" not in numbers and numbers["step"] >= self.done:
                self._take_samples(numbers)
            elif numbers["step"] > self.done:
                self._take(numbers)
        for numbers in self._memory.new_lines():
            if not numbers.get("repeated"):
                self._take_peaks(numbers, numbers["phase"])

    def _take_samples(self, line: dict[str, Any]) -> None:
        """Records samples that are being made, are done, or failed."""
        if "validating" in line:
            self._show(line["step"], f"making sample {line['validating']} of {line['of']}")
            return
        names = [str(self.path.parent / SAMPLES / name) for name in line["samples"]]
        self.samples += [name for name in names if name not in self.samples]
        if line["note"]:
            self.warnings.append(f"no more samples after step {line['step']}: {line['note']}")
            echo(f"warning: {self.warnings[-1]}", err=True)
        elif self._live is None:
            echo(f"step {line['step']}/{self.steps}, samples: {', '.join(names)}", err=True)

    def _take(self, line: dict[str, Any]) -> None:
        self.last = line
        self._seconds.append(line["seconds"])
        self._take_peaks(line, f"step {line['step']}")
        retries = line.get("retries")
        if retries and line["step"] > self.done + 1:  # the first step finds the sizes
            said = f"step {line['step']} emptied the allocator's cache {plural(retries, 'time')}"
            self._warn("retries", f"{said}: the run is at the card's limit, and slower for it")
        self._show(line["step"], self._words(line))
        if self._live is None and (line["step"] % self.every == 0 or line["step"] == self.steps):
            used = f", peak {format_gib(self.peaks['device_bytes'])}" if "device_bytes" in self.peaks else ""
            echo(f"step {line['step']}/{self.steps}, {self._words(line)}{used}", err=True)

    def _take_peaks(self, line: dict[str, Any], where: str) -> None:
        for name in ("allocated_bytes", "reserved_bytes", "device_bytes"):
            if line[name] is not None:
                self.peaks[name] = max(self.peaks.get(name, 0), line[name])
        peak = self.peaks.get("device_bytes", 0)
        if self.high_bytes is not None and peak > self.high_bytes:
            said = f"{where} used {format_gib(peak)} on the device; the plan expects at most"
            self._warn("peak", f"{said} {format_gib(self.high_bytes)}")

    def _warn(self, kind: str, text: str) -> None:
        """Prints a warning immediately, and once per kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            self.warnings.append(text)
            echo(f"warning: {text}", err=True)

    @property
    def step_seconds(self) -> float | None:
        """The median seconds of the latest steps; None before the first."""
        return statistics.median(self._seconds) if self._seconds else None

    def _words(self, line: dict[str, Any]) -> str:
        seconds = self.step_seconds or 0.0
        words = [f"loss {line['loss']:.4f}", f"{seconds:.2f} s/step"]
        if (left := self.steps - line["step"]) > 0:
            words.append(f"{format_seconds(left * seconds)} left")
        return ", ".join(words)


class Preparing:
    """Shows the progress of encoding the data: a bar on a terminal, else a line at each beginning."""

    def __init__(self, output: Path) -> None:
        self.folder = output / PREPARE_FOLDER
        errors = console(stderr=True)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(BAR),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)
        self._task = self._bar.add_task("scanning the data", total=None)
        self._doing = ""

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def tick(self) -> None:
        """Reads and shows how far the workers are. Raises a VplanError when the run is asked to stop."""
        if (self.folder.parent / STOP_REQUEST).exists():
            fix = "run the same command again: what is encoded is kept"
            raise VplanError("stopped while the data was encoded", fix, STOPPED)
        ranks = [read_json(path) for path in sorted(self.folder.glob("result-*.json"))]
        if not ranks or not ("doing" in ranks[0] or "scanning" in ranks[0]):
            return
        # Ranks share the work of each encoder; one that is ahead of rank 0 counts once rank 0 gets there.
        together = [rank for rank in ranks if rank.get("doing") == ranks[0].get("doing")]
        done, total = (sum(rank.get(name, 0) for rank in together) for name in ("done", "all"))
        what = f"encoding {ranks[0]['doing']}" if "doing" in ranks[0] else f"scanning {ranks[0]['scanning']}"
        if what != self._doing:
            self._doing = what
            self._bar.reset(self._task, description=what, total=total)
            if self._bar.disable:
                echo(f"{what}: {total}", err=True)
        self._bar.update(self._task, completed=done, total=total)

    def notes(self) -> list[str]:
        """The worker's notes about the data: skipped samples with reasons, and changes to the others."""
        told = read_json(self.folder / result_file(0))
        left = [*told.get("skipped", ()), *told.get("broken", ())]
        found = [f"skipped: {fault}" for fault in left[:NAMED]]
        if len(left) > NAMED:
            found.append(f"skipped: {len(left) - NAMED} more (all are listed in {self.folder / result_file(0)})")
        return [*found, *told.get("notes", ())]


def prepare(wanted: Preparation, output: Path) -> tuple[Outcome, list[str]]:
    """Runs the worker that encodes a run's data and shows its progress; returns how it ended, and its notes about the
    data."""
    with Preparing(output) as preparing:
        ended = launch.prepare(wanted, output, preparing.tick)
    return ended, preparing.notes()
