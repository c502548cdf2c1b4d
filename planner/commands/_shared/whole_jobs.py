"""`--steps`, `--epochs` and `--price`: how long a whole job takes, and what it costs."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from planner.catalog.profiles import ModelProfile
from planner.commands import USAGE
from planner.commands._shared.data_options import data_options, typed_settings
from planner.commands._shared.verb import FiniteRange, Function, table
from planner.dataset.sources import DataSource, sources
from planner.errors import VplanError, quoted
from planner.estimate.estimate import Layout
from planner.estimate.roofline import Span
from planner.estimate.whole_job import JobLength, ShapeCount, WholeJob, whole_job
from planner.layout.pipeline import lay_out
from planner.layout.run import Facts
from planner.spec.job import Bucket, Job
from planner.spec.plan import Estimate
from planner.units import format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from planner.commands._shared.render import TableRow

OPTIONS = ("steps", "epochs", "price", "checkpoint_every", "validate_every", "validation_steps")
LENGTHS = "--steps or --epochs"

Counts = Mapping[Bucket, ShapeCount]


def whole_job_options(function: Function) -> Function:
    """Adds how long the job is to be, the data it is trained on, and the price of an hour; the command gets them by
    name, and makes an `AskedLength` of them."""
    several = click.IntRange(1, 10**5)
    options = [
        click.option("--steps", type=click.IntRange(1, 10**7), metavar="N", help="Price so many optimizer steps."),
        click.option("--epochs", type=FiniteRange(0, 10**5, min_open=True), metavar="X", help="Passes over --data."),
        click.option(
            "--price", multiple=True, metavar="X|CARD=X", help="Price of a GPU for an hour; of one card by its name."
        ),
        click.option("--checkpoint-every", type=several, metavar="N", help="Steps between checkpoints.  [default: 50]"),
        click.option(
            "--validate-every", type=several, metavar="N", help="Steps between samples.  [default: at the end]"
        ),
        click.option("--validation-steps", type=click.IntRange(1, 1000), metavar="N", help="Denoising steps a sample."),
    ]
    for option in reversed(options):
        function = option(function)
    return data_options(required=False, what="Count the samples of a folder of clips, or of a dataset.toml.")(function)


class AskedLength(NamedTuple):
    """The length that was typed. Data is read once for each set of shapes it is asked about."""

    length: JobLength
    prices: Mapping[str, float]
    """by card as typed; of every other card under the empty name"""
    folders: tuple[DataSource, ...] = ()
    counted: Mapping[tuple[Bucket, ...], Counts] = {}
    """what was read, by the shapes it was read for"""

    def counting(self, model: ModelProfile, job: Job) -> AskedLength:
        """The same with the data read for a job's shapes."""
        if not self.folders or job.shapes in self.counted:
            return self
        return self._replace(counted={**self.counted, job.shapes: count(self.folders, model, job)})

    def of(self, plan: Estimate, facts: Facts, trainer: str = "vplan", layout: Layout = lay_out) -> WholeJob:
        """The whole job of a plan."""
        if plan.job.method == "sample":
            raise VplanError(
                f"{LENGTHS}: a job that only samples has no steps", "leave it out, or train: --method lora"
            )
        data = self.counting(facts.model, plan.job).counted.get(plan.job.shapes)
        found = whole_job(plan, facts, self.length._replace(data=data), trainer, layout)
        return found._replace(price=self.prices.get(plan.machine.gpu, self.prices.get("")))


def asked_length(said: Mapping[str, Any], gpus: Sequence[str] = ()) -> AskedLength | None:
    """The length in a command's options; None where none was asked for. ``gpus``: the cards that a price may name. A
    VplanError for options that need one, and for those that contradict each other."""
    if said["steps"] is None and said["epochs"] is None:
        typed = [name for name in OPTIONS if said[name] not in (None, ())]
        if typed:
            flag = typed[0].replace("_", "-")
            raise VplanError(f"--{flag} is about a whole job", f"say how long it is: {LENGTHS}", USAGE)
        if said["data"] is not None:
            raise VplanError("--data has no effect here", f"say how long the job is: {LENGTHS}", USAGE)
        return None
    if said["steps"] is not None and said["epochs"] is not None:
        raise VplanError("both --steps and --epochs say how long it is", "leave one of them out", USAGE)
    if said["epochs"] is not None and said["data"] is None:
        raise VplanError("--epochs needs the data", "pass --data DIR, or --steps N", USAGE)
    length = JobLength(
        steps=said["steps"],
        epochs=said["epochs"],
        checkpoint_every=said["checkpoint_every"] or JobLength().checkpoint_every,
        validate_every=said["validate_every"],
        validation_steps=said["validation_steps"],
    )
    folders = sources(Path(said["data"]).expanduser(), typed_settings(said)) if said["data"] is not None else ()
    return AskedLength(length, _prices(said["price"], gpus), folders)


