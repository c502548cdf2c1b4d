"""What was recorded with fake tensors, and what CUDA's code does: one plan of each model family, event by event.

    VPLAN_CUDA_PYTHON=cuda/bin/python python -m tests.tools.compare_with_rehearsals FOLDER [MODEL...]

Of each family the smallest model of the grid `all-models`, with a plan of its own there that trains a LoRA with
checkpointing on one H100: rehearsed as `vplan probe` runs it, and every allocation and free of a MiB and more held
against the tape, laid out for the same plan. Frees that follow each other count in any order: Python frees the locals
of a function in the order of their slots, and what remains is where memory differs at all. A line for each phase has
the events of both, how many places differ (20+: it stops there), and the first that does. FOLDER keeps the histories,
which `vplan accuracy --history FILE` shows with their order; one that is there is not made anew.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import profiles
from planner.catalog import lookup
from planner.evidence.allocator_history import (
    LEAST_BYTES,
    MOST,
    Difference,
    Event,
    PhaseComparison,
    compare_phase,
    laid_out,
    on_tape,
    read_history,
)  # fmt: skip
from planner.probe.grid_file import GridEntry, read_grid
from planner.probe.grid_schedule import candidate
from planner.probe.probe import TIME_LIMIT
from planner.rehearsal.fork_server import ForkServer
from planner.rehearsal.probe_runner import RehearsalRunner, cuda_interpreter, torch_release
from planner.spec.job import Machine
from planner.units import MIB
from tests.cuda_wheel import CUDA_PYTHON


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
    tape = on_tape(laid_out(history.plan), LEAST_BYTES)
    for phase in dict.fromkeys(name for name, _ in history.phases):
        if phase in tape:
            yield compare_phase(phase, _ordered(tape[phase]), _ordered(history.of(phase, LEAST_BYTES)))


def _ordered(events: Iterable[Event]) -> list[Event]:
    """The same events, with frees that follow each other from the largest to the smallest."""
    ordered: list[Event] = []
    for kind, group in itertools.groupby(events, key=lambda event: event.kind):
        together = list(group)
        ordered += together if kind == "alloc" else sorted(together, key=lambda event: -event.nbytes)
    return ordered


def _rehearse(entry: GridEntry, runner: RehearsalRunner) -> None:
    machine = Machine(gpu="h100-80gb", torch=torch_release(runner.interpreter))
    row = runner.run(candidate(entry, machine).plan, steps=1, time_limit=TIME_LIMIT)
    if row.measured.outcome != "ok":
        raise RuntimeError(f"{entry.title}: {row.measured.outcome}")


def said(phase: PhaseComparison) -> str:
    """One line of Markdown's table."""
    more = "+" if phase.parted or len(phase.differences) == MOST else ""
    counts = f"| {phase.events} | {phase.tape_events} | {len(phase.differences)}{more} |"
    peaks = f" {phase.tape_peak_bytes / MIB:.1f} | {phase.peak_bytes / MIB:.1f} |"
    return f"| {phase.phase} {counts}{peaks} {_first(phase.differences[0]) if phase.differences else ''} |"


def _first(difference: Difference) -> str:
    sides = (f"{name} {_events(getattr(difference, name))}" for name in ("tape", "run") if getattr(difference, name))
    return f"{difference.at}: {difference.what}, {'; '.join(sides)}"


def _events(events: tuple[Event, ...]) -> str:
    shown = [f"{event.kind} {event.nbytes / MIB:.1f} ({event.where})" for event in events[:2]]
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
    print("| model | phase | events: run | tape | places that differ | peak MiB: tape | run | the first |", flush=True)
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
