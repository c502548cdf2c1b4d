"""Changes to another trainer's command, in the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from planner.commands._shared.rendering.verdict_words import VERDICTS
from planner.commands._shared.rendering.wrapping import INDENT, print_lines, wrapped
from planner.units import GIB, format_gib, format_seconds, gib

if TYPE_CHECKING:
    from rich.console import Console

    from planner.dialects.base.flag_effects import OtherWay
    from planner.foreign.case import Case
    from planner.foreign.pricing import CheckedEstimate
    from planner.foreign.rehearsed_command import CheckedRehearsal
    from planner.foreign.smallest_change import Fix
    from planner.spec.plan import Estimate

MOST_FIXES = 3


def print_fixes(console: Console, before: Estimate, fixes: Iterable[Fix], mark: str = "") -> None:
    """Prints each change and its effect. ``mark`` is appended to the first heading."""
    for at, fix in enumerate(fixes):
        heading = f"smallest change{mark}:" if at == 0 else "or:"
        console.print(heading, style="bold", markup=False)
        _print_change(console, fix)
        print_lines(console, wrapped(f"    {_effect(before, fix)}", console.width, " " * 4))


def fix_lines(before: Estimate, fixes: Iterable[Fix]) -> list[tuple[str, str]]:
    """Each change in a line, and what it does: for a page."""
    return [(_in_a_line(fix.change), _effect(before, fix)) for fix in fixes]


def _print_change(console: Console, fix: Fix) -> None:
    """Prints the flags and lines of a change, each once, since two parts may share some; each part is followed by its
    cost."""
    costs = {typed[-1].splitlines()[-1]: cost for typed, cost in fix.costs.items()} if _is_of_parts(fix) else {}
    for line in dict.fromkeys(line for part in fix.change for line in part.splitlines()):
        console.print(f"  {line}", markup=False, soft_wrap=True)
        if line in costs:
            print_lines(console, wrapped(f"{INDENT}{costs[line]}", console.width, INDENT), "dim")


def _is_of_parts(fix: Fix) -> bool:
    """Whether each cost is printed below the part that it is of: of several parts one alone may cost something."""
    return len(fix.costs) > 1 or (bool(fix.costs) and fix.cost not in fix.costs.values())


def _in_a_line(change: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(line for part in change for line in part.splitlines()))


def print_helps(console: Console, helps: Iterable[Fix]) -> None:
    """Prints changes that help but are not enough."""
    for fix in helps:
        words = f"helps, but not enough by itself: {_in_a_line(fix.change)} ({fix.cost})"
        print_lines(console, wrapped(words, console.width, "  "), "dim")


def print_unpriced(console: Console, case: Case, verdict: str) -> None:
    """Prints, for a command that does not fit, which of its options are not counted and may save memory."""
    if case.unpriced and verdict == "no":
        console.print(f"that is without {', '.join(case.unpriced)}: not estimated, and may need less", style="bold")


def print_least(console: Console, least: Fix | None) -> None:
    """Prints the effect of all options together, if that is not enough."""
    if least is not None:
        estimate = least.outcome.estimate
        need = f"{gib(estimate.peak.device_bytes):.1f} GiB{', tight' if estimate.verdict == 'tight' else ''}"
        console.print(f"the least it reaches is {need}, with", style="bold", markup=False)
        _print_change(console, least)


def print_unrecorded(console: Console, unrecorded: Iterable[str]) -> None:
    """Prints the options that were not tried because no recording covers them."""
    if words := _in_a_line(unrecorded):
        console.print(f"not recorded, so not tried: {words}", style="dim", markup=False)


def print_not_priced(console: Console, ways: Iterable[OtherWay]) -> None:
    """Prints the trainer's options against such a shortage that no estimate includes."""
    for way in ways:
        console.print(f"not priced, and may need less: {way.written} ({way.why})", markup=False)


def print_smaller(console: Console, smaller: Iterable[Fix]) -> None:
    """Prints shorter clips and smaller sizes that fit: a different training, so it is not called lossless."""
    for fix in smaller:
        console.print(f"{fix.cost} fit:", style="bold", markup=False)
        _print_change(console, fix)
        found = fix.outcome.estimate
        low, high = gib(found.low_bytes), gib(found.high_bytes)
        need = f"{gib(found.peak.device_bytes):.1f} GiB ({low:.1f} to {high:.1f})"
        console.print(f"    fits, {need}, {format_seconds(found.step_seconds)} a step", markup=False)


def print_larger_card(console: Console, larger: CheckedEstimate | None) -> None:
    """Prints the smallest class of card that the unchanged command fits."""
    if larger is not None:
        found = larger.estimate
        need = f"{gib(found.peak.device_bytes):.1f} of {gib(found.budget_bytes):.1f} GiB"
        console.print(f"unchanged it fits --gpu {found.machine.gpu} ({need})", markup=False)


def print_more_ram(console: Console, ram: int | None, estimate: Estimate) -> None:
    """Prints the host RAM with which the unchanged command fits."""
    if ram is not None:
        early = estimate.host is not None and estimate.host.phase in ("encode", "load")
        swap = "; swap space will do, as it is short only before training begins" if early else ""
        console.print(f"unchanged it fits --host-ram {ram // GIB}GiB{swap}", markup=False)


def print_as_lora(console: Console, lora: tuple[str, Estimate] | None) -> None:
    """Prints the LoRA that fits if full training does not, and how to request it."""
    if lora is not None:
        words, plan = lora
        need = f"{gib(plan.peak.device_bytes):.1f} GiB{', lossy' if plan.lossy else ''}"
        console.print(f"a LoRA fits ({need}): {words}", markup=False, soft_wrap=True)


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
    return ", ".join(words) + (f": {fix.cost}" if fix.cost and not _is_of_parts(fix) else "")


def print_rehearsal_check(console: Console, checked: CheckedRehearsal | str) -> None:
    """Prints predicted and rehearsed memory in one line, then the smallest change; or the reason why there is none."""
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
