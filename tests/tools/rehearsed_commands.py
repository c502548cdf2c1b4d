"""Other trainers' commands that were rehearsed in their own code, and what `vplan check` says of each.

    python -m tests.tools.rehearsed_commands

prints a line for each and the figures of README: the median and the worst error, and how many are within 2 % of what
was allocated and within 5 % of the device.
"""

from __future__ import annotations

import json
import shlex
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import profiles
from planner import dialects
from planner.dialects.base.script import from_file
from planner.foreign.case import settle
from planner.foreign.check import check_case

ALLOCATED, DEVICE = 0.02, 0.05
PHASES = ("load", "encode", "first_step", "train", "optimizer")
"""What a rehearsal of three steps reaches: no sample and no checkpoint."""


def rows() -> Iterator[dict[str, Any]]:
    """The rows of `profiles/rehearsals/commands`, by trainer. They hold the commands that ran, with the dataset's size
    and batch as flags, or its `shape` beside, their `config`, and the `files` that the config names. `read` is what is
    given to `vplan check` where the command names no config."""
    for file in sorted((profiles.REHEARSALS / "commands").glob("*.jsonl")):
        yield from map(json.loads, file.read_text(encoding="utf-8").splitlines())


def checked_peak(row: dict[str, Any], folder: Path) -> tuple[int, int]:
    """Bytes that `vplan check` says a row's command takes until its third step is over: allocated, and of the device.
    Its files are written into `folder`."""
    files = row.get("files", {}) | ({"config.json": row["config"]} if "config" in row else {})
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    (folder / "train.sh").write_text(shlex.join(row["command"]), encoding="utf-8")
    dialect, given = dialects.read_script(from_file(folder / row.get("read", "train.sh")))
    shape = dict(zip(("frames", "height", "width"), row.get("shape", ()), strict=False))
    machine = {"gpu": row["env"]["gpu"].removeprefix("virtual "), "torch": ".".join(row["env"]["torch"].split(".")[:2])}
    phases = check_case(settle(dialect, given, shape, machine)).outcome.estimate.phases
    reached = [peak for phase, peak in phases.items() if phase in PHASES]
    return max(peak.allocated_bytes for peak in reached), max(peak.device_bytes for peak in reached)


def errors(row: dict[str, Any], folder: Path) -> tuple[float, float]:
    """How far `vplan check` is from what was rehearsed: of allocated bytes, and of the device's."""
    allocated, device = checked_peak(row, folder)
    return allocated / row["measured"]["allocated_bytes"] - 1, device / row["measured"]["device_bytes"] - 1


def main() -> None:
    """Prints the table."""
    found = []
    for row in rows():
        with tempfile.TemporaryDirectory() as folder:
            found.append(errors(row, Path(folder)))
        print(f"{row['id']:60}{found[-1][0]:+8.1%}{found[-1][1]:+8.1%}", flush=True)
    for name, at, bound in (("allocated", 0, ALLOCATED), ("device", 1, DEVICE)):
        off = [abs(error[at]) for error in found]
        within = sum(error <= bound for error in off)
        print(
            f"{name}: {len(found)} commands, median {statistics.median(off):.1%}, worst {max(off):.1%}, "
            f"{within} within {bound:.0%}"
        )


if __name__ == "__main__":
    main()
