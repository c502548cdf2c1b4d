"""An answer for many models or cards in the terminal: a summary, then a table with one line for each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from planner.catalog import lookup
from planner.commands._shared.rendering.render import print_data
from planner.commands._shared.rendering.render_job import seconds_words, span_words
from planner.commands._shared.rendering.verdict_words import VERDICTS
from planner.commands._shared.rendering.wrapping import listed, print_lines
from planner.commands._shared.verb import table
from planner.spec.job import Job
from planner.spec.plan import Estimate
from planner.spec.wording import ways
from planner.units import gib

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from planner.estimate.whole_job import WholeJob


class TableRow:
    """One line of an answer for many models or cards: a plan, or the reason why there is none."""

    def __init__(
        self, name: str, plan: Estimate | None, reason: str, considered: int, whole: WholeJob | None = None
    ) -> None:
        self.name = name
        self.plan = plan
        self.reason = reason
        self.considered = considered
        self.whole = whole

    def to_json(self, kind: str) -> dict[str, object]:
        """The line as `vplan suggest --json` prints it. ``kind``: "models" or "cards"."""
        plan = self.plan.to_json() if self.plan else None
        whole = {"whole_job": self.whole.to_json()} if self.whole else {}
        return {"model" if kind == "models" else "gpu": self.name, "plan": plan, "reason": self.reason or None, **whole}


def print_rows(console: Console, first: str, kind: str, rows: Sequence[TableRow]) -> None:
    """Prints what the rows come to, how the question was understood, then a table with one line for each model or card.
    ``first``: the line of how it was understood."""
    if kind == "models" and _on_images(rows):
        rows = sorted(rows, key=_makes_videos)
    console.print(_models_that_fit(rows) if kind == "models" else _smallest_card(rows), style="bold")
    console.print(first)
    for said, models in _named(_main_models(rows)).items() if kind == "models" else ():
        print_lines(console, listed(f"{said}: ", models, console.width))
    if kind == "classes":
        print_best(console, rows)
    console.print()
    if console.width < NARROW:
        _print_with_words_beneath(console, _table_of(rows, kind, narrow=True), [_row(row)[-1] for row in rows])
    else:
        console.print(_table_of(rows, kind, narrow=False))
    if kind == "models":
        print_data(console, *(lookup.model(row.name) for row in rows))
    notes = {note: None for row in rows if row.plan for note in row.plan.assumptions if "longer" in note}
    for note in notes:
        names = ", ".join(row.name for row in rows if row.plan and note in row.plan.assumptions)
        console.print(f"{names}: {note}", style="dim")


def _table_of(rows: Sequence[TableRow], kind: str, narrow: bool) -> Table:
    """The table with one line for each row; ``narrow``: without the words at its end, nor the shape where the table has
    columns for a whole job and all rows have the same."""
    whole = whole_columns(rows, narrow)
    plans = [row.plan for row in rows if row.plan]
    clips = any(plan.job.frames > 1 for plan in plans) if plans else kind == "models" and any(map(_makes_videos, rows))
    has_shape = len({_shape(plan.job) for plan in plans}) > 1 or not (narrow and whole)
    first = ("model" if kind == "models" else "card", *([">clip" if clips else ">image"] if has_shape else []))
    last = (*(("data",) if kind == "models" else ()), *(() if narrow else ("with",)))
    lines = table((*first, "verdict", ">GiB", ">s/step", *whole, *last), [])
    lines.columns[0].no_wrap, lines.columns[0].min_width = True, max(len(row.name) for row in rows)  # to be typed
    for row in rows:
        name, shape, *cells, ways_or_reason = _row(row)
        cells += whole_cells(row.whole, whole)
        cells += [lookup.model(row.name).train_data] if kind == "models" else []
        lines.add_row(name, *([shape] if has_shape else []), *cells, *([] if narrow else [ways_or_reason]))
    return lines


def _print_with_words_beneath(console: Console, table: Table, beneath: Sequence[str | Text]) -> None:
    """Prints a table with each row's words on a line below it, for terminals too narrow for a last column."""
    from rich.padding import Padding
    from rich.text import Text

    with console.capture() as captured:
        console.print(table)
    heading, *lines = captured.get().splitlines()
    console.print(Text.from_ansi(heading))
    for line, words in zip(lines, beneath, strict=True):
        console.print(Text.from_ansi(line))
        console.print(Padding(Text(str(words), "dim"), (0, 0, 0, 2), expand=False))


def _row(row: TableRow) -> tuple[str | Text, ...]:
    from rich.text import Text

    if row.plan is None:
        return row.name, "-", Text("no", VERDICTS["no"][1]), "-", "-", row.reason
    found, clip = row.plan, _shape(row.plan.job)
    word = Text(found.verdict, VERDICTS[found.verdict][1])
    need = f"{gib(found.peak.device_bytes):.1f}"
    lossy = " (lossy)" if found.lossy else ""
    return row.name, clip, word, need, seconds_words(found.step_seconds) if found.timed else "-", ways(found) + lossy


NARROW = 100
"""Columns below which words go below their rows, and whole jobs omit columns that can be found elsewhere."""


def _shape(job: Job) -> str:
    length = f"{job.frames}x" if job.frames > 1 else ""
    return f"{length}{job.height}x{job.width}" + (f" x{job.batch_size}" if job.batch_size > 1 else "")


