"""Whose memory lies on the card: torch's own memory history, which keeps the Python stack of every allocation.

Its file in the run's folder is `history-PID.json`: what was allocated at the error, or at the peak of a run that ended
otherwise, by stack; and, where every event is recorded, the course of the run.
"""

from __future__ import annotations

import bisect
import json
import linecache
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MOST_EVENTS = 400_000
"""Events that are kept, the last ones; a thousand take about 1.5 MB of host RAM when they are read."""

BUCKETS = 600
"""Parts of a run that are drawn with their own highest and lowest point."""

BLOCK_BYTES = 512
"""The allocator rounds a request up to a multiple of this (kMinBlockSize in CUDACachingAllocator)."""

GROWS, SHRINKS = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")

_OWN = os.path.dirname(os.path.abspath(__file__))

Event = Mapping[str, Any]
"""One entry of torch's `device_traces`."""


class MemoryHistory:
    """The memory history of this process."""

    def __init__(self, torch: Any, folder: str, events: bool) -> None:
        self._torch = torch
        self._path = os.path.join(folder, f"history-{os.getpid()}.json")
        self._events = events
        self._libraries = (os.path.dirname(torch.__file__) + os.sep, _OWN + os.sep)

    def start(self) -> None:
        """Record from here on: the stacks of what is allocated, and if wanted every event."""
        enabled, context = ("all", "alloc") if self._events else ("state", "state")
        self._torch.cuda.memory._record_memory_history(
            enabled=enabled, context=context, stacks="python", max_entries=MOST_EVENTS
        )

    def write_error(self, device: int, phases: Sequence[tuple[int, str]]) -> None:
        """Write what is allocated now, where a request has found no room."""
        snapshot = self._torch.cuda.memory._snapshot()
        live = StackTable(self._libraries)
        for segment in snapshot["segments"]:
            if segment["device"] == device:
                for block in segment["blocks"]:
                    if block["state"] != "inactive":
                        live.add(block.get("frames", ()), block["size"])
        course = self._course(snapshot["device_traces"][device], device, phases)
        self._write(device, live, course, at_error=True)

    def write_peak(self, device: int, phases: Sequence[tuple[int, str]]) -> None:
        """Write what was allocated at the highest point. Without events nobody knows."""
        if not self._events:
            return
        trace = self._torch.cuda.memory._snapshot()["device_traces"][device]
        course = self._course(trace, device, phases)
        live = StackTable(self._libraries)
        for event in live_after(trace[: course["peak"] + 1] if course else ()):
            live.add(event.get("frames", ()), rounded(event["size"]))
        self._write(device, live, course, at_error=False)

    def _course(self, trace: Sequence[Event], device: int, phases: Sequence[tuple[int, str]]) -> dict[str, Any] | None:
        """The memory over the events of a run, and where its phases begin."""
        if not self._events or not trace:
            return None
        allocated, reserved = running_totals(trace)
        cut = len(trace) >= MOST_EVENTS
        if cut:  # it begins in the middle: what was there before is what the end has more
            cuda = self._torch.cuda
            before = cuda.memory_allocated(device) - allocated[-1], cuda.memory_reserved(device) - reserved[-1]
            allocated, reserved = [size + before[0] for size in allocated], [size + before[1] for size in reserved]
        times = [event["time_us"] for event in trace]
        return {
            "events": len(trace),
            "cut": cut,
            "peak": max(range(len(trace)), key=allocated.__getitem__),
            "points": [[at, allocated[at], reserved[at]] for at in thinned(allocated, reserved)],
            "phases": [[bisect.bisect_left(times, time), name] for time, name in phases],
        }

    def _write(self, device: int, live: StackTable, course: dict[str, Any] | None, at_error: bool) -> None:
        facts = {"device": device, "at_error": at_error, **live.to_json(), "course": course}
        with open(f"{self._path}.part", "w", encoding="utf-8") as file:
            json.dump(facts, file)
        os.replace(f"{self._path}.part", self._path)


class StackTable:
    """Bytes by the stack that allocated them, without frames of torch and of ours; what torch's own threads allocate,
    in a backward pass, has an empty one."""

    def __init__(self, libraries: tuple[str, ...]) -> None:
        self._libraries = libraries
        self._frames: dict[tuple[str, int, str], int] = {}
        self._stacks: dict[tuple[int, ...], list[int]] = {}

    def add(self, frames: Iterable[Mapping[str, Any]], size: int) -> None:
        """One block; ``frames``: as torch has them, innermost first."""
        own = [
            (frame["filename"], frame["line"], frame["name"])
            for frame in frames
            if not frame["filename"].startswith(self._libraries)
        ]
        stack = tuple(self._frames.setdefault(frame, len(self._frames)) for frame in reversed(own))
        totals = self._stacks.setdefault(stack, [0, 0])
        totals[0] += size
        totals[1] += 1

    def to_json(self) -> dict[str, Any]:
        """Frames once each, and stacks of their numbers, outermost first."""
        frames = [
            {"file": file, "line": line, "function": name, "source": linecache.getline(file, line).strip()[:200]}
            for file, line, name in self._frames
        ]
        stacks = [{"frames": stack, "bytes": size, "blocks": count} for stack, (size, count) in self._stacks.items()]
        return {"frames": frames, "stacks": stacks}


def rounded(size: int) -> int:
    """The size of the block that a request takes, as long as what is left over is split off."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def running_totals(trace: Iterable[Event]) -> tuple[list[int], list[int]]:
    """(allocated, reserved) bytes after each event, counted from the first."""
    allocated, reserved = [], []
    in_use = held = 0
    for event in trace:
        action = event["action"]
        if action == "alloc":
            in_use += rounded(event["size"])
        elif action == "free_completed":
            in_use -= rounded(event["size"])
        elif action in GROWS:
            held += event["size"]
        elif action in SHRINKS:
            held -= event["size"]
        allocated.append(in_use)
        reserved.append(held)
    return allocated, reserved


def live_after(trace: Iterable[Event]) -> list[Event]:
    """The allocations of these events that none of them frees."""
    live: dict[int, Event] = {}
    for event in trace:
        if event["action"] == "alloc":
            live[event["addr"]] = event
        elif event["action"] == "free_completed":
            live.pop(event["addr"], None)
    return list(live.values())


def thinned(allocated: Sequence[int], reserved: Sequence[int]) -> list[int]:
    """Indices of few events that show as much: of each part of the run, where either number is highest, and where the
    allocated one is lowest."""
    count = len(allocated)
    chosen = {0, count - 1}
    for bucket in range(BUCKETS):
        part = range(count * bucket // BUCKETS, count * (bucket + 1) // BUCKETS)
        if part:
            chosen |= {max(part, key=allocated.__getitem__), min(part, key=allocated.__getitem__)}
            chosen.add(max(part, key=reserved.__getitem__))
    return sorted(chosen)
