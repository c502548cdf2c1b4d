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
from planner.foreign.check import Checked, check_case
from planner.spec.plan import PhaseName, PhasePeak

ALLOCATED, DEVICE = 0.02, 0.05
PHASES = ("load", "encode", "first_step", "train", "optimizer")
"""What a rehearsal of three steps reaches: no sample and no checkpoint."""


def rows(outcome: str = "ok") -> Iterator[dict[str, Any]]:
    """The rows of `profiles/rehearsals/commands`, by trainer, that ran, or with "oom" that ran out. They hold the
    commands, with the dataset's size and batch as flags, or its `shape` beside, their `config`, and the `files` that
    the config names. `read` is what is given to `vplan check` where the command names no config."""
    for file in sorted((profiles.REHEARSALS / "commands").glob("*.jsonl")):
        found = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        yield from (row for row in found if row["measured"]["outcome"] == outcome)


def checked_phases(row: dict[str, Any], folder: Path) -> dict[PhaseName, PhasePeak]:
    """What `vplan check` says a row's command takes until its third step is over, by phase. Its files are written into
    `folder`."""
    phases = checked(row, folder).outcome.estimate.phases
    return {phase: peak for phase, peak in phases.items() if phase in PHASES}


def checked(row: dict[str, Any], folder: Path) -> Checked:
    """What `vplan check` says of a row's command. Its files are written into `folder`."""
    files = row.get("files", {}) | ({"config.json": row["config"]} if "config" in row else {})
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    (folder / "train.sh").write_text(shlex.join(row["command"]), encoding="utf-8")
    dialect, given = dialects.read_script(from_file(folder / row.get("read", "train.sh")))
    shape = dict(zip(("frames", "height", "width"), row.get("shape", ()), strict=False))
    machine = {"gpu": row["env"]["gpu"].removeprefix("virtual "), "torch": ".".join(row["env"]["torch"].split(".")[:2])}
    return check_case(settle(dialect, given, shape, machine), search=False)


def errors(row: dict[str, Any], phases: dict[PhaseName, PhasePeak]) -> tuple[float, float]:
    """How far `vplan check` is from what was rehearsed: of allocated bytes, and of the device's."""
    allocated = max(peak.allocated_bytes for peak in phases.values())
    device = max(peak.device_bytes for peak in phases.values())
    return allocated / row["measured"]["allocated_bytes"] - 1, device / row["measured"]["device_bytes"] - 1


def highest(row: dict[str, Any], phases: dict[PhaseName, PhasePeak]) -> tuple[str, str]:
    """The phase with the most allocated bytes: said, and rehearsed."""
    measured = row["measured"]
    by_phase = measured.get("phases", {})
    rehearsed = max(by_phase, key=lambda phase: by_phase[phase]["allocated_bytes"], default=measured["phase"])
    return max(phases, key=lambda phase: phases[phase].allocated_bytes), rehearsed


def main() -> None:
    """Prints the table."""
    found, same = [], 0
    for row in rows():
        with tempfile.TemporaryDirectory() as folder:
            phases = checked_phases(row, Path(folder))
        found.append(errors(row, phases))
        said, rehearsed = highest(row, phases)
        same += said == rehearsed
        other = "" if said == rehearsed else f"  {said}, rehearsed {rehearsed}"
        print(f"{row['id']:68}{found[-1][0]:+8.1%}{found[-1][1]:+8.1%}{other}", flush=True)
    for name, at, bound in (("allocated", 0, ALLOCATED), ("device", 1, DEVICE)):
        off = [abs(error[at]) for error in found]
        within = sum(error <= bound for error in off)
        print(
            f"{name}: {len(found)} commands, median {statistics.median(off):.1%}, worst {max(off):.1%}, "
            f"{within} within {bound:.0%}"
        )
    print(f"highest in the same phase: {same}")


if __name__ == "__main__":
    main()
