"""All that a command has started: how much host RAM it holds, and its end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

from planner.rehearsal.cards import CardTable
from planner.units import KIB

_ADOPT_ORPHANS = 36
"""PR_SET_CHILD_SUBREAPER (linux/prctl.h)"""
_IN_RAM = re.compile(r" /memfd:")
"""How `/proc/PID/maps` names a mapping of such a file (proc_pid_maps(5), memfd_create(2))."""
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
    files: int
    """files without a name that they map, which are in RAM (``memfd_create``): each once, and whole"""
    held: int
    """what they really have of this machine's RAM: of the cards and of pinned memory the pages that were written to"""


def host_ram() -> ProcessTreeRam:
    """The host RAM of this moment."""
    pids = [process.pid for process in descendants()]
    parts = [_fields(pid, "smaps_rollup", "Pss") for pid in pids]
    private = sum(part.get("Pss_Anon", 0) + part.get("Pss_File", 0) for part in parts)
    return ProcessTreeRam(private, _files_in_ram(pids), sum(part.get("Pss", 0) for part in parts))


def host_ram_bound() -> ProcessTreeRam:
    """No less than `host_ram()`, and cheap: pages that processes share count for each of them.

    Adding up a process's mappings takes the kernel tens of milliseconds a GiB, and holds up the process meanwhile.
    """
    pids = [process.pid for process in descendants()]
    parts = [_fields(pid, "status", "Rss") for pid in pids]
    private = sum(part.get("RssAnon", 0) + part.get("RssFile", 0) for part in parts)
    return ProcessTreeRam(private, _files_in_ram(pids), private + sum(part.get("RssShmem", 0) for part in parts))


def _files_in_ram(pids: Iterable[int]) -> int:
    ends: dict[str, int] = {}
    """inode -> where the last mapping of the file ends"""
    for pid in pids:
        for line in filter(_IN_RAM.search, _text(pid, "maps").splitlines()):
            span, _, begins, _, inode, *_ = line.split()
            start, end = (int(address, 16) for address in span.split("-"))
            ends[inode] = max(ends.get(inode, 0), int(begins, 16) + end - start)
    return sum(ends.values())


MEASURE_SECONDS = 2.0
"""Between exact measurements of host RAM that its bound calls for without having risen: adding mappings up holds the
command up."""


class RamPeak:
    """The most host RAM that all processes below this one took, bytes, measured exactly only where its bound calls for
    it."""

    def __init__(self, spare_bytes: int) -> None:
        self.spare_bytes = spare_bytes
        """what they may take of this machine's RAM"""
        self.peak_bytes = 0
        """with pinned memory and files in RAM"""
        self.pinned_peak_bytes = 0
        self.held_bytes = 0
        """of this machine's RAM, at the last exact measurement"""
        self._highest_bound_bytes = 0
        self._measured_at = time.monotonic()

    def measure(self, table: CardTable, now: float) -> None:
        """Takes this moment into account. ``table``: what is pinned now; ``now``: seconds of `time.monotonic`."""
        bound = host_ram_bound()
        self.pinned_peak_bytes = max(self.pinned_peak_bytes, table.all_pinned_bytes(bound.files))
        total = bound.private + bound.files + table.pinned_bytes
        # Below the peak it is no new one. Where it does not rise it may be: of processes that shared pages, one ended.
        overdue = now - self._measured_at >= MEASURE_SECONDS
        may_be_new = total > self._highest_bound_bytes or (overdue and total > self.peak_bytes)
        if bound.held <= self.spare_bytes and not may_be_new:
            return
        self._highest_bound_bytes = max(self._highest_bound_bytes, total)
        self._measured_at = now
        exact = host_ram()
        self.peak_bytes = max(self.peak_bytes, exact.private + exact.files + table.pinned_bytes)
        self.held_bytes = exact.held


def _fields(pid: int, file: str, prefix: str) -> dict[str, int]:
    """Bytes by name, as Linux tells them of a process in a file of `/proc`."""
    fields = dict(line.split(":", 1) for line in _text(pid, file).splitlines() if line.startswith(prefix))
    return {name: int(value.split()[0]) * KIB for name, value in fields.items()}


def _text(pid: int, file: str) -> str:
    try:
        return Path(f"/proc/{pid}/{file}").read_text(encoding="utf-8", errors="replace")
    except OSError:  # gone, or not ours
        return ""


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
