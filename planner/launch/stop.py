"""How a run is asked to stop: by a file in its output folder, or by a signal or Ctrl-C that puts it there.

Its ranks look for the file at every step. They agree on the step after which they write a checkpoint and end, and the
same command goes on from there. A batch system sends the signal some minutes before its time limit.
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
"""Exit code of a run that has stopped so: what a shell says of a process that SIGUSR1 has ended, 128 + 10."""


class StopSignal:
    """A context in which SIGUSR1 asks the run in an output folder to stop.

    ``first``: of the computers that share the folder, the one that drops what was asked before.
    """

    def __init__(self, output: Path, *, first: bool = True) -> None:
        self.request, self.first = output / STOP_REQUEST, first

    def __enter__(self) -> Self:
        self._drop()
        if hasattr(signal, "SIGUSR1"):  # there is none on Windows
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
    """A context around the ranks of a run, in which the first Ctrl-C asks them to stop and the second ends them. They
    are in a session of their own, and a terminal's Ctrl-C does not reach them."""
    before = signal.getsignal(signal.SIGINT)
    if before in (signal.SIG_IGN, None):  # what a shell starts with &
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        (output / STOP_REQUEST).touch()
        echo("\nstopping with a checkpoint after this step; Ctrl-C again ends at once, without one", err=True)

    signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