def _on_images(rows: Sequence[TableRow]) -> bool:
    """Whether all rows train on single images, which video models can do too."""
    return all(row.plan is None or row.plan.job.frames == 1 for row in rows)


def _makes_videos(row: TableRow) -> bool:
    return lookup.model(row.name).kind == "video"


def _main_models(rows: Sequence[TableRow]) -> Sequence[TableRow]:
    """The models that a table is about: on images, those that make videos are only counted."""
    images = [row for row in rows if not _makes_videos(row)]
    return images if _on_images(rows) and 0 < len(images) < len(rows) else rows


def _models_that_fit(rows: Sequence[TableRow]) -> str:
    """How many models of a table fit."""
    main = _main_models(rows)
    if main is rows:
        return _counted(rows, "models")
    videos = [row for row in rows if _makes_videos(row)]
    count = sum(row.plan is not None and row.plan.verdict == "fits" for row in videos)
    return f"{_counted(main, 'image models')}; and {count} of {len(videos)} video models, on single images"


def _counted(rows: Sequence[TableRow], models: str) -> str:
    fits = [row.plan for row in rows if row.plan and row.plan.verdict == "fits"]
    lossy = sum(bool(plan.lossy) for plan in fits)
    return f"{len(fits)} of {len(rows)} {models} fit" + (f", {lossy} of them only with lossy options" if lossy else "")


def _named(rows: Sequence[TableRow]) -> dict[str, list[str]]:
    """The names of the models that fit, or of those that do not where these are fewer; by what is said of them."""
    fits = [row for row in rows if row.plan and row.plan.verdict == "fits"]
    lossy = [row.name for row in fits if row.plan and row.plan.lossy]
    tight = [row.name for row in rows if row.plan and row.plan.verdict == "tight"]
    if 2 * len(fits) > len(rows):
        kinds = {"tight": tight, "do not fit": [row.name for row in rows if not row.plan]}
    else:
        kinds = {"fit": [row.name for row in fits if row.name not in lossy], "lossy": lossy, "tight": tight}
    return {kind: names for kind, names in kinds.items() if names}


def _smallest_card(rows: Sequence[TableRow]) -> str:
    """The smallest card of a table that fits, smaller ones that are tight, and the smallest without loss."""
    fits = [row for row in rows if row.plan and row.plan.verdict == "fits"]
    if not fits:
        return "no card fits it"
    least = fits[0]
    assert least.plan is not None
    below = [row.name for row in rows[: rows.index(least)] if row.plan]
    tight = f" ({', '.join(below)}: tight)" if below else ""
    lossless = next((row.name for row in fits if row.plan and not row.plan.lossy), None)
    kind = " (lossy)" if least.plan.lossy else ""
    text = f"smallest card that fits: {least.name}{kind}{tight}"
    if lossless == least.name:
        return text
    return f"{text}; lossless: {lossless or 'none'}"


def whole_columns(rows: Iterable[TableRow], narrow: bool) -> tuple[str, ...]:
    """The columns for whole jobs in a table; none if there are none. ``narrow``: one column besides hours."""
    found = [row.whole for row in rows if row.whole]
    if not found:
        return ()
    priced = any(whole.money for whole in found)
    if narrow:
        return (">hours", ">price") if priced else (">hours", ">kWh")
    return (">hours", ">kWh", ">price") if priced else (">hours", ">kWh")


def whole_cells(whole: WholeJob | None, columns: Sequence[str]) -> list[str]:
    """A row's cells for the columns of `whole_columns`."""
    if whole is None:
        return ["-"] * len(columns)
    cells = {">hours": whole.hours, ">kWh": whole.kwh, ">price": whole.money}
    return ["-" if (span := cells[column]) is None else span_words(span) for column in columns]


def best_rows(rows: Sequence[TableRow]) -> dict[str, str | None]:
    """The names of the fastest row and of the cheapest: by money if anything has a price, else by energy."""
    found = [row for row in rows if row.whole]
    priced = [row for row in found if row.whole and row.whole.money]
    by = "money" if priced else "kwh"

    def cost(row: TableRow) -> float:
        assert row.whole is not None
        return (row.whole.money or row.whole.kwh).low

    def hours(row: TableRow) -> float:
        assert row.whole is not None
        return row.whole.hours.low

    fastest, cheapest = min(found, key=hours, default=None), min(priced or found, key=cost, default=None)
    return {
        "fastest": fastest.name if fastest else None,
        "cheapest": cheapest.name if cheapest else None,
        "cheapest_by": by if cheapest else None,
    }


def print_best(console: Console, rows: Sequence[TableRow]) -> None:
    """Prints which row is the fastest and which is the cheapest."""
    best = best_rows(rows)
    by_name = {row.name: row.whole for row in rows if row.whole}
    fastest, cheapest = (by_name.get(best[word] or "") for word in ("fastest", "cheapest"))
    if not fastest or not cheapest:
        return
    console.print(f"fastest: {best['fastest']}, {span_words(fastest.hours)} hours", style="bold")
    if best["cheapest_by"] == "money" and cheapest.money:
        console.print(f"cheapest: {best['cheapest']}, {span_words(cheapest.money)}", style="bold")
    else:
        words = f"cheapest in energy: {best['cheapest']}, {span_words(cheapest.kwh)} kWh (--price gives money)"
        console.print(words, style="bold")
