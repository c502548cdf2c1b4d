"""`vplan report`: an HTML page about one plan, several side by side, or a training run."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from planner.commands import USAGE
from planner.commands._shared.verb import Verb, examples, force_option, page_file, write_report
from planner.errors import VplanError, quoted
from planner.evidence.jsonl import rows_by_id
from planner.evidence.ledger import OURS, Ledger, default_path
from planner.evidence.published import own_row, read_rows
from planner.launch.run_history import RunHistory, is_run
from planner.spec.plan import is_plan, read_plan
from planner.terminal import echo

MOST = 6
"""Most plans on one page."""

MOST_NAMED = 3
"""Most runs and plans of a folder that an error names."""

OF_WHAT = "pass plan.toml files, or the --output of a `vplan train`"


@click.command(
    cls=Verb,
    epilog=examples(
        "vplan report plan.toml -o report.html",
        "vplan report a.toml b.toml -o both.html",
        "vplan report plan.toml --rows runs.jsonl -o report.html",
        "vplan report run",
        "vplan report run -o run.html",
    ),
)
@click.argument("paths", metavar="PLAN.toml...|OUTPUT", nargs=-1, required=True)
@click.option("--rows", metavar="FILE", multiple=True, help="Also show and compare the measured rows in FILE.")
@click.option("-o", "--output", metavar="FILE.html", callback=page_file,
              help="File to write.  [default: report.html; of a run OUTPUT/report.html]")  # fmt: skip
@force_option
def command(paths: tuple[str, ...], rows: tuple[str, ...], output: str | None) -> None:
    """Write an HTML report about a plan: what it needs and when, what each option saved, how far the card goes.

    The report is one self-contained file: it can be mailed, printed, and read without JavaScript. Several plans are
    shown side by side. It includes your own probes of these models. No browser is opened.

    Of a training run, by its OUTPUT folder, the report goes to OUTPUT/report.html, beside the samples that it shows,
    or to the file of `-o`.
    """
    for path in paths:
        if not Path(path).expanduser().exists():
            raise VplanError(f"there is no {quoted(path)}", OF_WHAT)
    if any(Path(path).is_dir() for path in paths):
        _write_run(paths, rows, output)
        return
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
            echo(f"note: {note}", err=True)
    write_report(output or "report.html", plans, rows=known, probes=probes)


def _write_run(paths: tuple[str, ...], rows: tuple[str, ...], output: str | None) -> None:
    """Writes the page of a training run."""
    import reports

    folder = next(Path(path).expanduser() for path in paths if Path(path).expanduser().is_dir())
    if not is_run(folder):
        raise VplanError(f"{quoted(str(folder))} is not the output of a run", _instead(folder))
    if len(paths) > 1 or rows:
        what = "--rows compares plans" if rows else "a run has a page of its own"
        raise VplanError(f"{what}, and {quoted(str(folder))} is a run", f"as in `vplan report {folder}`", USAGE)
    history = RunHistory(folder)
    history.update()
    echo(f"wrote {reports.write_run(history, output)}", err=True)


def _instead(folder: Path) -> str:
    """The fix for a folder that is not a run: the runs or plans in it."""
    inside: list[Path] = []
    with contextlib.suppress(OSError):  # no permission to list it
        inside = sorted(folder.iterdir())
    runs = [path for path in inside if path.is_dir() and is_run(path)]
    plans = [path for path in inside if path.suffix == ".toml" and is_plan(str(path))]
    if not runs and not plans:
        return OF_WHAT
    first, *others = map(str, [*runs, *plans])
    more = f" (beside it: {', '.join(others[:MOST_NAMED])})" if others else ""
    return f"pass what lies in it: `vplan report {first}`{more}"
