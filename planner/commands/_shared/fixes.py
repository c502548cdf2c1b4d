"""Changes of another trainer's command, in the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from planner.commands._shared.render import VERDICTS
from planner.units import format_seconds, gib

if TYPE_CHECKING:
    from rich.console import Console

    from planner.foreign.check import Fix
    from planner.spec.plan import Estimate


def print_fixes(console: Console, before: Estimate, fixes: Iterable[Fix], mark: str = "") -> None:
    """Each change and what it does. ``mark`` stands behind the first heading."""
    for at, fix in enumerate(fixes):
        heading = f"smallest change{mark}:" if at == 0 else "or:"
        console.print(heading, style="bold", markup=False)
        for part in fix.change:
            console.print(f"  {part}", markup=False, soft_wrap=True)
        console.print(f"    {_effect(before, fix)}", markup=False)


def print_helps(console: Console, helps: Iterable[Fix]) -> None:
    """Changes that are not enough."""
    for fix in helps:
        console.print(
            f"helps, but not enough by itself: {' '.join(fix.change)} ({fix.cost})", style="dim", markup=False
        )


def print_least(console: Console, least: Fix | None) -> None:
    """What all options together come to, where that is not enough."""
    if least is not None:
        need = gib(least.outcome.estimate.peak.device_bytes)
        console.print(f"the least it reaches is {need:.1f} GiB, with", style="bold", markup=False)
        for part in least.change:
            console.print(f"  {part}", markup=False, soft_wrap=True)


def print_smaller(console: Console, smaller: Iterable[Fix]) -> None:
    """Shorter clips and smaller sizes that fit: another training, which is not called lossless."""
    for fix in smaller:
        console.print(f"{fix.cost} fit:", style="bold", markup=False)
        for part in fix.change:
            console.print(f"  {part}", markup=False, soft_wrap=True)
        found = fix.outcome.estimate
        low, high = gib(found.low_bytes), gib(found.high_bytes)
        need = f"{gib(found.peak.device_bytes):.1f} GiB ({low:.1f} to {high:.1f})"
        console.print(f"    fits, {need}, {format_seconds(found.step_seconds)} a step", markup=False)


def _effect(before: Estimate, fix: Fix) -> str:
    after = fix.outcome.estimate
    words = [f"{VERDICTS[after.verdict][0]}, {gib(after.peak.device_bytes):.1f} GiB ({gib(after.low_bytes):.1f} to "]
    words[0] += f"{gib(after.high_bytes):.1f})"
    seconds = after.step_seconds - before.step_seconds
    if abs(seconds) >= 0.01:
        words.append(f"{seconds:+.2f} s/step")
    elif "slower" not in fix.cost:
        words.append("no slower")
    ram = after.host_ram_bytes - before.host_ram_bytes
    if abs(ram) >= 1 << 29:
        words.append(f"host RAM {gib(ram):+.1f} GiB")
    words.append("lossy" if fix.lossy else "lossless")
    return ", ".join(words) + (f": {fix.cost}" if fix.cost else "")
