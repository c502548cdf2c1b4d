"""How a probe's memory went, in few points: as its row keeps it, and laid over the replayed step it was a probe of."""

# No `from __future__ import annotations` here: pydantic would compile every field's annotation again at each start.
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from planner.schema import NotNegative, Record
from planner.units import MAX_BYTES, MIB

if TYPE_CHECKING:
    from planner.estimate.timeline import Timeline

POINTS = 48
"""Of a phase that are kept; eight phases are less than 400."""
Mib = Annotated[int, Field(strict=True, ge=0, le=MAX_BYTES // MIB)]


class Thinned:
    """A number that is sampled, in few points: the highest of each of at most `POINTS` stretches of equal length."""

    def __init__(self) -> None:
        self._highest: list[int] = []
        self._per_stretch = 1
        """samples of a stretch"""
        self._room = 0
        """samples that the last stretch still takes"""

    def add(self, value: int) -> None:
        """Adds one sample; when all stretches are full, pairs are merged and each stretch takes twice as many."""
        if not self._room:
            if len(self._highest) == POINTS:
                self._highest = [max(pair) for pair in zip(self._highest[::2], self._highest[1::2], strict=True)]
                self._per_stretch *= 2
            self._highest.append(value)
            self._room = self._per_stretch
        self._highest[-1] = max(self._highest[-1], value)
        self._room -= 1

    def take(self) -> list[int]:
        """The highest value of each stretch since the last call, at most `POINTS` of them; starts over."""
        points, self._highest, self._per_stretch, self._room = self._highest, [], 1, 0
        return points


class PhaseTrace(Record):
    """The memory of one phase of a probe over its time."""

    seconds: NotNegative
    device_mib: tuple[Mib, ...] = Field(default=(), max_length=POINTS)
    """by NVML, on top of what was there before: the highest of stretches of equal length"""
    allocated_mib: tuple[Mib, Mib, Mib] | None = None
    """by torch's allocator: as it began, at its highest, as it ended"""


class MemoryTrace(Record):
    """The memory of a probe, phase by phase; a row keeps it in `details` as `trace`."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    phases: dict[str, PhaseTrace] = Field(max_length=16)


def trace_of(row: Mapping[str, Any]) -> MemoryTrace | None:
    """The trace of a row as JSON; None where it has none, a VplanError where it is no trace."""
    details = row.get("details")
    trace = details.get("trace") if isinstance(details, Mapping) else None
    return MemoryTrace.read(trace, f"the trace of {row.get('id')}") if isinstance(trace, Mapping) else None


@dataclass(frozen=True)
class Overlay:
    """A probe's trace over a timeline; where a phase's samples lie between its ends is told by their order alone."""

    id: str
    """of the probe's row"""
    device: tuple[tuple[float, int], ...]
    """(events since the step began, bytes on the device)"""
    allocated: tuple[tuple[int, int, int], ...]
    """(from, to, the most bytes that were allocated in between)"""


def laid_over(timeline: "Timeline", trace: MemoryTrace, name: str) -> Overlay:
    """The phases of a trace that a timeline is of: forward and backward, and the optimizer's step behind them."""
    last = timeline.events
    turn = next((mark.at for mark in timeline.marks if mark.name == "optimizer"), last)
    device, allocated = [], []
    for phase, first, end in (("train", 0, turn), ("optimizer", turn, last)):
        phase_trace = trace.phases.get(phase)
        if phase_trace is None or end <= first:
            continue
        # The samples are evenly spaced in time and the events are not, so each phase is stretched between its ends.
        share = (end - first) / max(len(phase_trace.device_mib), 1)
        device += [(first + share * (place + 0.5), mib * MIB) for place, mib in enumerate(phase_trace.device_mib)]
        if phase_trace.allocated_mib:
            allocated.append((first, end, phase_trace.allocated_mib[1] * MIB))
    return Overlay(name, tuple(device), tuple(allocated))
