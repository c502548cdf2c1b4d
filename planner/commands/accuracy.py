"""`vplan accuracy`: the estimates beside what was measured, ours and other people's."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.commands import USAGE
from planner.commands._shared.verb import Verb, examples, json_option, report_option, show, table, write_report
from planner.errors import VplanError
from planner.evidence import published_rehearsals
from planner.evidence.accuracy import (
    AFTER_STEP,
    APART,
    PEAKS,
    WITH_VALIDATION,
    AfterStep,
    Comparison,
    Predict,
    Prediction,
    answer,
    by_family,
    by_grid,
    compare,
    only,
    summary,
    worst_first,
)
from planner.evidence.held_out import BOTH, HALVES, NONE, NUMBERS, TAKEN, halves, verdicts
from planner.evidence.ledger import OURS, Ledger, default_path
from planner.evidence.measurement import ProbeRow, is_of_a_gpu
from planner.evidence.published import Row, own_row, read_rows, shipped, shipped_own, shipped_rehearsals
from planner.parallel import counted
from planner.spec.configuration import Configuration
from planner.spec.plan import RAN_OUT
from planner.terminal import echo
from planner.units import parse_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from planner.catalog.card_profiles import GpuProfile

REHEARSED_TITLE = "rehearsed: our own trainer on virtual GPUs, whose context and NCCL are estimated"
"""Rows of `--runner rehearse`, which no other number here counts."""

SHORT: dict[str, str] = {AFTER_STEP: "after step", WITH_VALIDATION: "with validation"}
"""Counters that are shown by other words."""

_MISSES = {None: "met", "under": "missed", "false_refusal": "refused"}


@click.command(
    cls=Verb,
    epilog=examples(
        "vplan accuracy",
        "vplan accuracy runs.jsonl --json",
        "vplan accuracy --only cogvideox",
        "vplan accuracy --seconds",
        "vplan accuracy --threads",
        "vplan accuracy --history history.json",
    ),
)
@click.argument("files", nargs=-1, metavar="[FILE]...")
@click.option(
    "--allocator",
    type=click.Choice(["expandable", "classic"]),
    help="Allocator assumed for published rows that do not name it.  [default: classic]",
)
@click.option("--only", "text", metavar="TEXT", help="Only rows with TEXT in their id or model.")
@click.option(
    "--calibrated",
    "what",
    flag_value="calibrated",
    help="Estimate our own rows with the context and speeds that `vplan calibrate` measured.",
)
@click.option(
    "--history",
    metavar="FILE",
    help="Compare the history that `vplan probe --record-history FILE` wrote with the tape.",
)
@click.option(
    "--least", metavar="SIZE", default="1MiB", show_default=True, help="With --history: ignore smaller events."
)
@click.option("--seconds", "what", flag_value="seconds", help="Compare published step times instead of memory.")
@click.option(
    "--threads", "what", flag_value="threads", help="Check commands of public threads, against what was reported."
)
@report_option
@json_option
def command(
    files: Sequence[str],
    allocator: str | None,
    text: str | None,
    what: str | None,
    history: str | None,
    least: str,
    report: str | None,
    as_json: bool,
) -> int | None:
    """Compare estimates with measurements.

    FILE holds one measured run per line (JSON), as published by others or as our probes write them; without FILE, the
    bundled rows (published ones, and our own trainer's on a GPU), the bundled rehearsals and your own probes are used.
    An error is the distance to the measured value in percent, negative where the estimate is too low. For a run that
    ended out of memory, the verdicts "tight" and "no" are correct. For our own probes the answer also says how close
    estimates are that learn from all the others; for the rows of a grid (`vplan calibrate --grid`), both halves: one
    that estimates may learn from, and one that is held out. Rehearsed rows (`--runner rehearse`) are reported apart.

    --history finds the cause of an error: the first event where a recorded run and its tape differ.

    --seconds compares the step times that others published: what is left out, and why, is listed too.

    --threads asks `vplan check` about commands whose outcome was reported in public threads.
    """
    if what in ("seconds", "threads"):
        if files or report or history is not None:
            raise VplanError(f"--{what} compares bundled rows only", "leave out FILE, --report, --history", USAGE)
        if what == "threads":
            from planner.commands._shared.thread_scores import compare_threads

            compare_threads(text, as_json)
            return None
        from planner.commands._shared.published_seconds import compare_seconds

        compare_seconds(text, _estimator({})[0], as_json)
        return None
    if history is not None:
        from planner.commands._shared.allocator_diff import differences

        if files or report:
            raise VplanError("--history compares one run only", "leave out FILE and --report", USAGE)
        return differences(history, parse_bytes(least, "--least"), as_json)
    mine = [] if files else _probes(default_path())
    own = [row for path in files or shipped_own() for row in _probes(path)] + mine
    rows = [own_row(row) for row in mine]
    rows += _published(files or [*shipped(), *shipped_own(), *shipped_rehearsals()], allocator)
    if text is not None:
        rows = only(rows, text)
    predict, after_step = _estimator(_cards(own) if what == "calibrated" else {})
    with click.progressbar(rows, label="estimating", file=sys.stderr, hidden=not sys.stderr.isatty()) as progress:
        compared = compare(progress, predict, after_step)
    rehearsed = [entry for entry in compared if entry.row.taken == "rehearsed"]
    peaks = published_rehearsals.rehearsed_peaks()
    compared = [
        replace(entry, rehearsed_gib=peaks.get(entry.row.id) if entry.row.taken == "published" else None)
        for entry in compared
        if entry.row.taken != "rehearsed"
    ]
    found = answer(compared)
    found["published_rehearsals"] = published_rehearsals.summary(compared)
    if rehearsed:
        found["rehearsed"] = {**answer(rehearsed), "by_grid": by_grid(rehearsed)}
    pairs = _learned(compared, own)
    found["halves"] = halves(compared)
    found["learned"] = {"before": summary([pair[0] for pair in pairs]), "after": summary([pair[1] for pair in pairs])}

    def render(console: Console) -> None:
        if compared or not rehearsed:
            _render_rows(console, compared)
            _render_summary(console, compared, found["summary"])
            _render_published_rehearsals(console, found["published_rehearsals"])
        _render_halves(console, found["halves"])
        if pairs:
            _render_learned(console, found["learned"])
        if rehearsed:
            _render_rehearsed(console, rehearsed, found["rehearsed"], with_rows=bool(files))

    if report:
        write_report(report, compared=compared)
    show(found, as_json, render)
    return None


def _published(paths: Iterable[str | Path], allocator: str | None) -> list[Row]:
    """The rows of files, with the allocator that `--allocator` names; what is to be told of them goes to stderr."""
    rows: list[Row] = []
    for path in paths:
        read, notes = read_rows(path, expandable_segments=allocator == "expandable" if allocator else None)
        rows += read
        for note in notes:
            echo(f"note: {note}", err=True)
    return rows


def _probes(path: str | Path) -> list[ProbeRow]:
    """Our own rows of a file that say something of a GPU."""
    ledger = Ledger(path)
    found = ledger.rows(OURS)
    for note in ledger.notes:
        echo(f"note: {note}", err=True)
    return [row for row in found if is_of_a_gpu(row)]


def _learned(compared: Sequence[Comparison], own: Sequence[ProbeRow]) -> list[tuple[Comparison, Comparison]]:
    """Each number of our own probes beside the estimate that knows no measurement, and beside one that has learned from
    all probes of other plans."""
    from planner.estimate.estimate import estimate_on_card
    from planner.evidence.from_ledger import with_learned
    from planner.layout.inputs import load_facts

    ids = {row.id for row in own}
    before = [entry for entry in compared if entry.row.id in ids and entry.unsupported is None]
    after: list[Comparison] = []
    rows = {id(entry.row): entry.row for entry in before}
    with counted("learning from the others", len(rows)) as done:
        for row in rows.values():
            others = [other for other in own if other.id != row.id]

            def predict(configuration: Configuration, trainer: str, others: list[ProbeRow] = others) -> Prediction:
                facts = with_learned(load_facts(configuration), trainer, others)
                return Prediction.of(estimate_on_card(configuration, facts, trainer))

            after += done(compare([row], predict, lambda *_: 0))
    return list(zip(before, after, strict=True))


def _render_halves(console: Console, found: dict[str, Any]) -> None:
    """Our own rows, half by half; without any, that there are none."""
    if "measured" not in found:
        console.print(NONE, markup=False, soft_wrap=True)
    for taken, parts in found.items():
        console.print("")
        heads = [head for _, name in HALVES for head in (f">{name} n", ">mean", ">worst")]
        rows = []
        for key, name in NUMBERS.items():
            spreads = [parts[half][key] for half, _ in HALVES]
            if any(spread["n"] for spread in spreads):
                rows.append([name, *(cell for spread in spreads for cell in _spread_cells(spread))])
        console.print(TAKEN[taken], style="bold", markup=False)
        console.print(table(("error of", *heads), rows))
        for half, name in (*HALVES, BOTH):
            console.print(verdicts(name, parts[half]), markup=False, soft_wrap=True)


def _spread_cells(spread: dict[str, Any]) -> list[str]:
    return [str(spread["n"]), *("-" if (value := spread[name]) is None else f"{value:.2f} %" for name in MEAN_WORST)]


MEAN_WORST = ("mean_abs_pct", "max_abs_pct")


def _render_learned(console: Console, found: dict[str, Any]) -> None:
    """What learning changes, a line a counter."""
    console.print("")
    rows = []
    for counter in PEAKS:
        sides = [found[side][counter] for side in ("before", "after")]
        if sides[0]["n"]:
            rows.append([counter, str(sides[0]["n"]), *(f"{side['mean_abs_pct']:.2f} %" for side in sides)])
    widths = [found[side]["coverage"]["median_width_pct"] for side in ("before", "after")]
    if rows and None not in widths:
        inside = [found[side]["coverage"]["inside_pct"] for side in ("before", "after")]
        rows.append(["inside low..high", "", *(f"{share:.0f} %" for share in inside)])
        rows.append(["median width", "", *(f"{width:.1f} %" for width in widths)])
    console.print(table(("our own probes, mean error", ">n", ">recorded", ">learned from the others"), rows))


def _cards(own: Sequence[ProbeRow]) -> dict[str, GpuProfile]:
    """Name -> the card as it was calibrated, of those that our own rows were taken on; a VplanError without any."""
    from planner.catalog import card_lookup
    from planner.evidence import calibration

    found = {}
    for name, env in {row.machine.gpu: row.env for row in own}.items():
        if known := calibration.read(env.gpu, env.driver, env.torch):
            card = card_lookup.parse_gpus(name)[1]
            found[card.name] = calibration.calibrated(card, known)
    if not found:
        fault = "none of the GPUs of these rows was calibrated with the same driver and torch"
        raise VplanError(fault, "run `vplan calibrate --no-probes` on one, or leave out --calibrated")
    return found


def _estimator(cards: Mapping[str, GpuProfile]) -> tuple[Predict, AfterStep]:
    """The real estimator, imported only when there is something to compare. `cards`: what is known better of some."""
    from planner.estimate.estimate import after_step_bytes, estimate_on_card
    from planner.layout.inputs import load_facts

    def predict(configuration: Configuration, trainer: str) -> Prediction:
        card = cards.get(configuration.machine.gpu) if trainer == "vplan" else None
        return Prediction.of(estimate_on_card(configuration, load_facts(configuration, gpu=card), trainer))

    def after_step(configuration: Configuration, trainer: str) -> int:
        return after_step_bytes(configuration, load_facts(configuration), trainer)

    return predict, after_step


def _render_rows(console: Console, compared: Sequence[Comparison]) -> None:
    """The rows by implementation, worst first."""
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


def _render_rehearsed(
    console: Console, compared: Sequence[Comparison], found: dict[str, Any], *, with_rows: bool
) -> None:
    """The block of rehearsed rows, apart from measured ones."""
    console.print("")
    console.print(REHEARSED_TITLE, style="bold", markup=False)
    if with_rows:
        _render_rows(console, compared)
    _render_summary(console, compared, found["summary"])
    for name, numbers in found["by_grid"].items():
        spreads = ", ".join(
            f"{counter} {numbers[counter]['mean_abs_pct']:.2f} % (worst {numbers[counter]['max_abs_pct']:.1f})"
            for counter in ("allocated", "reserved")
            if counter in numbers and numbers[counter]["n"]
        )
        line = f"grid {name}, {numbers['verdict']['n']} runs: {spreads or 'no peaks'}"
        console.print(line, markup=False, soft_wrap=True)


def _render_published_rehearsals(console: Console, found: dict[str, Any]) -> None:
    """How far prediction and print are from rehearsals of the same published runs."""
    if not found["n"]:
        return
    sides = ", ".join(
        f"{side} {found[side]['median_abs_pct']:.1f} % off the rehearsal ({found[side]['max_abs_pct']:.1f} at worst)"
        for side in ("predicted", "printed")
    )
    line = f"{found['n']} of {found['of']} published numbers rehearsed with their trainer's own code: {sides}"
    console.print(line, markup=False, soft_wrap=True)
    for left in found["not_rehearsed"]:
        console.print(f"  not rehearsed, {len(left['rows'])}: {left['why']}", markup=False, soft_wrap=True)


def _render_summary(console: Console, compared: Sequence[Comparison], summary: dict[str, Any]) -> None:
    """What the rows amount to, and which of them are not supported."""
    _render_unsupported(console, compared)
    heads = ("implementation", "of", ">n", ">median", ">mean", ">max")
    console.print(table(heads, _summary_rows(compared, summary)), "")
    verdict = summary["verdict"]
    said = f"{verdict['under']} said to fit but ran out, {verdict['false_refusal']} said not to fit but ran"
    console.print(f"verdicts of {verdict['n']} runs: {said}")
    for of, key in (("peaks", "coverage"), ("peaks with validation", "coverage_with_validation")):
        covered = summary[key]
        if covered["n"]:
            share, width = f"{covered['inside_pct']:.1f} %", f"{covered['median_width_pct']:.1f} %"
            console.print(f"low..high of {covered['n']} {of}: {share} contain the measured value, median width {width}")


def _row(entry: Comparison) -> list[str]:
    error = _MISSES[entry.missed] if entry.error_pct is None else f"{entry.error_pct:+.1f} %"
    return [entry.row.id, _counter(entry.counter), _measured(entry), _predicted(entry), error]


def _counter(counter: str) -> str:
    return SHORT.get(counter, counter)


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


def _render_unsupported(console: Console, compared: Sequence[Comparison]) -> None:
    """Each reason once, with the rows it holds for."""
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


def _fewer(some: dict[str, Any], all_of_them: dict[str, Any], counter: str) -> bool:
    """Whether a counter is in both, with fewer numbers in the first."""
    return counter in some and bool(some[counter]["n"] < all_of_them[counter]["n"])


def _summary_rows(compared: Sequence[Comparison], summary: dict[str, Any]) -> list[list[str]]:
    """Per implementation: each counter, then each family of models."""
    rows = []
    for name, found in summary["by_implementation"].items():
        entries = [entry for entry in compared if entry.row.implementation == name]
        spreads = {_counter(counter): found[counter] for counter in (*PEAKS, *APART) if counter in found}
        alone = summary["measured_peaks"]["by_implementation"].get(name, {})
        spreads |= {f"{counter}, peaks alone": alone[counter] for counter in PEAKS if _fewer(alone, found, counter)}
        spreads |= {f"{family} models": spread for family, spread in by_family(entries).items()}
        for of, spread in spreads.items():
            if spread["n"]:
                numbers = [f"{spread[f'{kind}_abs_pct']:.1f} %" for kind in ("median", "mean", "max")]
                rows.append([name, of, str(spread["n"]), *numbers])
    return rows
