"""Reads the memory counters of one phase after another: torch's allocator, NVML and host RAM. The observers of NVML and
host RAM are in ``planner.hardware.nvml``; that of torch's allocator is here."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from planner.hardware.nvml import DeviceMemory, host_peak_bytes
from planner.units import MIB
from trainers.memory.shared_ram import counted_elsewhere


class FactSink(Protocol):
    """Receives reported facts; ``trainers.worker.ResultFile`` is one."""

    facts: dict[str, Any]
    """all facts reported so far"""

    def tell(self, **facts: Any) -> None:
        """Reports facts by name; later ones replace earlier ones of the same name."""


class TorchMemory:
    """The counters of torch's allocator: peaks of allocated and reserved bytes, how often it emptied its cache and
    tried again (`retries`), and how often that failed (`ooms`)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.missing = [] if device.type == "cuda" else ["allocated_bytes, reserved_bytes, retries, ooms: no GPU"]
        self._before = self._counts()

    def sample(self) -> None:
        """Does nothing: the allocator keeps its peaks itself."""

    def take(self) -> dict[str, int | None]:
        """Peak allocated and reserved bytes, retries and out-of-memory errors since the last call; resets the peaks.
        All None without a GPU."""
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
        """Bytes currently allocated by torch's allocator; None without a GPU."""
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else None

    def _counts(self) -> dict[str, int]:
        if self.device.type != "cuda":
            return {}
        stats = torch.cuda.memory_stats(self.device)
        return {"retries": int(stats.get("num_alloc_retries", 0)), "ooms": int(stats.get("num_ooms", 0))}


class Meter:
    """Measures one phase after another on one device, and reports when each begins and ends."""

    def __init__(self, device: torch.device, watch: DeviceMemory | None, report: FactSink) -> None:
        self.device = device
        self.watch = watch
        self.report = report
        self.torch = TorchMemory(device)
        self.marks: list[tuple[str, float]] = []
        """(phase, its start in microseconds since 1970)"""

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
            self.report.tell(host_bytes=host_peak_bytes() - counted_elsewhere())

    def _keep_trace(self, name: str, seconds: float, allocated: tuple[int | None, ...]) -> None:
        """Adds a phase's device memory over time to the report, if there is a GPU."""
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
