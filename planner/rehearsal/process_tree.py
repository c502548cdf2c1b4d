"""All that a command has started: how much host RAM it holds, and its end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import psutil

from planner.units import KIB

_ADOPT_ORPHANS = 36
"""PR_SET_CHILD_SUBREAPER (linux/prctl.h)"""
_ROUNDS = 20
_SECONDS_A_ROUND = 1.0


def adopt_orphans() -> None:
    """What our children leave behind becomes our own children: nothing that a command detaches escapes `end_all`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)


def descendants() -> list[psutil.Process]:
    """All processes below this one."""
    return list(psutil.Process().children(recursive=True))


class ProcessTreeRam(NamedTuple):
    """Host RAM of all processes below this one, bytes; what they share is counted once."""

    private: int
    """without shared memory: there the cards and pinned memory live, which are counted by what was asked for"""
    held: int
    """what they really have of this machine's RAM: of the cards and of pinned memory the pages that were written to"""


def host_ram() -> ProcessTreeRam:
    """The host RAM of this moment."""
    parts = [_fields(process.pid, "smaps_rollup", "Pss") for process in descendants()]
    private = sum(part.get("Pss_Anon", 0) + part.get("Pss_File", 0) for part in parts)
    return ProcessTreeRam(private, sum(part.get("Pss", 0) for part in parts))


def host_ram_bound() -> ProcessTreeRam:
    """No less than `host_ram()`, and cheap: pages that processes share count for each of them.

    Adding up a process's mappings takes the kernel tens of milliseconds a GiB, and holds up the process meanwhile.
    """
    parts = [_fields(process.pid, "status", "Rss") for process in descendants()]
    private = sum(part.get("RssAnon", 0) + part.get("RssFile", 0) for part in parts)
    return ProcessTreeRam(private, private + sum(part.get("RssShmem", 0) for part in parts))


def _fields(pid: int, file: str, prefix: str) -> dict[str, int]:
    """Bytes by name, as Linux tells them of a process in a file of `/proc`."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # gone, or not ours
        return {}
    fields = dict(line.split(":", 1) for line in lines if line.startswith(prefix))
    return {name: int(value.split()[0]) * KIB for name, value in fields.items()}


def end_all(process: subprocess.Popen[bytes]) -> None:
    """Kill a command and everything below this process, and wait until all of it is gone."""
    for _ in range(_ROUNDS):
        below = descendants()
        for child in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_SECONDS_A_ROUND)
        _reap(below)
        if not descendants():
            return


def _reap(below: list[psutil.Process]) -> None:
    """Adopted orphans stay as zombies until somebody asks how they ended."""
    psutil.wait_procs(below, timeout=_SECONDS_A_ROUND)
    for child in below:
        with contextlib.suppress(OSError):
            os.waitpid(child.pid, os.WNOHANG)
