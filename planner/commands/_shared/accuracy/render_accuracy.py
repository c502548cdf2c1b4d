"""`vplan accuracy` in the terminal: the rows and their summary, and separately the halves and rehearsals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from planner.commands._shared.verb import table
from planner.evidence.accuracy import AFTER_STEP, APART, PEAKS, WITH_VALIDATION, Comparison, by_family, worst_first
from planner.evidence.held_out import BOTH, HALVES, NONE, NUMBERS, TAKEN, verdicts
from planner.spec.plan import RAN_OUT

if TYPE_CHECKING:
    from rich.console import Console

REHEARSED_TITLE = "rehearsed: our own trainer on virtual GPUs, whose context and NCCL are estimated"
"""Title of the rows of `--runner rehearse`, which no other number here includes."""

SHORT: dict[str, str] = {AFTER_STEP: "after step", WITH_VALIDATION: "with validation"}
"""Shorter names of counters for tables."""

_MISSES = {None: "met", "under": "missed", "false_refusal": "refused"}

MEAN_WORST = ("mean_abs_pct", "max_abs_pct")


def print_accuracy(
    console: Console,
    answer: dict[str, Any],
    compared: Sequence[Comparison],
    rehearsed: Sequence[Comparison],
    *,
    learned: bool,
    each_rehearsed: bool,
) -> None:
    """Prints the answer that `--json` has. ``compared``: measurements; ``rehearsed``: rows of virtual cards, each on a
    line with ``each_rehearsed``. ``learned``: whether estimates learned from any."""
    if compared or not rehearsed:
        print_rows(console, compared)
        print_summary(console, compared, answer["summary"])
        _print_published_rehearsals(console, answer["published_rehearsals"])
    _print_halves(console, answer["halves"])
    if learned:
        _print_learned(console, answer["learned"])
    if rehearsed:
        _print_rehearsed(console, rehearsed, answer["rehearsed"], each=each_rehearsed)


def print_rows(console: Console, compared: Sequence[Comparison]) -> None:
    """Prints the rows by implementation, worst first."""
    for name in dict.fromkeys(entry.row.implementation for entry in compared):
        entries = [entry for entry in worst_first(compared) if entry.row.implementation == name]
        if entries:
            console.print(name, style="bold", markup=False)
            columns = ["id", "counter", ">measured GiB", ">predicted GiB", ">error"]
            rows = [_row(entry) for entry in entries]
            if any(entry.rehearsed_gib is not None for entry in entries):
                columns.insert(3, ">rehearsed GiB")
                for row, entry in zip(rows, entries, strict=True):
                    row.insert(3, "" if entry.rehearsed_gib is None else f"{entry.rehearsed_gib:.2f}")
            console.print(table(columns, rows))
            for entry in entries:
                if entry.row.not_a_peak:
                    console.print(f"{entry.row.id}: {entry.row.not_a_peak}", markup=False, soft_wrap=True)
            console.print("")


def _row(entry: Comparison) -> list[str]:
    error = _MISSES[entry.missed] if entry.error_pct is None else f"{entry.error_pct:+.1f} %"
    return [entry.row.id, SHORT.get(entry.counter, entry.counter), _measured(entry), _predicted(entry), error]


def _measured(entry: Comparison) -> str:
    if entry.measured is None:
        return "ran out" if entry.row.outcome in RAN_OUT else "ran"
    low, high = entry.measured.low_gib, entry.measured.high_gib
    return f"{low:.2f}" if low == high else f"{low:.2f}..{high:.2f}"


def _predicted(entry: Comparison) -> str:
    if entry.predicted is None:
        return ""
    low, _, high = entry.predicted
    number = f"{low:.2f}" if low == high else f"{low:.2f}..{high:.2f}"
    # Where there is no number to compare, or the verdict was wrong, the verdict is what was predicted.
    return f"{number} {entry.verdict}" if entry.measured is None or entry.missed else number


def print_summary(console: Console, compared: Sequence[Comparison], summary: dict[str, Any]) -> None:
    """Prints the summary of the rows, and those that are not supported."""
    _print_unsupported(console, compared)
    heads = ("implementation", "of", ">n", ">median", ">mean", ">max")
    if rows := list(_summary_rows(compared, summary)):
        console.print(table(heads, rows), "")
    verdict = summary["verdict"]
    wrong = f"{verdict['under']} said to fit but ran out, {verdict['false_refusal']} said not to fit but ran"
    console.print(f"verdicts of {verdict['n']} runs: {wrong}")
    for of, key in (("peaks", "coverage"), ("peaks with validation", "coverage_with_validation")):
        covered = summary[key]
        if covered["n"]:
            share, width = f"{covered['inside_pct']:.1f} %", f"{covered['median_width_pct']:.1f} %"
            console.print(f"low..high of {covered['n']} {of}: {share} contain the measured value, median width {width}")


def _summary_rows(compared: Sequence[Comparison], summary: dict[str, Any]) -> list[list[str]]:
    """For each implementation, every counter, then every family of models."""
    rows = []
    for name, numbers in summary["by_implementation"].items():
        entries = [entry for entry in compared if entry.row.implementation == name]
        spreads = {SHORT.get(counter, counter): numbers[counter] for counter in (*PEAKS, *APART) if counter in numbers}
        alone = summary["measured_peaks"]["by_implementation"].get(name, {})
        spreads |= {f"{counter}, peaks alone": alone[counter] for counter in PEAKS if _fewer(alone, numbers, counter)}
        spreads |= {f"{family} models": spread for family, spread in by_family(entries).items()}
        for of, spread in spreads.items():
            if spread["n"]:
                numbers = [f"{spread[f'{kind}_abs_pct']:.1f} %" for kind in ("median", "mean", "max")]
                rows.append([name, of, str(spread["n"]), *numbers])
    return rows


def _fewer(some: dict[str, Any], all_of_them: dict[str, Any], counter: str) -> bool:
    """Whether a counter is in both, with fewer values in the first."""
    return counter in some and bool(some[counter]["n"] < all_of_them[counter]["n"])


def _print_unsupported(console: Console, compared: Sequence[Comparison]) -> None:
    """Prints each reason once, with the rows to which it applies."""
    reasons: dict[str, list[str]] = {}
    for entry in compared:
        if entry.unsupported is not None and entry.row.id not in reasons.setdefault(entry.unsupported, []):
            reasons[entry.unsupported].append(entry.row.id)
    if reasons:
        console.print(f"unsupported rows: {sum(map(len, reasons.values()))}", style="bold")
    for reason, ids in reasons.items():
        console.print(f"{', '.join(ids)}: {reason}", markup=False)
    if reasons:
        console.print("")


def _print_published_rehearsals(console: Console, summary: dict[str, Any]) -> None:
    """Prints how far predictions and published numbers are from rehearsals of the same published runs."""
    if not summary["n"]:
        return
    errors = {side: summary[side] for side in ("predicted", "printed")}
    sides = ", ".join(
        f"{side} {error['median_abs_pct']:.1f} % off the rehearsal ({error['max_abs_pct']:.1f} at worst)"
        for side, error in errors.items()
    )
    line = f"{summary['n']} of {summary['of']} published numbers rehearsed with their trainer's own code: {sides}"
    console.print(line, markup=False, soft_wrap=True)
    for group in summary["not_rehearsed"]:
        console.print(f"  not rehearsed, {len(group['rows'])}: {group['why']}", markup=False, soft_wrap=True)


def _print_halves(console: Console, halves: dict[str, Any]) -> None:
    """Prints our own rows half by half; without any, says so."""
    if "measured" not in halves:
        console.print(NONE, markup=False, soft_wrap=True)
    for kind, parts in halves.items():
        console.print("")
        heads = [head for _, name in HALVES for head in (f">{name} n", ">mean", ">worst")]
        rows = []
        for key, name in NUMBERS.items():
            spreads = [parts[half][key] for half, _ in HALVES]
            if any(spread["n"] for spread in spreads):
                rows.append([name, *(cell for spread in spreads for cell in _spread_cells(spread))])
        console.print(TAKEN[kind], style="bold", markup=False)
        console.print(table(("error of", *heads), rows))
        for half, name in (*HALVES, BOTH):
            console.print(verdicts(name, parts[half]), markup=False, soft_wrap=True)


def _spread_cells(spread: dict[str, Any]) -> list[str]:
    return [str(spread["n"]), *("-" if (value := spread[name]) is None else f"{value:.2f} %" for name in MEAN_WORST)]


def _print_learned(console: Console, summaries: dict[str, Any]) -> None:
    """Prints what learning changes, one counter per line."""
    console.print("")
    rows = []
    for counter in PEAKS:
        sides = [summaries[side][counter] for side in ("before", "after")]
        if sides[0]["n"]:
            rows.append([counter, str(sides[0]["n"]), *(f"{side['mean_abs_pct']:.2f} %" for side in sides)])
    widths = [summaries[side]["coverage"]["median_width_pct"] for side in ("before", "after")]
    if rows and None not in widths:
        inside = [summaries[side]["coverage"]["inside_pct"] for side in ("before", "after")]
        rows.append(["inside low..high", "", *(f"{share:.0f} %" for share in inside)])
        rows.append(["median width", "", *(f"{width:.1f} %" for width in widths)])
    console.print(table(("our own probes, mean error", ">n", ">recorded", ">learned from the others"), rows))


def _print_rehearsed(console: Console, compared: Sequence[Comparison], answer: dict[str, Any], *, each: bool) -> None:
    """Prints the block of rehearsed rows, separate from measured ones."""
    console.print("")
    console.print(REHEARSED_TITLE, style="bold", markup=False)
    if each:
        print_rows(console, compared)
    print_summary(console, compared, answer["summary"])
    for name, numbers in answer["by_grid"].items():
        spreads = ", ".join(
            f"{counter} {numbers[counter]['mean_abs_pct']:.2f} % (worst {numbers[counter]['max_abs_pct']:.1f})"
            for counter in ("allocated", "reserved")
            if counter in numbers and numbers[counter]["n"]
        )
        line = f"grid {name}, {numbers['verdict']['n']} runs: {spreads or 'no peaks'}"
        console.print(line, markup=False, soft_wrap=True)
