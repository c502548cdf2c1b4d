"""`vplan accuracy`: estimates compared with measurements, our own and published ones."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from planner.commands import USAGE
from planner.commands._shared.accuracy.render_accuracy import print_accuracy
from planner.commands._shared.verb import Verb, examples, json_option, report_option, show, write_report
from planner.errors import VplanError
from planner.evidence import published_rehearsals
from planner.evidence.accuracy import (
    Comparison,
    Predict,
    Prediction,
    answer,
    by_grid,
    compare,
    estimated_after_step,
    only,
    summary,
)
from planner.evidence.held_out import halves
from planner.evidence.ledger import OURS, Ledger, default_path
from planner.evidence.measurement import ProbeRow, is_of_a_gpu
from planner.evidence.published import Row, own_row, published_files, read_rows, shipped_own, shipped_rehearsals
from planner.parallel import progress_bar
from planner.spec.configuration import Configuration
from planner.terminal import echo
from planner.units import parse_bytes

if TYPE_CHECKING:
    from planner.catalog.card_profiles import GpuProfile


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
            from planner.commands._shared.accuracy.thread_scores import compare_threads

            compare_threads(text, as_json)
            return None
        from planner.commands._shared.accuracy.published_seconds import compare_seconds

        compare_seconds(text, _predictor({}), as_json)
        return None
    if history is not None:
        from planner.commands._shared.accuracy.allocator_diff import differences

        if files or report:
            raise VplanError("--history compares one run only", "leave out FILE and --report", USAGE)
        return differences(history, parse_bytes(least, "--least"), as_json)
    _compare_memory(files, allocator, text, what == "calibrated", report, as_json)
    return None


def _compare_memory(
    files: Sequence[str], allocator: str | None, text: str | None, calibrated: bool, report: str | None, as_json: bool
) -> None:
    """Prints measured memory next to its estimates."""
    mine = [] if files else _probes(default_path())
    own = [row for path in files or shipped_own() for row in _probes(path)] + mine
    rows = [own_row(row) for row in mine]
    rows += _published(files or [*published_files(), *shipped_own(), *shipped_rehearsals()], allocator)
    if text is not None:
        rows = only(rows, text)
    predict = _predictor(_cards(own) if calibrated else {})
    with click.progressbar(rows, label="estimating", file=sys.stderr, hidden=not sys.stderr.isatty()) as progress:
        compared = compare(progress, predict, estimated_after_step)
    rehearsed = [entry for entry in compared if entry.row.origin == "rehearsed"]
    peaks = published_rehearsals.rehearsed_peaks()
    compared = [
        replace(entry, rehearsed_gib=peaks.get(entry.row.id) if entry.row.origin == "published" else None)
        for entry in compared
        if entry.row.origin != "rehearsed"
    ]
    found = answer(compared)
    found["published_rehearsals"] = published_rehearsals.summary(compared)
    if rehearsed:
        found["rehearsed"] = {**answer(rehearsed), "by_grid": by_grid(rehearsed)}
    pairs = _learned(compared, own)
    found["halves"] = halves(compared)
    found["learned"] = {"before": summary([pair[0] for pair in pairs]), "after": summary([pair[1] for pair in pairs])}
    if report:
        write_report(report, compared=compared)
    learned, each = bool(pairs), bool(files)
    show(
        found,
        as_json,
        lambda console: print_accuracy(console, found, compared, rehearsed, learned=learned, each_rehearsed=each),
    )


def _published(paths: Iterable[str | Path], allocator: str | None) -> list[Row]:
    """The rows of files, with the allocator named by `--allocator`. Notes about them go to stderr."""
    rows: list[Row] = []
    for path in paths:
        read, notes = read_rows(path, expandable_segments=allocator == "expandable" if allocator else None)
        rows += read
        for note in notes:
            echo(f"note: {note}", err=True)
    return rows


def _probes(path: str | Path) -> list[ProbeRow]:
    """Our own rows of a file that were measured on a GPU."""
    ledger = Ledger(path)
    found = ledger.rows(OURS)
    for note in ledger.notes:
        echo(f"note: {note}", err=True)
    return [row for row in found if is_of_a_gpu(row)]


def _learned(compared: Sequence[Comparison], own: Sequence[ProbeRow]) -> list[tuple[Comparison, Comparison]]:
    """For each measured number of our own probes, the estimate without measurements and the one that learned from all
    probes of other plans."""
    from planner.estimate.estimate import estimate_on_card
    from planner.evidence.from_ledger import with_learned
    from planner.layout.recordings import load_facts

    ids = {row.id for row in own}
    before = [entry for entry in compared if entry.row.id in ids and entry.unsupported is None]
    after: list[Comparison] = []
    rows = {id(entry.row): entry.row for entry in before}
    with progress_bar("learning from the others", len(rows)) as done:
        for row in rows.values():
            others = [other for other in own if other.id != row.id]

            def predict(configuration: Configuration, trainer: str, others: list[ProbeRow] = others) -> Prediction:
                facts = with_learned(load_facts(configuration), trainer, others)
                return Prediction.of(estimate_on_card(configuration, facts, trainer))

            after += done(compare([row], predict, lambda *_: 0))
    return list(zip(before, after, strict=True))


def _cards(own: Sequence[ProbeRow]) -> dict[str, GpuProfile]:
    """Name -> calibrated card, for the cards of our own rows. Raises a VplanError if there are none."""
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


def _predictor(cards: Mapping[str, GpuProfile]) -> Predict:
    """The real estimator, imported only when there is something to compare. `cards`: calibrated cards, which replace
    the listed ones."""
    from planner.estimate.estimate import estimate_on_card
    from planner.layout.recordings import load_facts

    def predict(configuration: Configuration, trainer: str) -> Prediction:
        card = cards.get(configuration.machine.gpu) if trainer == "vplan" else None
        return Prediction.of(estimate_on_card(configuration, load_facts(configuration, gpu=card), trainer))

    return predict
