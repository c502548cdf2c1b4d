"""The counters of one phase after another: torch's allocator, NVML, host RAM. A new counter is a line in ``Meter``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from planner.monitor import DeviceMemory, host_peak_bytes


class Told(Protocol):
    """Where facts go: ``trainers.probe.Report``."""

    told: dict[str, Any]

    def tell(self, **facts: Any) -> None:
        """Adds facts."""


class Meter:
    """Counts one phase after another on one device and tells each as it begins and ends."""

    def __init__(self, device: torch.device, watch: DeviceMemory | None, report: Told) -> None:
        self.device = device
        self.watch = watch
        self.report = report
        self.marks: list[tuple[str, float]] = []
        """(phase, microseconds since 1970 when it began)"""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures what runs inside; also when it ends in an error."""
        self.report.tell(phase=name)
        self.marks.append((name, time.time() * 1e6))
        before = self._retries()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        if self.watch:
            self.watch.take_peak()
        try:
            yield
            self.synchronise()
        finally:
            retries = self._retries()
            self.report.told["phases"][name] = {
                **self._peaks(),
                "device_bytes": self.watch.take_peak() if self.watch else None,
                "retries": None if retries is None or before is None else retries - before,
            }
            self.report.tell(host_bytes=host_peak_bytes())

    def synchronise(self) -> None:
        """Waits until the GPU has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _peaks(self) -> dict[str, int | None]:
        if self.device.type != "cuda":
            return {"allocated_bytes": None, "reserved_bytes": None}
        return {
            "allocated_bytes": torch.cuda.max_memory_allocated(self.device),
            "reserved_bytes": torch.cuda.max_memory_reserved(self.device),
        }

    def _retries(self) -> int | None:
        if self.device.type != "cuda":
            return None
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0))
