"""What was recorded with fake tensors, and what CUDA's code does: one plan of each model family, event by event.

    VPLAN_CUDA_PYTHON=cuda/bin/python python -m tests.tools.compare_with_rehearsals FOLDER [MODEL...]

Of each family the smallest model of the grid `all-models`, with a plan of its own there that trains a LoRA with
checkpointing on one H100: rehearsed as `vplan probe` runs it, and every allocation and free of a MiB and more held
against the tape, laid out for the same plan. A line for each phase has the events of both, how many places differ (with
+: the two could not be brought together behind the last of them), of how many kinds they are whatever the block, the
peaks, and the commonest kinds. FOLDER keeps the histories, which `vplan accuracy --history FILE` shows place by place;
one that is there is not made anew.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import profiles
from planner.catalog import lookup
from planner.evidence.allocator_history import (
    LEAST_BYTES,
    AllocatorEvent,
    Difference,
    PhaseComparison,
    compare_phase,
    on_tape,
    probed_run,
    read_history,
)  # fmt: skip
from planner.probe.fork_server import ForkServer
from planner.probe.grid_file import GridEntry, read_grid
from planner.probe.grid_schedule import candidate
from planner.probe.probe import TIME_LIMIT
from planner.rehearsal.probe_runner import RehearsalRunner, cuda_interpreter, torch_release
from planner.spec.job import Machine
from planner.units import MIB
from tests.cuda_wheel import CUDA_PYTHON

MOST_CAUSES = 4
"""Kinds of difference that a line tells."""


def plans() -> dict[str, GridEntry]:
    """One plan of each family, by the name of its model."""
    found: dict[str, GridEntry] = {}
    for entry in read_grid(profiles.GRIDS / "all-models.toml"):
        strategy = entry.strategy
        plain = strategy.gradient_checkpointing == "full" and strategy.validation_mode == "off"
        if entry.job.method == "lora" and entry.gpus == 1 and not entry.is_capped and plain:
            found.setdefault(entry.job.model, entry)
    smallest: dict[str, str] = {}
    for name in sorted(found, key=lambda name: lookup.model(name).parameters):
        smallest.setdefault(lookup.model(name).family, name)
    return {name: found[name] for name in smallest.values()}


def compared(entry: GridEntry, runner: RehearsalRunner) -> Iterator[PhaseComparison]:
    """The phases of a rehearsed plan beside its tape; a RuntimeError where the run fails."""
    assert runner.history is not None
    if not Path(runner.history).exists():
        _rehearse(entry, runner)
    history = read_history(runner.history)
    tape = on_tape(probed_run(history.plan), LEAST_BYTES)
    for phase in dict.fromkeys(name for name, _ in history.phases):
        if phase in tape:
            run = history.of(phase, LEAST_BYTES)
            yield compare_phase(phase, tape[phase], run, most=len(run) + 1)


def _rehearse(entry: GridEntry, runner: RehearsalRunner) -> None:
    machine = Machine(gpu="h100-80gb", torch=torch_release(runner.interpreter))
    row = runner.run(candidate(entry, machine).plan, steps=1, time_limit=TIME_LIMIT)
    if row.measured.outcome != "ok":
        raise RuntimeError(f"{entry.title}: {row.measured.outcome}")


class Cause(NamedTuple):
    """What places that differ have in common: the same events, in any block."""

    what: str
    tape: tuple[tuple[str, int, str], ...]
    run: tuple[tuple[str, int, str], ...]

    @classmethod
    def of(cls, difference: Difference) -> Cause:
        """The cause of one place."""
        return cls(difference.what, *(tuple(map(_anywhere, side)) for side in (difference.tape, difference.run)))

    def __str__(self) -> str:
        sides = (f"{name} {_events(side)}" for name, side in (("tape", self.tape), ("run", self.run)) if side)
        return f"{self.what}, {'; '.join(sides)}"


def _anywhere(event: AllocatorEvent) -> tuple[str, int, str]:
    return event.kind, event.nbytes, re.sub(r"\.\d+", "", event.where)


def said(phase: PhaseComparison) -> str:
    """One line of Markdown's table."""
    causes = Counter(map(Cause.of, phase.differences))
    places = f"{len(phase.differences)}{'+' if phase.parted else ''} | {len(causes)}"
    peaks = f"{phase.tape_peak_bytes / MIB:.1f} | {phase.peak_bytes / MIB:.1f}"
    told = "; ".join(f"{count} x {cause}" for cause, count in causes.most_common(MOST_CAUSES))
    return f"| {phase.phase} | {phase.events} | {phase.tape_events} | {places} | {peaks} | {told} |"


def _events(events: tuple[tuple[str, int, str], ...]) -> str:
    shown = [f"{kind} {nbytes / MIB:.1f} ({where})" for kind, nbytes, where in events[:2]]
    return ", ".join(shown) + (f" and {len(events) - 2} more" if len(events) > 2 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="all of them unless some are named")
    arguments = parser.parse_args()
    if not CUDA_PYTHON:
        parser.error("VPLAN_CUDA_PYTHON names no Python with the CUDA wheel; ci/cuda-python DIR makes one")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    interpreter = cuda_interpreter(CUDA_PYTHON)
    print("| model | phase | events: run | tape | places | kinds | peak MiB: tape | run | most often |", flush=True)
    with ForkServer(interpreter.path) as server:
        for name, entry in plans().items():
            if arguments.models and name not in arguments.models:
                continue
            history = arguments.folder.resolve() / f"{name}.json"
            runner = RehearsalRunner(interpreter=interpreter, server=server, history=history)
            try:
                for phase in compared(entry, runner):
                    print(f"| {name} {said(phase)}", flush=True)
            except RuntimeError as error:
                print(f"| {name} | failed: {error} |", flush=True)


if __name__ == "__main__":
    main()
