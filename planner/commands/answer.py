"""The look of an answer in the terminal: how the question was understood, the verdict, the bar, the phases."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from planner.commands.common import table
from planner.commands.request import Request
from planner.plan import Estimate
from planner.units import format_gib, format_seconds, gib

VERDICTS = {"fits": ("fits", "bold green"), "tight": ("tight", "bold yellow"), "no": ("does not fit", "bold red")}
BAR_WIDTH = 48


def headline(console: Console, request: Request) -> None:
    """The first line: card, budget and the defaults taken."""
    gpu = request.gpu
    count = f"{request.machine.gpus} x " if request.machine.gpus > 1 else ""
    text = f"{request.model.title}, {request.job.method}, on {count}{gpu.title}: {gpu.allocatable_gib:.2f} GiB to use"
    if request.machine.reserve:
        text += f", {format_gib(request.machine.reserve)} of it kept free"
    console.print(text)
    if request.assumptions:
        console.print(f"assumed: {'; '.join(request.assumptions)}", style="dim")


def verdict_line(found: Estimate) -> Text:
    """One line: the verdict, the need, the budget, how sure."""
    word, style = VERDICTS[found.verdict]
    line = Text(word, style)
    low, high = gib(found.low_bytes), gib(found.high_bytes)
    need = f": needs {gib(found.peak.device_bytes):.2f} GiB ({low:.1f} to {high:.1f}, {found.basis})"
    line.append(f"{need} of {gib(found.budget_bytes):.2f}", "default")
    if found.limit == "host":
        line.append("; host RAM is short", "default")
    return line


def print_estimate(console: Console, found: Estimate) -> None:
    """Verdict, bar, phases, breakdown and the rest of one estimate."""
    console.print(verdict_line(found))
    console.print(bar(found))
    console.print(f"peak: {found.peak.phase}, {found.peak.moment}")
    rows = [
        (name, *(f"{gib(value):.2f}" for value in (peak.allocated_bytes, peak.reserved_bytes, peak.device_bytes)))
        for name, peak in found.phases.items()
    ]
    console.print()
    console.print(table(("phase", ">allocated GiB", ">reserved GiB", ">device GiB"), rows))
    console.print()
    parts = [(name, f"{gib(value):.2f}") for name, value in found.breakdown.__dict__.items() if value]
    console.print(table(("at the peak", ">GiB"), parts))
    console.print()
    facts = f"step {format_seconds(found.step_seconds)} (estimated), host RAM {format_gib(found.host_ram_bytes)}"
    console.print(f"{facts}, attention: {found.attention_kernel}")
    if found.lossy:
        console.print(f"lossy: {', '.join(found.lossy)}", style="yellow")


def bar(found: Estimate) -> Text:
    """The need against the budget, as wide as the budget: one cell per 1/48 of it."""
    share = found.peak.device_bytes / max(found.budget_bytes, 1)
    filled = min(BAR_WIDTH, round(share * BAR_WIDTH))
    text = Text("█" * filled + "░" * (BAR_WIDTH - filled), VERDICTS[found.verdict][1])
    text.append(f" {share:.0%} of the budget", "default")
    return text
