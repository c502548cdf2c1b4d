"""A whole job in the terminal: its time, energy and cost, its parts, and the shapes of its data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.commands._shared.verb import table
from planner.units import format_seconds, gib

if TYPE_CHECKING:
    from rich.console import Console

    from planner.estimate.bucket_batches import EvenedPlan
    from planner.estimate.roofline import Span
    from planner.estimate.whole_job import WholeJob


def seconds_words(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 10 else f"{seconds:.1f}"


def print_whole_job(console: Console, whole_job: WholeJob) -> None:
    """Prints the parts of a whole job; the totals are printed above them."""
    if whole_job.is_steps_alone:
        return
    console.print()
    rows = [
        (name, part.number, *map(format_seconds, part.seconds)) for name, part in whole_job.parts.items() if part.number
    ]
    console.print(table(("part", ">number", ">time", ">at most"), rows))
    if whole_job.sample_seconds is not None:
        console.print(
            f"encoding not counted: {span_words(whole_job.sample_seconds)} s a sample (--data DIR)", style="dim"
        )


def whole_words(whole_job: WholeJob) -> str:
    """Time, energy and cost of a whole job in one line."""
    epochs = f" ({whole_job.epochs:.3g} epochs)" if whole_job.epochs is not None else ""
    words = [f"{span_words(whole_job.hours)} hours", f"{span_words(whole_job.kwh)} kWh at {whole_job.power_watts:g} W"]
    if whole_job.money is not None:
        words.append(f"{span_words(whole_job.money)} at {whole_job.price:g} per GPU-hour")
    alone = " alone" if whole_job.is_steps_alone else ""
    return f"{whole_job.steps} steps{epochs}{alone}: {', '.join(words)}"


def span_words(span: Span) -> str:
    low, high = (_number(value) for value in span)
    return low if low == high else f"{low} to {high}"


def _number(value: float) -> str:
    """Three significant digits; two below 0.1."""
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}" if value >= 0.0995 else f"{value:.2g}"


def print_shapes(console: Console, even: EvenedPlan) -> None:
    """Prints the shapes proposed for the data, each with its batch size, and the flag for them."""
    rows = []
    for shape, seconds, _, nbytes in even.shapes:
        rows.append((shape.words, shape.batch_size or 1, seconds_words(seconds), f"{gib(nbytes):.1f}"))
    console.print()
    console.print(table(("shape of the data", ">batch", ">s/step", ">GiB alone"), rows))
    flags = ",".join(f"{name}x{batch}" for name, batch, *_ in rows)
    console.print(f"      --buckets {flags}", soft_wrap=True)
