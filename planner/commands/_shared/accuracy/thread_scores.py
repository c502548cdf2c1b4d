"""`vplan accuracy --threads`: the verdicts of `check` on commands from public threads, and what their authors
reported."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from planner.commands._shared.verb import show, table
from planner.foreign.public_threads import ThreadScore, answer, bundled_threads, score

if TYPE_CHECKING:
    from rich.console import Console


def compare_threads(text: str | None, as_json: bool) -> None:
    """Prints the score of the bundled threads whose id or trainer contains ``text``."""
    rows = [each for each in bundled_threads() if text is None or text.lower() in f"{each.trainer} {each.id}".lower()]
    with click.progressbar(rows, label="checking", file=sys.stderr, hidden=not sys.stderr.isatty()) as progress:
        scores = [score(each) for each in progress]
    found = answer(scores)

    def render(console: Console) -> None:
        console.print(_table(found))
        _list(console, "said to fit but ran out", [each for each in scores if each.false_fits])
        others = [each for each in scores if each.agrees is False and not each.false_fits]
        _list(console, "other verdicts that differ", others)
        _list(console, "numbers outside the range", [each for each in scores if each.number_agrees is False])
        _refused(console, scores)
        if found["left_out"]:
            console.print("")
            console.print("looked at and left out", style="bold", markup=False)
        for why, count in found["left_out"].items():
            console.print(f"{count}: {why}", markup=False, soft_wrap=True)

    show(found, as_json, render)


def _table(answer: dict[str, Any]) -> Any:
    collections = {f"collected {day}": part for day, part in answer["by_collection"].items()}
    others = {**answer["by_kind"], "nothing completed": answer["nothing_completed"], "all": answer["summary"]}
    parts = {**answer["by_trainer"], **collections, **others}
    heads = ("trainer", ">read", ">agree", ">of them tight", ">phase", ">number in range", ">median error", ">older")
    return table(heads, [_summary_row(name, part) for name, part in parts.items()])


def _summary_row(name: str, part: dict[str, Any]) -> list[str]:
    median = part["median_abs_pct"]
    return [
        name,
        f"{part['read']} of {part['of']}",
        f"{part['agree']} of {part['agree_of']}",
        str(part["tight"]),
        f"{part['phase_agree']} of {part['phase_of']}",
        f"{part['number_agree']} of {part['number_of']}",
        "-" if median is None else f"{median:.1f} %",
        str(part["older"]),
    ]


def _list(console: Console, title: str, scores: Sequence[ThreadScore]) -> None:
    if scores:
        console.print("")
        console.print(title, style="bold", markup=False)
    for each in scores:
        console.print(f"{each.thread.id}: {_words(each)}; {each.explained}", markup=False, soft_wrap=True)


def _words(each: ThreadScore) -> str:
    """The outcome and the answer as a short phrase."""
    thread = each.thread
    told = each.predicted_gib
    assert each.checked is not None and told is not None
    number = f", {thread.printed_gib} GiB {thread.counter}" if thread.printed_gib else ""
    reported = f"{thread.outcome}{number} on {thread.gpu}"
    return f"{reported}, said {each.verdict}, {told[1]:.1f} GiB ({told[0]:.1f} to {told[2]:.1f})"


def _refused(console: Console, scores: Sequence[ThreadScore]) -> None:
    """Prints each reason once, with the rows to which it applies."""
    reasons: dict[str, list[str]] = {}
    for each in scores:
        if each.refused:
            reasons.setdefault(each.refused, []).append(each.thread.id)
    if reasons:
        console.print("")
        console.print("not read", style="bold", markup=False)
    for reason, ids in reasons.items():
        console.print(f"{', '.join(ids)}: {reason}", markup=False, soft_wrap=True)
