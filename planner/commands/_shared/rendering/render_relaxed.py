"""What makes a plan fit that does not, in the terminal and on a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from planner.commands._shared.rendering.verdict_words import VERDICTS, need_words
from planner.commands._shared.rendering.wrapping import print_lines, wrapped
from planner.spec.plan import Estimate
from planner.spec.wording import ways
from planner.units import GIB, format_gib, gib

if TYPE_CHECKING:
    from rich.console import Console

    from planner.search.question import Relaxed, Suggestion


def flag_words(field: str, value: object) -> str:
    """A field and its value as an option."""
    name = field.replace("_", "-")
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name} {value}"


def print_relaxed(console: Console, suggestion: Suggestion) -> None:
    """Prints what a plan lacks that does not fit, and which single option makes it fit."""
    plan, relax = suggestion.plan, suggestion.relaxed
    console.print(f"this is the smallest plan found{_short_of(plan, relax)}")
    if (missing := suggestion.unrecorded) is not None:
        flags = flag_words(missing.field, missing.value)
        unsearched = f"not recorded, so not searched, and may need less: {flags}; to record it: `{missing.record}`"
        print_lines(console, wrapped(unsearched, console.width))
    if not relax:
        console.print("no single change makes it fit", style="bold")
        for line in _beyond(suggestion):
            print_lines(console, wrapped(f"  {line}", console.width, "    "))
        return
    console.print("to make it fit, change one of:", style="bold")
    for wish in relax:
        flags, instead = _relaxed_words(wish)
        console.print(f"  {flags} {instead}")


def _relaxed_words(wish: Relaxed) -> tuple[str, str]:
    """The option that makes a plan fit, and what it stands instead of."""
    lossy = f" (lossy: {', '.join(wish.plan.lossy)})" if wish.plan.lossy else ""
    count = wish.plan.strategy.checkpointed_blocks if wish.field == "gradient_checkpointing" else None
    blocks = f" --checkpointed-blocks {count}" if count else ""
    shared = f" ({wish.after} GPUs share a sample)" if wish.field == "context_parallel" else ""
    return f"--{_flag_name(wish)} {wish.after}{blocks}", f"instead of {wish.before}{lossy}{shared}"


def relaxed_lines(suggestion: Suggestion) -> list[tuple[str, str]]:
    """Each option that alone makes a plan fit that does not, and what it does: for a page."""
    if suggestion.plan.verdict != "no":
        return []
    return [
        (flags, f"{instead}: {need_words(wish.plan)}")
        for wish in suggestion.relaxed
        for flags, instead in [_relaxed_words(wish)]
    ]


def _beyond(suggestion: Suggestion) -> Iterator[str]:
    """How far a job reaches that no single change makes fit: in a smaller shape, and on a larger card."""
    if (least := suggestion.least) is not None:
        before, after = suggestion.plan.job, least.job
        size, old = f"{after.height}x{after.width}", f"{before.height}x{before.width}"
        smaller = [
            *([f"--resolution {size}"] if size != old else []),
            *([f"--frames {after.frames}"] if after.frames != before.frames else []),
            *([f"--batch-size {after.batch_size}"] if after.batch_size != before.batch_size else []),
        ]
        lossy = f" (lossy: {', '.join(least.lossy)})" if least.lossy else ""
        does = "still needs" if least.verdict == "no" else f"together: {VERDICTS[least.verdict][0]},"
        ram = f" and {gib(least.host_ram_bytes):.1f} GiB of host RAM" if least.limit == "host" else ""
        yield f"{' '.join(smaller)} {does} {gib(least.peak.device_bytes):.1f} GiB{ram}{lossy}"
    if (larger := suggestion.larger_card) is not None:
        more = larger.machine.host_ram if larger.machine.host_ram != suggestion.plan.machine.host_ram else None
        yield f"unchanged it fits --gpu {larger.machine.gpu}{f' --host-ram {more // GIB}GiB' if more else ''}"


def other_kind(wish: Relaxed) -> str:
    """What a plan of the other kind reaches, lossy or not, in a line."""
    if wish.field == "gpus":
        return f"lossless on one GPU (--gpus 1): {ways(wish.plan)} ({need_words(wish.plan)})"
    most = f"{wish.after} frames" if wish.field == "frames" else f"{wish.field} {wish.after}"
    flag = "--allow lossy" if wish.plan.lossy else f"--{_flag_name(wish)} {wish.after}"
    kind = "lossy" if wish.plan.lossy else "lossless"
    return f"{kind} up to {most} ({flag}): {ways(wish.plan)} ({need_words(wish.plan)})"


def _flag_name(wish: Relaxed) -> str:
    return wish.field.replace("_", "-").replace("batch", "batch-size")


def _short_of(plan: Estimate, relax: Sequence[Relaxed]) -> str:
    """What a plan that does not fit lacks: host RAM too, where with more of it another plan fits the card."""
    ram = plan.machine.host_ram
    if plan.limit == "host":
        return "; not enough host RAM"
    if ram is not None and any(wish.field == "host_ram" for wish in relax):
        return f" with {format_gib(ram)} of host RAM; not enough host RAM for a smaller one"
    short = " and host RAM" if ram is not None and plan.host_ram_bytes > ram else ""
    return f"; not enough GPU memory{short}"
