"""Commands that are started and killed, by turns themselves and a process of theirs: what benchmarks of kills share."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil

import vplan

GONE_SECONDS = 2.0
"""After which nothing is left of a command that was killed."""
PATIENCE_SECONDS = 600.0


def ended(words: Sequence[str]) -> str:
    """A command that nobody kills, which must end well; its stdout."""
    done = subprocess.run(vplan.command(*words), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def killed(words: Sequence[str], moment: Callable[[], bool], within: float) -> str | None:
    """Kills (SIGKILL) a command at most so many seconds behind a moment, or one of the processes that it started, as a
    toss says. "command" or "worker"; None where it ended before.

    What it started must be gone after; a command whose worker died must say so by exit code 4.
    """
    process = subprocess.Popen(vplan.command(*words), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    end = time.monotonic() + PATIENCE_SECONDS
    while process.poll() is None and not moment():
        assert time.monotonic() < end
        time.sleep(0.0005)
    time.sleep(random.uniform(0, within))
    workers = _started(process)
    victim = random.choice(("command", "worker")) if workers else "command"
    hit = process.poll() is None
    if hit:
        (process if victim == "command" else workers[0]).kill()
    _, said = process.communicate(timeout=PATIENCE_SECONDS)
    gone = time.monotonic()
    while left := [worker for worker in workers if _lives(worker)]:
        assert time.monotonic() < gone + GONE_SECONDS, left
        time.sleep(0.01)
    if not hit or process.returncode == 0:
        return None
    assert process.returncode == (-9 if victim == "command" else 4), (victim, process.returncode, said.decode())
    return victim


def _started(process: subprocess.Popen[Any]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _lives(worker: psutil.Process) -> bool:
    try:
        return worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
