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
    parts = [_memory(process.pid) for process in descendants()]
    private = sum(part.get("Pss_Anon", 0) + part.get("Pss_File", 0) for part in parts)
    return ProcessTreeRam(private, sum(part.get("Pss", 0) for part in parts))


def resident_bytes() -> int:
    """No less than `host_ram().held`, and cheap: pages that processes share count for each of them.

    Adding up a process's mappings takes the kernel tens of milliseconds a GiB, and holds up the process meanwhile.
    """
    total = 0
    for process in descendants():
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


def _memory(pid: int) -> dict[str, int]:
    """Bytes by name, as Linux adds them up over the mappings of a process."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:  # gone, or not ours
        return {}
    fields = dict(line.split(":", 1) for line in lines[1:] if ":" in line)
    return {name: int(value.split()[0]) * KIB for name, value in fields.items() if name.startswith("Pss")}


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
