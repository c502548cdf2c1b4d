"""What is seen while a run goes on: one line of numbers a step, and the peaks of the GPU between two of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from planner.hardware.nvml import DeviceMemory
from trainers.measuring.counters import TorchMemory


class Watch:
    """The peaks since the last look: tensors, the allocator's segments, and the device as NVML sees it."""

    def __init__(self, device: torch.device) -> None:
        self.torch = TorchMemory(device)
        self.memory: DeviceMemory | None = None
        if device.type == "cuda":
            self.memory = DeviceMemory(str(torch.cuda.get_device_properties(device).uuid)).__enter__()

    def peaks(self) -> dict[str, int | None]:
        """Peak bytes of each counter, and retries, since the last call; None for each without a GPU."""
        card = self.memory.take() if self.memory else {}
        allocator = self.torch.take()
        names = ("allocated_bytes", "reserved_bytes", "retries")
        return {**{name: allocator[name] for name in names}, "device_bytes": card.get("device_bytes")}

    def close(self) -> None:
        """Stops the sampling thread."""
        if self.memory is not None:
            self.memory.__exit__(None, None, None)


class Metrics:
    """A file of JSON lines with the metrics of a run, one line per step. A resumed run continues after the step that it
    was resumed from."""

    def __init__(self, path: Path, step: int) -> None:
        earlier = [line for line in _lines(path) if line["step"] <= step]
        partial = path.with_name(f"{path.name}.part")
        partial.write_text("".join(json.dumps(line) + "\n" for line in earlier), encoding="utf-8")
        partial.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        """Appends one line to the metrics and flushes it."""
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()


def _lines(path: Path) -> list[dict[str, Any]]:
    """What is written so far, without a last line that was cut off."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
