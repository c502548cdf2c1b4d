"""One worker process: started, waited for with a limit, ended with all it started, and heard through one file."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import psutil

from planner.errors import VplanError
from planner.file_writing import write_file
from planner.signals import unwind_on_signals

DOOR = Path(__file__).resolve().parents[1] / "vplan.py"
"""vplan's own script: started by its path, so that no other folder can stand in its way."""

REQUEST, SCRATCH = "request.json", "scratch"
"""In the folder that a parent and its worker share: what the worker is to do, and a place for what nobody keeps."""

GRACE_SECONDS = 30.0
"""To wait for a killed process: the driver frees its memory before it is gone."""


TICK_SECONDS = 0.25
LOOK_SECONDS = 1.0
"""Between two looks at what a worker has started: ranks lead sessions of their own."""


class Ended(NamedTuple):
    """How a worker process ended."""

    returncode: int | None
    """None when it was ended at its time limit; below 0 it is a signal's number"""

    @property
    def timed_out(self) -> bool:
        """Whether it would be running still."""
        return self.returncode is None


def result_file(rank: int) -> str:
    """The name of a rank's result file, in the folder that it shares with its parent."""
    return f"result-{rank:05d}.json"


def vplan_command(*arguments: str) -> list[str]:
    """The command that starts vplan as a process of this Python."""
    return [sys.executable, str(DOOR), *arguments]


def start_worker(
    command: list[str], log: BinaryIO, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a process that leads a session of its own, with all its output in `log`; `end_tree` ends it.

    Its standard input is a pipe that closes when we die, however we die; a worker then ends itself. SIGUSR1 is for us
    alone: some batch systems send it to all processes of a job, and it would end a worker.
    """
    unwind_on_signals()
    with _blocked_usr1():
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=None if environment is None else dict(environment),
        )


@contextlib.contextmanager
def _blocked_usr1() -> Iterator[None]:
    """A context in which SIGUSR1 waits; a process that is started in it never gets that signal, nor what it starts."""
    if sys.platform == "win32":  # which has no such signal
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_worker(
    command: list[str],
    log: Path,
    time_limit: float,
    environment: Mapping[str, str] | None = None,
    once_more: Callable[[], bool] = lambda: False,
) -> Ended:
    """Run a process to its end or its time limit (seconds), with its output in `log`; its whole tree is gone after.

    `once_more` is asked at the limit whether it has as long again, which it has once.
    """
    with log.open("wb") as file:
        process = start_worker(command, file, environment)
    seen: set[psutil.Process] = set()
    end = last = time.monotonic() + time_limit
    try:
        while True:
            try:
                return Ended(process.wait(min(LOOK_SECONDS, max(0.0, end - time.monotonic()))))
            except subprocess.TimeoutExpired:
                seen.update(_started_by(process))
                if time.monotonic() < end:
                    continue
                if end > last or not once_more():
                    return Ended(None)
                end += time_limit
    finally:
        end_tree(process, seen)


def watch_worker(command: list[str], log: Path, environment: Mapping[str, str], tick: Callable[[], None]) -> Ended:
    """Run a process to its end, however long it takes, with its output added to `log` and `tick` called meanwhile.

    Its whole tree is gone after, also when `tick` raises or the user interrupts.
    """
    with log.open("ab") as file:
        process = start_worker(command, file, environment)
    try:
        while True:
            try:
                return Ended(process.wait(TICK_SECONDS))
            except subprocess.TimeoutExpired:
                tick()
    finally:
        end_tree(process)


def _started_by(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Whatever a process has started that is still below it; nothing once it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return list(psutil.Process(process.pid).children(recursive=True))
    return []


def end_tree(process: subprocess.Popen[bytes], seen: Iterable[psutil.Process] = ()) -> None:
    """End a process that leads its own session, and all it started, and wait until they are gone.

    Of a process that died before, only what is in its session can be found, and those that were `seen` below it.
    """
    started = [*seen, *_started_by(process)]
    if sys.platform != "win32":
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody left; only zombies left (macOS)
            os.killpg(process.pid, signal.SIGKILL)
    for child in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.kill()
    if process.stdin:
        with contextlib.suppress(OSError):  # what was written to it before it died, and never read
            process.stdin.close()
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        fix = "its driver holds it: restart the computer if it stays"
        raise VplanError(f"process {process.pid} cannot be ended", fix, 4) from None
    psutil.wait_procs(started, timeout=GRACE_SECONDS)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Replaces a file by one JSON object, atomically: a reader sees the old object or the new one, never a part."""
    write_file(path, json.dumps(data, allow_nan=False))


def read_json(path: Path) -> dict[str, Any]:
    """What a worker has reported so far; empty when it ended before it reported anything."""
    with contextlib.suppress(FileNotFoundError):  # another computer may remove it just now
        told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return told
    return {}