def _prices(texts: Sequence[str], gpus: Sequence[str]) -> dict[str, float]:
    prices: dict[str, float] = {}
    for text in texts:
        card, equals, number = text.rpartition("=")
        try:
            price = float(number)
        except ValueError:
            price = math.nan
        if not 0 <= price < math.inf or (equals and not card):
            raise VplanError(f"--price {quoted(text)} is not a price", "write one as 2.5, or 24GB=0.4", USAGE)
        if card and card not in gpus:
            raise VplanError(f"--price {quoted(text)} is of no card in this answer", f"use {', '.join(gpus)}", USAGE)
        if card in prices:
            raise VplanError(f"two prices {'of ' + card if card else 'for every card'}", "leave one of them out", USAGE)
        prices[card] = price
    return prices


def count(folders: Sequence[DataSource], model: ModelProfile, job: Job) -> Counts:
    """The samples of the data by the shape they are trained at. A VplanError for files that cannot be used."""
    for package in ("av", "PIL", "numpy"):
        if importlib.util.find_spec(package) is None:
            raise VplanError(f"reading clips needs {package}", "install it: pip install 'vplan[train]'")
    from planner.dataset.scan import read

    encoded: Counter[Bucket] = Counter()
    draws: Counter[Bucket] = Counter()
    most: dict[Bucket, int] = {}
    for sample in read(folders, model, job).samples:
        encoded[sample.bucket] += 1
        draws[sample.bucket] += sample.repeats
        most[sample.bucket] = max(sample.repeats, most.get(sample.bucket, 1))
    return {shape: ShapeCount(encoded[shape], draws[shape], most[shape]) for shape in encoded}


# ---- printing


def print_whole_job(console: Console, found: WholeJob) -> None:
    """Prints a whole job: hours, energy and money in one line, then its parts."""
    epochs = f" ({found.epochs:.3g} epochs)" if found.epochs is not None else ""
    words = [f"{_span(found.hours)} hours", f"{_span(found.kwh)} kWh at {found.power_watts:g} W"]
    if found.money is not None:
        words.append(f"{_span(found.money)} at {found.price:g} per GPU-hour")
    console.print()
    console.print(f"{found.steps} steps{epochs}: {', '.join(words)}", style="bold")
    rows = [
        (name, part.number, *map(format_seconds, part.seconds)) for name, part in found.parts.items() if part.number
    ]
    console.print(table(("part", ">number", ">time", ">at most"), rows))
    if found.sample_seconds is not None:
        console.print(f"encoding not counted: {_span(found.sample_seconds)} s a sample (--data DIR)", style="dim")


def whole_columns(rows: Iterable[TableRow]) -> tuple[str, ...]:
    """The columns that whole jobs have in a table of them; none where there are none."""
    found = [row.whole for row in rows if row.whole]
    if not found:
        return ()
    return (">hours", ">kWh", ">price") if any(whole.money for whole in found) else (">hours", ">kWh")


def whole_cells(whole: WholeJob | None, columns: int) -> list[str]:
    """A row's cells in the columns of `whole_columns`."""
    if whole is None:
        return ["-"] * columns
    cells = [_span(whole.hours), _span(whole.kwh), _span(whole.money) if whole.money else "-"]
    return cells[:columns]


def best_rows(rows: Sequence[TableRow]) -> dict[str, str | None]:
    """The names of the fastest row and of the cheapest, by money where anything has a price, else by energy."""
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
    """Prints which row is the fastest and which the cheapest."""
    best = best_rows(rows)
    by_name = {row.name: row.whole for row in rows if row.whole}
    fastest, cheapest = (by_name.get(best[word] or "") for word in ("fastest", "cheapest"))
    if fastest is None or cheapest is None:
        return
    console.print()
    console.print(f"fastest: {best['fastest']}, {_span(fastest.hours)} hours", style="bold")
    if best["cheapest_by"] == "money" and cheapest.money:
        console.print(f"cheapest: {best['cheapest']}, {_span(cheapest.money)}", style="bold")
    else:
        words = f"cheapest in energy: {best['cheapest']}, {_span(cheapest.kwh)} kWh (--price gives money)"
        console.print(words, style="bold")


def _span(span: Span) -> str:
    low, high = (_number(value) for value in span)
    return low if low == high else f"{low} to {high}"


def _number(value: float) -> str:
    """Three digits, two below a tenth."""
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}" if value >= 0.0995 else f"{value:.2g}"
