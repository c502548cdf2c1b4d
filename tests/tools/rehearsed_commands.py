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
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import profiles
from planner import dialects
from planner.dialects.base.script import from_file
from planner.estimate.estimate import assess
from planner.estimate.peak_moment import OPTIMIZER_MOMENT, describe_moment
from planner.foreign.case import Case, read_case
from planner.foreign.check import Checked, check_case
from planner.foreign.pricing import Pricing

ALLOCATED, DEVICE = 0.02, 0.05
PHASES = ("load", "encode", "first_step", "train", "optimizer")
"""What a rehearsal of three steps reaches: no sample and no checkpoint."""


def rows(outcome: str = "ok") -> Iterator[dict[str, Any]]:
    """The rows of `profiles/rehearsals/commands`, by trainer, that ran, or with "oom" that ran out. They hold the
    commands, with the dataset's size and batch as flags, or its `shape` beside, their `config`, and the `files` that
    the config names, as text where they are no JSON. `read` is what is given to `vplan check` where the command names
    no config."""
    for file in sorted((profiles.REHEARSALS / "commands").glob("*.jsonl")):
        found = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        yield from (row for row in found if row["measured"]["outcome"] == outcome)


def facts(row: dict[str, Any]) -> set[Hashable]:
    """A trainer's scripts, flags and words of its config, by which `covering` chooses rows."""
    trainer = row["trainer"]["repository"]
    words = {word.partition("=")[0] for word in row["command"] if word.startswith("--") or word.endswith(".py")}
    written = (row.get("config"), *row.get("files", {}).values())
    return {(trainer, word) for word in words} | {(trainer, *leaf) for config in written for leaf in _leaves(config)}


def _leaves(config: Any, key: str = "") -> Iterator[tuple[str, str | int]]:
    """The switches and words that a config says, under their keys, and the stage of ZeRO."""
    if isinstance(config, dict):
        for name, value in config.items():
            yield from _leaves(value, name)
    elif isinstance(config, list):
        for value in config:
            yield from _leaves(value, key)
    elif isinstance(config, bool | str) or key == "stage":
        yield key, config


def checked(row: dict[str, Any], folder: Path) -> Checked:
    """What `vplan check` says of a row's command. Its files are written into `folder`."""
    return check_case(case_of(row, folder), search=False)


def case_of(row: dict[str, Any], folder: Path) -> Case:
    """A row's command as `vplan check` reads it."""
    files = row.get("files", {}) | ({"config.json": row["config"]} if "config" in row else {})
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "train.sh").write_text(shlex.join(row["command"]), encoding="utf-8")
    dialect, given = dialects.read_script(from_file(folder / row.get("read", "train.sh")))
    shape = dict(zip(("frames", "height", "width"), row.get("shape", ()), strict=False))
    machine = {"gpu": row["env"]["gpu"].removeprefix("virtual "), "torch": ".".join(row["env"]["torch"].split(".")[:2])}
    return read_case(dialect, given, shape, machine)


class Comparison(NamedTuple):
    """A command's answer beside its rehearsal, until its third step is over."""

    allocated: float
    """how far off"""
    device: float
    """the same; with what the allocator leaves in pieces, as a rehearsal has it"""
    said: str
    """phase with the most allocated bytes"""
    rehearsed: str


def compare(row: dict[str, Any], folder: Path) -> Comparison:
    """A row's rehearsal and what `vplan check` says, which is `assess` told in words. Files are written to `folder`."""
    case, measured = case_of(row, folder), row["measured"]
    found = assess(case.configuration, Pricing(case).facts(case.configuration), case.trainer)
    by_phase = measured.get("phases", {})
    reached = set(PHASES) - ({"encode"} if by_phase and "encode" not in by_phase else set())  # its caches were there
    phases = {phase: peak for phase, peak in found.estimate.phases.items() if phase in reached}
    device = max(peak.device_bytes for peak in phases.values())
    if found.kept_bytes and found.estimate.peak.phase in phases:
        device = found.kept_bytes
    played = [entry for entry in found.played if entry.phase in reached]
    top = max(played, key=lambda entry: entry.replayed.allocated_peak_bytes)
    said = top.phase
    if said == "first_step" and describe_moment(top, found.estimate.strategy) == OPTIMIZER_MOMENT:
        said = "optimizer"  # as a rehearsal counts it
    rehearsed = max(by_phase, key=lambda phase: by_phase[phase]["allocated_bytes"], default=measured["phase"])
    allocated = max(peak.allocated_bytes for peak in phases.values())
    errors = allocated / measured["allocated_bytes"] - 1, device / measured["device_bytes"] - 1
    return Comparison(*errors, said, rehearsed)


def main() -> None:
    """Prints the table."""
    found: list[Comparison] = []
    for row in rows():
        with tempfile.TemporaryDirectory() as folder:
            found.append(compare(row, Path(folder)))
        allocated, device, said, rehearsed = found[-1]
        other = "" if said == rehearsed else f"  {said}, rehearsed {rehearsed}"
        print(f"{row['id']:68}{allocated:+8.1%}{device:+8.1%}{other}", flush=True)
    for name, bound in (("allocated", ALLOCATED), ("device", DEVICE)):
        off = [abs(getattr(each, name)) for each in found]
        within = sum(error <= bound for error in off)
        print(
            f"{name}: {len(found)} commands, median {statistics.median(off):.1%}, worst {max(off):.1%}, "
            f"{within} within {bound:.0%}"
        )
    print(f"highest in the same phase: {sum(each.said == each.rehearsed for each in found)}")


if __name__ == "__main__":
    main()
