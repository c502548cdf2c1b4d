"""The files that a run writes as it goes: metrics of each step, and the memory use of phases between steps."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from planner.evidence.jsonl import append_lines
from planner.file_writing import write_file
from planner.hardware.nvml import DeviceMemory, HostUse, Monitor
from planner.untrusted import json_object, read_lines
from trainers.measuring.counters import TorchMemory

COUNTERS = ("allocated_bytes", "reserved_bytes", "retries", "device_bytes", "host_bytes")


class Watch:
    """The peaks since the last call: tensors, the allocator's segments, the device as NVML reports it, and host RAM."""

    def __init__(self, device: torch.device) -> None:
        self.torch = TorchMemory(device)
        self.memory: Monitor
        if device.type == "cuda":
            self.memory = DeviceMemory(str(torch.cuda.get_device_properties(device).uuid), HostUse())
        else:
            self.memory = Monitor(HostUse())
        self.memory.__enter__()

    def peaks(self) -> dict[str, int | None]:
        """Peak bytes of each counter, and retries, since the last call; None for counters that cannot be read, for
        example without a GPU."""
        values = {"device_bytes": None, **self.torch.take(), **self.memory.take()}
        return {name: values[name] for name in COUNTERS}

    def close(self) -> None:
        """Stops the sampling thread."""
        self.memory.__exit__(None, None, None)


class MemoryLog:
    """A file of JSON lines with the memory of a run outside its steps: a line for each phase (`load`, `encode`,
    `denoise`, `decode`, `save`) and for a step that failed. Lines are only ever added."""

    def __init__(self, path: Path | None, watch: Watch) -> None:
        """``path``: None on all ranks except the first, which write nothing."""
        self.path, self.watch = path, watch

    @contextlib.contextmanager
    def phase(self, name: str, step: int = 0) -> Iterator[dict[str, Any]]:
        """A context that writes one line about a phase after ``step`` steps, even if it ends in an error. Yields the
        line's facts, to which more can be added."""
        facts: dict[str, Any] = {"phase": name, "step": step}
        self.watch.peaks()
        began, failed = time.perf_counter(), True
        try:
            yield facts
            failed = False
        finally:
            self._write(facts, began, failed)

    @contextlib.contextmanager
    def failing_step(self, number: int) -> Iterator[None]:
        """A context that writes a line about step ``number`` if it ends in an error; `Metrics` has the other steps."""
        began = time.perf_counter()
        try:
            yield
        except BaseException:
            self._write({"phase": "train", "step": number}, began, True)
            raise

    def _write(self, facts: dict[str, Any], began: float, failed: bool) -> None:
        if self.path is None:
            return
        times = {"unix_seconds": unix_seconds(), "seconds": round(time.perf_counter() - began, 6)}
        append_lines(self.path, [{**facts, **times, **self.watch.peaks(), **({"failed": True} if failed else {})}])


class Metrics:
    """A file of JSON lines with the metrics of a run, one line per step. A resumed run continues after the step it
    resumes from; the lines of later steps, which are repeated, are moved to the memory log."""

    def __init__(self, path: Path, step: int, log: MemoryLog) -> None:
        lines = [line for line in _lines(path) if type(line.get("step")) is int]
        # If a run was killed between writing the two files, the log already has these lines.
        logged = [] if log.path is None else _lines(log.path)
        repeated = [{**line, "repeated": True} for line in lines if line["step"] > step and "loss" in line]
        if log.path is not None:
            append_lines(log.path, [line for line in repeated if line not in logged])
        write_file(path, "".join(json.dumps(line) + "\n" for line in lines if line["step"] <= step))
        self._file = path.open("a", encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        """Appends one line to the metrics and flushes it."""
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()


class LateLoss:
    """The loss of one step, other numbers that its ranks agreed on, and the step's duration, read one step late.

    Reading a tensor from a GPU waits for everything launched before. So the numbers are copied to the host as part of
    their step, and read after the next step has been launched, which keeps the GPU busy.
    """

    def __init__(self, device: torch.device) -> None:
        """Create it where the step begins."""
        self.device = device
        self._began: Any = self._moment()
        self._ended: Any = None
        self._values: torch.Tensor | None = None

    def keep(self, values: torch.Tensor) -> None:
        """Starts the copy of a few numbers, (n,), to host RAM; called where the step ends."""
        # With non_blocking, `to` copies into pinned memory (at::_to_copy), which makes the copy asynchronous.
        self._values = values.to("cpu", non_blocking=True)
        self._ended = self._moment()

    def read(self) -> tuple[list[float], float]:
        """The numbers, and the step's seconds on the device; waits only for that step."""
        assert self._values is not None
        if isinstance(self._began, float):
            return self._values.tolist(), self._ended - self._began
        self._ended.synchronize()
        return self._values.tolist(), self._began.elapsed_time(self._ended) / 1000

    def _moment(self) -> Any:
        """A recorded CUDA event, or on the CPU the time in seconds."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def unix_seconds() -> float:
    """The current time in seconds since 1970, to milliseconds."""
    return round(time.time(), 3)


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, without damaged ones: a resumed run does not depend on them."""
    if not path.is_file():
        return []
    return [found for line in read_lines(path) if line.endswith(b"\n") and (found := json_object(line)) is not None]
