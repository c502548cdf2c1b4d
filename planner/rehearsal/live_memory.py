"""Which lines of code hold a card's memory, at the error or at the peak, and how a run's memory went; as the observer
(`trainers/observer/memory_history.py`) wrote it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from planner.rehearsal.observations import Frame, program_frame

PATTERN = "history-*.json"
MOST_SITES = 8


class AllocationSite(NamedTuple):
    """One line of the program and what it allocated, in the libraries that it called too."""

    frame: Frame
    allocated_bytes: int
    blocks: int
    inner: Frame
    """the line that allocated most of it: of a library, or the same"""
    inner_bytes: int

    def to_json(self) -> dict[str, Any]:
        """The line, its bytes, and the innermost line where that is another one."""
        own = {**self.frame.to_json(), "bytes": self.allocated_bytes, "blocks": self.blocks}
        inner = {**self.inner.to_json(), "bytes": self.inner_bytes} if self.inner != self.frame else None
        return {**own, "inner": inner}


class LiveMemory(NamedTuple):
    """What was allocated on a card at one time, by the line that did it."""

    at_error: bool
    """else at the peak"""
    device: int
    sites: tuple[AllocationSite, ...]
    """the largest first"""
    backward_bytes: int
    """of autograd itself, which runs no Python: gradients, and temporary tensors of the backward pass"""

    @property
    def allocated_bytes(self) -> int:
        """Everything together."""
        return sum(site.allocated_bytes for site in self.sites) + self.backward_bytes

    @property
    def largest(self) -> tuple[AllocationSite, ...]:
        """The lines that are told one by one."""
        return self.sites[:MOST_SITES]

    @property
    def other_lines(self) -> int:
        """Lines beyond the largest."""
        return len(self.sites[MOST_SITES:])

    @property
    def other_bytes(self) -> int:
        """Of the lines beyond the largest."""
        return sum(site.allocated_bytes for site in self.sites[MOST_SITES:])

    def to_json(self) -> dict[str, Any]:
        """The object `live` of docs/rehearsal.md."""
        return {
            "at": "error" if self.at_error else "peak",
            "device": self.device,
            "allocated_bytes": self.allocated_bytes,
            "lines": [site.to_json() for site in self.largest],
            "other_lines": self.other_lines,
            "other_bytes": self.other_bytes,
            "backward_bytes": self.backward_bytes,
        }


class CoursePoint(NamedTuple):
    """A card's memory after one event of the allocator, in bytes."""

    event: int
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True)
class MemoryCourse:
    """How the memory of a run went, over the events of torch's allocator."""

    events: int
    is_cut: bool
    """whether the run began before the first event that was kept"""
    points: tuple[CoursePoint, ...]
    """in order; the peaks of all parts of the run are among them"""
    phases: tuple[tuple[int, str], ...]
    """the event with which a phase begins, and its name"""

    @property
    def peak(self) -> CoursePoint:
        """Where most was allocated."""
        return max(self.points, key=lambda point: point.allocated_bytes)


class ProcessMemory(NamedTuple):
    """What one process wrote."""

    live: LiveMemory
    course: MemoryCourse | None
    """None where events were not recorded"""


def read_histories(folder: Path) -> dict[int, ProcessMemory]:
    """Those of all processes that wrote one, by process id."""
    paths = {int(path.stem.rpartition("-")[2]): path for path in folder.glob(PATTERN)}
    return {pid: _read(json.loads(path.read_text(encoding="utf-8"))) for pid, path in paths.items()}


def _read(data: Mapping[str, Any]) -> ProcessMemory:
    frames = [Frame(**frame) for frame in data["frames"]]
    stacks = [
        (tuple(frames[at] for at in stack["frames"]), stack["bytes"], stack["blocks"]) for stack in data["stacks"]
    ]
    backward = sum(size for stack, size, _ in stacks if not stack)
    live = LiveMemory(data["at_error"], data["device"], tuple(sites_of(stacks)), backward)
    return ProcessMemory(live, _course(data["course"]) if data["course"] else None)


def sites_of(stacks: Sequence[tuple[tuple[Frame, ...], int, int]]) -> list[AllocationSite]:
    """Stacks (frames outermost first, bytes, blocks) by the innermost line of the program's own, the largest first."""
    by_line: dict[Frame, dict[Frame, int]] = defaultdict(lambda: defaultdict(int))
    blocks: dict[Frame, int] = defaultdict(int)
    for stack, size, count in stacks:
        if own := program_frame(stack):
            by_line[own][stack[-1]] += size
            blocks[own] += count
    sites = []
    for own, inner in by_line.items():
        most = max(inner, key=inner.__getitem__)
        sites.append(AllocationSite(own, sum(inner.values()), blocks[own], most, inner[most]))
    return sorted(sites, key=lambda site: -site.allocated_bytes)


def _course(data: Mapping[str, Any]) -> MemoryCourse:
    points = tuple(CoursePoint(*point) for point in data["points"])
    phases = tuple((event, name) for event, name in data["phases"])
    return MemoryCourse(data["events"], data["cut"], points, phases)
