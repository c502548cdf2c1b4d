"""Live memory by source line, in the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from planner.commands._shared.verb import table
from planner.units import GIB, gib, plural

if TYPE_CHECKING:
    from rich.console import Console

    from planner.rehearsal.live_memory import AllocationSite, LiveMemory

LEAST = GIB // 200
"""Bytes below which a line is left out, since it would read 0.00."""


def print_live(console: Console, live: LiveMemory) -> None:
    """Prints a table of the lines that hold most; below each, the library's line that allocated most of it."""
    entries = [(site.allocated_bytes, list(_rows(site))) for site in live.largest]
    backward = (live.backward_bytes, "backward", "gradients, and temporary tensors of the backward pass")
    entries.append((live.backward_bytes, [backward]))
    entries.sort(key=lambda entry: -entry[0])
    rows = [row for _, lines in entries for row in lines]
    rows.append((live.other_bytes, plural(live.other_lines, "other line"), ""))
    heading = ">GiB at the error" if live.at_error else ">GiB at the peak"
    shown = [(f"{gib(size):.2f}", place, code) for size, place, code in rows if size >= LEAST]
    console.print(table((heading, "allocated by", "code"), shown))
    console.print()


def _rows(site: AllocationSite) -> Iterator[tuple[int, str, str]]:
    yield site.allocated_bytes, site.frame.place, site.frame.source
    if site.inner != site.frame:
        yield site.inner_bytes, f"  in {site.inner.place}", site.inner.source
