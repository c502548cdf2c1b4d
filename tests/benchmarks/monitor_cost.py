"""What watching costs: seconds of a training step with the monitor and without, interleaved in one process.

    python -m tests.benchmarks.monitor_cost [STEPS]

On a GPU it asks NVML. Elsewhere a library stands in for it whose every call takes as long as NVML's counters do (50 us,
and 1 ms for a list of processes, outside Python), and the steps are a tiny model's on the CPU: all Python, so the worst
case for a thread beside them. Prints the ratio of the medians with the 95 % interval of a bootstrap, and the time in
which the monitor's thread held the processor, which a busy machine does not change.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml

from planner.hardware import nvml
from tests.benchmarks.train_loop import report

BLOCK = 10
"""Steps with, then as many without: a monitor lives as long as a run, so its start is not what matters."""
COUNTER_MICROSECONDS, LIST_MICROSECONDS = 50, 1000


def stand_in() -> str:
    """Replaces NVML's calls by ones that only take time; returns the card's UUID."""
    wait = ctypes.CDLL(None).usleep  # lets other threads run, as NVML's calls do

    def answer(microseconds: int, value: Any) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            wait(microseconds)
            return value

        return call

    listed = [SimpleNamespace(pid=os.getpid(), usedGpuMemory=2**30)]
    for name, call in {
        "nvmlInit": answer(0, None),
        "nvmlSystemGetDriverVersion": answer(0, "none"),
        "nvmlDeviceGetHandleByUUID": answer(0, "card"),
        "nvmlDeviceGetMemoryInfo": answer(COUNTER_MICROSECONDS, SimpleNamespace(used=2**30)),
        **{f"nvmlDeviceGet{kind}RunningProcesses": answer(LIST_MICROSECONDS, listed) for kind in nvml.KINDS},
    }.items():
        setattr(pynvml, name, call)
    return "GPU-1"


class Timed:
    """The processor time of the thread it is sampled in."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.seconds = 0.0

    def sample(self) -> None:
        """Asks the kernel."""
        self.seconds = time.thread_time()

    def take(self) -> dict[str, int | None]:
        """Nothing of a card."""
        return {}


def main(steps: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        os.environ["VPLAN_HOME"] = str(root / "home")
        import torch

        torch.set_num_threads(1)
        from tests.trainers import runs
        from trainers.train import TrainingRun

        uuid = str(torch.cuda.get_device_properties(0).uuid) if torch.cuda.is_available() else stand_in()
        place = runs.Place(root, "wan")
        request = place.request(root / "out", place.plan(batch_size=8), steps=2 * steps + 2 * BLOCK)
        request = request.replace(device="cuda" if torch.cuda.is_available() else "cpu", checkpoint_every=10**5)
        training = TrainingRun(request, runs.ReportInMemory())
        watched, plain, busy, wall = [], [], 0.0, 0.0

        def run(number: int, found: list[float]) -> None:
            for step in range(number * BLOCK, (number + 1) * BLOCK):
                began = time.perf_counter()
                training._step(step)
                found.append(time.perf_counter() - began)

        run(0, [])
        for number in range(1, 2 * steps // BLOCK, 2):
            timed = Timed()
            began = time.perf_counter()
            with nvml.DeviceMemory(uuid, timed):
                run(number, watched)
            busy, wall = busy + timed.seconds, wall + time.perf_counter() - began
            run(number + 1, plain)
        training.loader.close()
    report(watched, plain)
    print(f"the monitor's thread ran for {busy / wall:.2%} of the time")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 120)
