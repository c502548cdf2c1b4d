"""What was predicted of a rehearsed command, in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.commands._shared.fixes import print_fixes, print_helps
from planner.units import format_gib, gib

if TYPE_CHECKING:
    from rich.console import Console

    from planner.foreign.rehearsed_command import CheckedRehearsal


MOST_FIXES = 3


def print_checked(console: Console, checked: CheckedRehearsal | str) -> None:
    """Predicted and rehearsed in one line, then the smallest change; or the line that says why there is none."""
    if isinstance(checked, str):
        console.print(checked, style="dim", markup=False)
        console.print()
        return
    console.print(_compared(checked), markup=False)
    found = checked.checked
    mark = " (estimated, not rehearsed)"
    if checked.missed_bytes and found.fixes:
        mark = f" (estimated, with the {format_gib(checked.missed_bytes)} more that was rehearsed)"
    if found.searched and found.outcome.estimate.verdict != "fits" and not found.fixes:
        console.print("no option of this trainer makes it fit, by estimate", style="bold", markup=False)
    print_fixes(console, found.outcome.estimate, found.fixes[:MOST_FIXES], mark)
    print_helps(console, found.helps)
    console.print()


def _compared(checked: CheckedRehearsal) -> str:
    predicted, rehearsed = checked.predicted_bytes, checked.rehearsed_bytes
    name = checked.checked.case.dialect.title
    line = f"vplan check reads it ({name}): predicted {gib(predicted):.2f} GiB on the device, rehearsed "
    if checked.is_least:
        return f"{line}at least {gib(rehearsed):.2f}"
    return f"{line}{gib(rehearsed):.2f} ({100 * (predicted / rehearsed - 1):+.1f} %)" if rehearsed else f"{line}nothing"
