"""`vplan report`: one HTML page about a plan, or several side by side."""

from __future__ import annotations

from pathlib import Path

import click

from planner.commands import USAGE
from planner.commands._shared.verb import Verb, examples, write_report
from planner.errors import VplanError
from planner.evidence.jsonl import rows_by_id
from planner.evidence.ledger import OURS, Ledger, default_path
from planner.evidence.published import own_row, read_rows
from planner.spec.plan import read_plan

MOST = 6
"""Plans on one page."""


@click.command(
    cls=Verb,
    epilog=examples(
        "vplan report plan.toml -o report.html",
        "vplan report a.toml b.toml -o both.html",
        "vplan report plan.toml --rows runs.jsonl -o report.html",
    ),
)
@click.argument("paths", metavar="PLAN.toml...", nargs=-1, required=True)
@click.option("--rows", metavar="FILE", multiple=True, help="Also show and compare the measured rows in FILE.")
@click.option("-o", "--output", metavar="FILE", default="report.html", show_default=True, help="File to write.")
def command(paths: tuple[str, ...], rows: tuple[str, ...], output: str) -> None:
    """Write an HTML report about a plan: what it needs and when, what each option saved, how far the card goes.

    The report is one self-contained file: it can be mailed, printed, and read without JavaScript. Several plans are
    shown side by side. It includes your own probes of these models. No browser is opened.
    """
    if len(paths) > MOST:
        raise VplanError(f"{len(paths)} plans are too many for a page", f"pass at most {MOST}", USAGE)
    plans = [(Path(path).name, read_plan(path)) for path in paths]
    mine = [row for row in Ledger(default_path()).rows(OURS) if row.runner == "real"]
    known, probes = [own_row(row) for row in mine], [row.to_json() for row in mine]
    for path in rows:
        read, notes = read_rows(path)
        known += read
        probes += [row for row in rows_by_id(path).values() if "env" in row]
        for note in notes:
            click.echo(f"note: {note}", err=True)
    write_report(output, plans, rows=known, probes=probes)
