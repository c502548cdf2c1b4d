"""`vplan accuracy --seconds`: estimated and published step times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from planner.commands._shared.verb import show, table
from planner.evidence.accuracy import Predict
from planner.evidence.step_times import (
    FITTED,
    JUDGING,
    TimedCell,
    answer,
    compare,
    far_off,
    left_out,
    published_step_times,
)

if TYPE_CHECKING:
    from rich.console import Console

HALVES = {FITTED: "half that launches were fitted in", JUDGING: "other half"}


def compare_seconds(text: str | None, predict: Predict, as_json: bool) -> None:
    """Prints the bundled step times whose id or model contains ``text``, with their estimates."""
    cells = compare((cell for cell in published_step_times() if text is None or cell.is_of(text)), predict)
    found = answer(cells)

    def render(console: Console) -> None:
        rows = [_row(cell) for cell in cells if cell.seconds is not None]
        console.print(table(("id", "GPU", ">published s", ">estimated s", ">error"), rows))
        console.print("")
        console.print(_summary(found))
        _explain(console, cells)

    show(found, as_json, render)


def _row(cell: TimedCell) -> list[str]:
    assert cell.seconds is not None
    of = cell.published
    return [of.id, of.card, f"{of.step_seconds:.3f}", f"{cell.seconds:.3f}", f"{cell.error_pct:+.1f} %"]


def _summary(answer: dict[str, Any]) -> Any:
    """A line for all cells, for each card and for each half."""
    parts = {
        "all": answer["summary"],
        **answer["by_gpu"],
        **{name: answer["halves"][half] for half, name in HALVES.items()},
    }
    rows = [[name, f"{part['n']} of {part['of']}", *_spread(part)] for name, part in parts.items() if part["of"]]
    return table(("absolute error", ">n", ">median", ">90th pct", ">worst", ">within 20 %", ">rank corr."), rows)


def _spread(part: dict[str, Any]) -> list[str]:
    if not part["n"]:
        return ["-"] * 5
    keys = ("median_abs_pct", "p90_abs_pct", "max_abs_pct", "within_20_pct")
    rank = part["rank_correlation"]
    return [*(f"{part[key]:.1f} %" for key in keys), "-" if rank is None else f"{rank:.3f}"]


def _explain(console: Console, cells: Sequence[TimedCell]) -> None:
    """Explains the cells with large errors, and why others are left out."""
    if off := far_off(cells):
        console.print("")
        console.print("off by more than 25 %", style="bold", markup=False)
        for cell in off:
            why = cell.published.note or "no cause is known"
            console.print(f"{cell.published.id} {cell.error_pct:+.1f} %: {why}", markup=False, soft_wrap=True)
    if reasons := left_out(cells):
        console.print("")
        console.print("left out", style="bold", markup=False)
        for reason, count in reasons.items():
            console.print(f"{count}: {reason}", markup=False, soft_wrap=True)
