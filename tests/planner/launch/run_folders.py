"""Folders of training runs with numbers of our own choice, as a run on a GPU leaves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from planner.units import GIB

HOSTILE = '<script>alert("1")</script> & <b>'


def peak(allocated: float, reserved: float, device: float) -> dict[str, int]:
    names = ("allocated_bytes", "reserved_bytes", "device_bytes")
    return {name: round(value * GIB) for name, value in zip(names, (allocated, reserved, device), strict=True)}


FORECAST: dict[str, Any] = {
    "phases": {
        "encode": peak(9, 9.5, 10),
        "load": peak(10, 10.2, 11),
        "first_step": peak(19, 20, 20.5),
        "train": peak(19.4, 20.6, 21),
        "optimizer": peak(12, 20.6, 21.2),
        "save": peak(10, 20.6, 21),
        "decode": peak(16, 17, 18),
    },
    "low_share": 0.95,
    "high_share": 1.05,
    "budget_bytes": round(23.5 * GIB),
    "host_phases": {"train": 9 * GIB, "save": 11 * GIB},
    "step_seconds": 1.5,
    "step_seconds_high": 2.5,
    "basis": "recorded",
}


class RunFolder:
    """Writes lines as a run does, on a clock of its own."""

    def __init__(self, folder: Path, *, device: str = "cuda", forecast: dict[str, Any] | None = FORECAST) -> None:
        self.folder, self.device, self.forecast = folder, device, forecast
        self.clock = 1_764_000_000.0
        self.metrics: list[dict[str, Any]] = []
        self.memory: list[dict[str, Any]] = []
        (folder / "run").mkdir(parents=True, exist_ok=True)
        request = {"steps": 1000, "plan": {"job": {"model": HOSTILE}}}
        (folder / "run" / "request.json").write_text(json.dumps(request))

    def line(self, phase: str, step: int, seconds: float, *peaks: float, **more: Any) -> dict[str, Any]:
        self.clock += seconds
        times = {"unix_seconds": round(self.clock, 3), "seconds": seconds}
        counters = peak(*peaks) if self.device == "cuda" else dict.fromkeys(peak(0, 0, 0))
        return {"phase": phase, "step": step, **times, **counters, "retries": 0, "host_bytes": 8 * GIB, **more}

    def phase(self, phase: str, step: int, seconds: float, *peaks: float, **more: Any) -> None:
        self.memory.append(self.line(phase, step, seconds, *peaks, **more))

    def start(self, step: int) -> None:
        self.phase("encode", 0, 5.0, 9, 9.4, 9.9)
        self.phase("load", step, 40.0, 10, 10.2, 11, device=self.device, missing=[], forecast=self.forecast)

    def step(self, step: int, loss: float = 1.0, seconds: float = 2.0, device: float = 21.0) -> dict[str, Any]:
        line = self.line("train", step, seconds, device - 2, device - 0.5, device)
        return {**line, "loss": loss, "learning_rate": 1e-4}

    def steps(self, first: int, last: int, **numbers: float) -> None:
        self.metrics += [self.step(number, **numbers) for number in range(first, last + 1)]

    def samples(self, step: int, *prompts: str) -> None:
        files = [f"step-{step:08d}-{number}.png" for number in range(len(prompts))]
        (self.folder / "samples").mkdir(exist_ok=True)
        for name in files:
            (self.folder / "samples" / name).write_bytes(b"picture of " + name.encode())
        line = {"step": step, "samples": files, "prompts": list(prompts), "note": None}
        self.metrics.append({**line, "unix_seconds": self.clock, "seconds": 1.0})

    def stop(self, seconds: float) -> None:
        self.clock += seconds

    def write(self) -> Path:
        for name, lines in (("metrics", self.metrics), ("memory", self.memory)):
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (self.folder / f"{name}.jsonl").write_text(text)
        return self.folder


def killed_and_resumed(folder: Path) -> Path:
    """40 steps of which 33 were kept, three days of nothing, and 67 more."""
    run = RunFolder(folder)
    run.start(0)
    run.steps(1, 33)
    run.phase("save", 33, 3.0, 10, 20.5, 21)
    run.samples(33, HOSTILE, "a dog")
    run.memory += [{**run.step(number, device=22.0), "repeated": True} for number in range(34, 41)]
    run.stop(3 * 86_400)
    run.start(33)
    run.steps(34, 100, seconds=3.0)
    run.phase("decode", 100, 6.0, 17, 19, 19.5)
    run.samples(100, HOSTILE, "a dog")
    return run.write()
