"""Stopping a run: a file in its output folder asks it to; SIGUSR1 and Ctrl-C create that file.

The ranks look for the file at every step. They agree on a step, write a checkpoint after it and exit; the same command
resumes from there. A batch system can send the signal a few minutes before its time limit.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from planner.terminal import echo

STOP_REQUEST = "stop"
"""The file's name."""

STOPPED = 138
"""Exit code of a run that stopped on request: 128 + 10, a shell's exit code for a process killed by SIGUSR1."""


class StopSignal:
    """A context in which SIGUSR1 asks the run in an output folder to stop.

    ``first``: whether this is the first of the computers that share the folder; only that one removes the stop file, on
    entry and exit.
    """

    def __init__(self, output: Path, *, first: bool = True) -> None:
        self.request, self.first = output / STOP_REQUEST, first

    def __enter__(self) -> Self:
        self._drop()
        if hasattr(signal, "SIGUSR1"):  # not on Windows
            self._before = signal.signal(signal.SIGUSR1, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if hasattr(signal, "SIGUSR1"):
            signal.signal(signal.SIGUSR1, self._before)
        self._drop()

    def _drop(self) -> None:
        if self.first:
            self.request.unlink(missing_ok=True)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.request.touch()


@contextlib.contextmanager
def first_interrupt_stops(output: Path) -> Iterator[None]:
    """A context around the ranks of a run in which the first Ctrl-C asks them to stop and a second one ends them. They
    have a session of their own, so a terminal's Ctrl-C does not reach them directly."""
    before = signal.getsignal(signal.SIGINT)
    if before in (signal.SIG_IGN, None):  # a background job, started with &
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        (output / STOP_REQUEST).touch()
        echo("\nstopping after this step, with a checkpoint; Ctrl-C again ends without one", err=True)

    signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
