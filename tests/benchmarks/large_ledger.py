"""What a ledger of a million rows costs an estimate: under a second and 100 MB more than none.

    python -m tests.benchmarks.large_ledger [ROWS]

Writes so many rows into a folder of its own (2 KB each), of which the newest are of other models and cards, a few near
the end of the model and card that is asked about, and runs `vplan estimate` with that ledger and without. Needs 2 GB of
disk.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

import vplan
from tests.trials.inputs import ROW

WORDS = ("estimate", "--model", "wan2.1-t2v-1.3b", "--gpu", "rtx4090", "--gradient-checkpointing", "full", "--frames",
         "17", "--json")  # fmt: skip
MOST_SECONDS, MOST_BYTES = 1.0, 100 * 10**6
ROUNDS = 5


def line(model: str, gpu: str, number: int) -> bytes:
    """A row of a probe that was fine, as long as ours are."""
    job = {"model": model, "frames": 17, "height": 480, "width": 832}
    measured = {"outcome": "ok", "allocated_bytes": 10**10 + number, "reserved_bytes": 11 * 10**9}
    measured |= {"device_bytes": 12 * 10**9, "step_seconds": 3.0}
    details = {"log": "x" * 1000}
    return json.dumps(ROW | {"job": job, "machine": {"gpu": gpu}, "measured": measured, "details": details}).encode()


def write(path: Path, rows: int) -> None:
    """A tenth of the rows are of the model and card that is asked about, and the last thousand are of others."""
    kinds = [line("wan2.1-t2v-1.3b", "h100-80gb", n) for n in range(9)] + [line("wan2.1-t2v-1.3b", "rtx4090", 9)]
    block = b"\n".join(kinds) + b"\n"
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        for _ in range(rows // len(kinds)):
            file.write(block)
        file.write((kinds[0] + b"\n") * 1000)


def peak_bytes(home: Path) -> int:
    """What an estimate says of the device, which the measurements correct."""
    command = vplan.command(*WORDS)
    said = subprocess.run(command, stdout=subprocess.PIPE, env={**os.environ, "VPLAN_HOME": str(home)}, check=False)
    return int(json.loads(said.stdout)["peak"]["device_bytes"])


def cost(home: Path) -> tuple[float, int]:
    """CPU seconds and the most resident bytes of one estimate."""
    environment = {**os.environ, "VPLAN_HOME": str(home)}
    process = psutil.Popen(vplan.command(*WORDS), stdout=subprocess.DEVNULL, env=environment)
    most, seconds = 0, 0.0
    while process.poll() is None:
        try:
            most = max(most, process.memory_info().rss)
            times = process.cpu_times()
            seconds = times.user + times.system
        except psutil.NoSuchProcess:
            break
        time.sleep(0.01)
    assert process.wait() in (0, 3)
    return seconds, most


def main(rows: int = 1_000_000) -> None:
    with tempfile.TemporaryDirectory() as name:
        full, none = Path(name) / "full", Path(name) / "none"
        write(full / "ledger.jsonl", rows)
        none.mkdir()
        size = (full / "ledger.jsonl").stat().st_size
        assert peak_bytes(full) != peak_bytes(none), "the ledger is not read"  # from here on predictions are kept
        found = {home: [cost(home) for _ in range(ROUNDS)] for home in (none, full)}
    seconds, memory = ([statistics.median(each[at] for each in found[home]) for home in found] for at in (0, 1))
    print(f"{rows:,} rows, {size / 1e9:.1f} GB: {seconds[0]:.2f} to {seconds[1]:.2f} s of CPU,", end=" ")
    print(f"{memory[0] / 1e6:.0f} to {memory[1] / 1e6:.0f} MB (medians of {ROUNDS})")
    assert seconds[1] - seconds[0] < MOST_SECONDS and memory[1] - memory[0] < MOST_BYTES


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
