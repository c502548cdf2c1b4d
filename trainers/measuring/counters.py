"""The counters of one phase after another: torch's allocator, NVML, host RAM. They come from observers, as
``planner.hardware.nvml`` describes them; torch's own is here."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from planner.hardware.nvml import DeviceMemory, host_peak_bytes
from planner.units import MIB


class FactSink(Protocol):
    """A place that facts are reported to; ``trainers.worker.ResultFile`` is one."""

    facts: dict[str, Any]
    """all of them so far"""

    def tell(self, **facts: Any) -> None:
        """Reports facts by name; later ones replace earlier ones of the same name."""


class TorchMemory:
    """What torch's allocator counted: its two peaks, and how often it emptied its cache (`retries`) or gave up."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.missing = [] if device.type == "cuda" else ["allocated_bytes, reserved_bytes, retries, ooms: no GPU"]
        self._before = self._counts()

    def sample(self) -> None:
        """Does nothing: the allocator keeps its peaks itself."""

    def take(self) -> dict[str, int | None]:
        """Peak allocated and reserved bytes, retries and out-of-memory errors since the last call; the peaks start
        over. All None without a GPU."""
        if self.device.type != "cuda":
            return dict.fromkeys(("allocated_bytes", "reserved_bytes", "retries", "ooms"))
        values: dict[str, int | None] = {
            "allocated_bytes": torch.cuda.max_memory_allocated(self.device),
            "reserved_bytes": torch.cuda.max_memory_reserved(self.device),
        }
        torch.cuda.reset_peak_memory_stats(self.device)
        before, self._before = self._before, self._counts()
        return {**values, **{name: count - before[name] for name, count in self._before.items()}}

    def allocated_bytes(self) -> int | None:
        """Bytes that torch's allocator has allocated now; None without a GPU."""
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else None

    def _counts(self) -> dict[str, int]:
        if self.device.type != "cuda":
            return {}
        stats = torch.cuda.memory_stats(self.device)
        return {"retries": int(stats.get("num_alloc_retries", 0)), "ooms": int(stats.get("num_ooms", 0))}


class Meter:
    """Counts one phase after another on one device and tells each as it begins and ends."""

    def __init__(self, device: torch.device, watch: DeviceMemory | None, report: FactSink) -> None:
        self.device = device
        self.watch = watch
        self.report = report
        self.torch = TorchMemory(device)
        self.marks: list[tuple[str, float]] = []
        """(phase, microseconds since 1970 when it began)"""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A context that measures a phase of this name, and reports it even when it ends in an error."""
        self.report.tell(phase=name)
        self.marks.append((name, time.time() * 1e6))
        self._take()
        began, before = time.perf_counter(), self.torch.allocated_bytes()
        if self.watch:
            self.watch.take_trace()
        try:
            yield
            self.synchronise()
        finally:
            seconds, values = time.perf_counter() - began, self._take()
            self.report.facts["phases"][name] = values
            self._keep_trace(name, seconds, (before, values["allocated_bytes"], self.torch.allocated_bytes()))
            self.report.tell(host_bytes=host_peak_bytes())

    def _keep_trace(self, name: str, seconds: float, allocated: tuple[int | None, ...]) -> None:
        """How a phase went, where there is a GPU to watch."""
        if self.watch is None:
            return
        trace = self.report.facts.setdefault("trace", {"schema": 1, "phases": {}})
        trace["phases"][name] = {
            "seconds": round(seconds, 3),
            "device_mib": self.watch.take_trace(),
            "allocated_mib": [nbytes // MIB for nbytes in allocated if nbytes is not None] or None,
        }

    def synchronise(self) -> None:
        """Waits until the GPU has finished all queued work; does nothing without a GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _take(self) -> dict[str, int | None]:
        return {"device_bytes": None, **self.torch.take(), **(self.watch.take() if self.watch else {})}
