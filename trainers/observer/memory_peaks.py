"""Peaks of torch's allocator by phase, without changing what the program itself reads of them.

A phase's own peak needs torch's counters reset where it begins. What they showed before is kept here and put back into
every answer that the program asks for, until it resets them itself.
"""

from __future__ import annotations

import time
from typing import Any

Nested = dict[str, Any]
Peaks = dict[int, dict[str, int]]
"""By device: `allocated` and `reserved`, bytes."""

FIELDS = {"allocated": "allocated_bytes", "reserved": "reserved_bytes"}


class MemoryPeaks:
    """The phases of one process and their peaks."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._memory = torch.cuda.memory
        self._read = self._memory.memory_stats_as_nested_dict
        self._reset = self._memory.reset_peak_memory_stats
        self._hidden: dict[int, Nested] = {}
        self.phase = "load"
        self.phases: dict[str, Peaks] = {}
        self.starts: list[tuple[int, str]] = [(0, "load")]
        """when each phase began, microseconds since the epoch; a phase may begin many times"""
        for module in (self._memory, torch.cuda):
            module.memory_stats_as_nested_dict = self._stats_for_the_program
            module.reset_peak_memory_stats = self._reset_by_the_program

    def enter(self, phase: str) -> None:
        """What was allocated since the last call belongs to the phase before."""
        self.starts.append((time.time_ns() // 1000, phase))
        if not self._torch.cuda.is_initialized():
            self.phase = phase
            return
        self.note()
        for device in self._devices():
            self._hidden[device] = _with_peaks(self._read(device), self._hidden.get(device, {}))
            self._reset(device)
        self.phase = phase

    def note(self) -> None:
        """Adds the counters as they stand to the phase that is going on."""
        if not self._torch.cuda.is_initialized():
            return
        peaks = self.phases.setdefault(self.phase, {})
        for device in self._devices():
            stats = self._read(device)
            own = peaks.setdefault(device, dict.fromkeys(FIELDS, 0))
            for name, field in FIELDS.items():
                own[name] = max(own[name], _value(stats, field, "peak"))

    @property
    def fullest(self) -> int | None:
        """The device whose reserved memory was highest; None where none was reserved."""
        self.note()
        peaks = [(own["reserved"], device) for devices in self.phases.values() for device, own in devices.items()]
        highest, device = max(peaks, default=(0, 0))
        return device if highest else None

    def retries(self) -> int:
        """How often the allocator gave its cache back because memory was short, on all devices."""
        if not self._torch.cuda.is_initialized():
            return 0
        return sum(int(self._read(device).get("num_alloc_retries", 0)) for device in self._devices())

    def _devices(self) -> range:
        return range(self._torch.cuda.device_count())

    def _stats_for_the_program(self, device: Any = None) -> Nested:
        stats: Nested = self._read(device)
        if not stats:  # before CUDA is initialised
            return stats
        hidden = self._hidden.get(self._memory._get_device_index(device, optional=True), {})
        return _with_peaks(stats, hidden)

    def _reset_by_the_program(self, device: Any = None) -> None:
        self.note()
        self._hidden.pop(self._memory._get_device_index(device, optional=True), None)
        self._reset(device)


def _value(stats: Nested, field: str, kind: str) -> int:
    return int(stats.get(field, {}).get("all", {}).get(kind, 0))


def _with_peaks(stats: Nested, hidden: Nested | None) -> Nested:
    """The same counters with every `peak` at least as high as in `hidden`."""
    if not hidden:
        return stats
    merged: Nested = {}
    for name, value in stats.items():
        before = hidden.get(name)
        if isinstance(value, dict):
            merged[name] = _with_peaks(value, before if isinstance(before, dict) else {})
        elif name == "peak" and isinstance(before, int):
            merged[name] = max(value, before)
        else:
            merged[name] = value
    return merged
