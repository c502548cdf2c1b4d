"""`vplan accuracy --history`: the first difference between a tape and a recorded history of a GPU's allocator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from planner.commands._shared.verb import DONE, show, table
from planner.evidence.allocator_history import (
    AllocatorEvent,
    Difference,
    History,
    PhaseComparison,
    compare,
    probed_run,
    read_history,
)
from planner.units import MIB, format_gib

if TYPE_CHECKING:
    from rich.console import Console

WORDS = {
    "size": "different size",
    "missing": "in the run and not on the tape",
    "extra": "on the tape and not in the run",
    "order": "different order",
    "other": "something else",
}


def differences(path: str, least: int, as_json: bool) -> int:
    """Compares a recorded allocator history with its plan's tape and prints the answer; returns the exit code.
    ``least``: events of fewer bytes are ignored."""
    history = read_history(path)
    found = list(compare(history, least))
    recorded = probed_run(history.plan).facts.step.versions.get("torch", "unknown")
    first = next(((phase, phase.differences[0]) for phase in found if phase.differences), None)
    answer: dict[str, Any] = {
        "torch": history.torch,
        "tape_torch": recorded,
        "first": {"phase": first[0].phase, **first[1].to_json()} if first else None,
        "phases": [
            {**phase.__dict__, "differences": [difference.to_json() for difference in phase.differences]}
            for phase in found
        ],
    }
    show(answer, as_json, lambda console: _render(console, history, found, recorded))
    return DONE


def _render(console: Console, history: History, comparisons: Sequence[PhaseComparison], recorded: str) -> None:
    job = history.plan.job
    console.print(f"{job.model} {job.method} {job.frames}x{job.height}x{job.width} on {history.gpu}", style="bold")
    if history.torch.split("+")[0] != recorded.split("+")[0]:
        console.print(f"the run used torch {history.torch}, the tape {recorded}: kernels may differ", markup=False)
    rows = [
        (each.phase, each.events, each.tape_events, format_gib(each.peak_bytes), format_gib(each.tape_peak_bytes),
         f"{len(each.differences)}{' and they part' if each.parted else ''}")
        for each in comparisons
    ]  # fmt: skip
    heads = ("phase", ">events", ">on the tape", ">rises by", ">on the tape", ">differences")
    console.print(table(heads, rows), "")
    first = next(((each.phase, each.differences) for each in comparisons if each.differences), None)
    if first is None:
        console.print("every event of the run is on the tape, in its order and size", markup=False)
        return
    phase, known = first
    console.print(f"the first difference, in {phase} at event {known[0].at}:", style="bold")
    for line in _lines(known[0]):
        console.print(line, markup=False, soft_wrap=True)
    for difference in known[1:]:
        head, *_ = _lines(difference)
        console.print(f"event {difference.at}: {head}", style="dim", markup=False, soft_wrap=True)


def _lines(difference: Difference) -> list[str]:
    found = [f"{WORDS[difference.what]}; {difference.module}"]
    for side, events in (("tape", difference.tape), ("run", difference.run)):
        found += [f"  {side}: {_words(event)}" for event in events[:4]]
        if len(events) > 4:
            found.append(f"  {side}: and {len(events) - 4} more")
    return found


def _words(event: AllocatorEvent) -> str:
    words = f"{event.kind} {event.nbytes / MIB:.2f} MiB"
    return f"{words}, {event.where}" if event.where else words
