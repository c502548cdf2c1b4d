"""`vplan watch`: follows a training run in the terminal and on a local web page."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.commands import USAGE
from planner.commands._shared.verb import Verb, answer_console, examples, json_option, show, table
from planner.errors import VplanError, quoted
from planner.launch.run_history import RunHistory, is_run
from planner.units import format_seconds, gib, plural

if TYPE_CHECKING:
    from rich.console import RenderableType

    from planner.launch.run_course import RunPhase
    from reports.run_data import RunPage

PORT = 8017
LOOK_SECONDS = 2.0


@click.command(
    cls=Verb,
    epilog=examples(
        "vplan watch run",
        "vplan watch run --port 0",
        "vplan watch run --json",
    ),
)
@click.argument("output", metavar="OUTPUT")
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=PORT,
    show_default=True,
    metavar="N",
    help="Port of the page; 0 takes a free one.",
)
@json_option
def command(output: str, port: int, as_json: bool) -> int | None:
    """Follow a training run: OUTPUT is the folder that `vplan train` writes to.

    A page on this computer alone shows loss, speed, samples, and memory over time beside what the plan predicted, phase
    by phase. `vplan train` writes the same page to OUTPUT/report.html. With --json the numbers are printed once. To see
    another computer's page, forward the port: ssh -L 8017:127.0.0.1:8017 HOST.
    """
    folder = Path(output).expanduser().absolute()
    if not is_run(folder):
        raise VplanError(f"{quoted(output)} is not the output of a run", "pass the --output of a `vplan train`")
    history = RunHistory(folder)
    if as_json:
        history.update()
        from reports.run_data import run_page

        show(_answer(run_page(history)), as_json, lambda console: None)
        return None
    _follow(history, port)
    return None


def _follow(history: RunHistory, port: int) -> None:
    """Serves the page and updates the terminal's summary until the user stops it."""
    from rich.live import Live

    from planner.commands._shared.training.run_report import RunServer
    from reports.run_data import run_page

    try:
        server = RunServer(history.output, port)
    except OSError as error:
        fault = f"cannot use port {port}: {error.strerror}"
        raise VplanError(fault, "pass another --port, or --port 0 for a free one", USAGE) from None
    threading.Thread(target=server.serve_forever, name="vplan-page", daemon=True).start()
    console = answer_console()
    console.print(f"page: {server.url}  (Ctrl-C ends it, not the run)", markup=False, soft_wrap=True)
    try:
        if not console.is_terminal:
            while True:
                time.sleep(LOOK_SECONDS)
        history.update()
        with Live(_summary(run_page(history)), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(LOOK_SECONDS)
                history.update()
                live.update(_summary(run_page(history)), refresh=True)
    finally:
        server.shutdown()
        server.server_close()


def _summary(page: RunPage) -> RenderableType:
    """The run in a few lines, and its memory by phase."""
    from rich.console import Group
    from rich.text import Text

    course = page.course
    lines = [Text(page.title), Text(page.verdict, style="bold")]
    over = min(course.smoothed_over, page.done)
    words = [f"loss {course.smoothed[-1]:.4f} (mean of {plural(over, 'step')})"] if course.smoothed else []
    if course.recent_seconds is not None:
        words.append(f"{format_seconds(course.recent_seconds)} per step{_estimated(page)}")
    lines += [Text(", ".join(words))] if words else []
    lines += [Text(page.message)] if page.message else []
    lines += [Text(page.prediction)] if page.prediction else []
    if not course.phases:
        return Group(*lines)
    on_gpu = bool(page.budget_bytes)
    heads = ("phase", ">times", *((">predicted", ">device") if on_gpu else ()), ">host RAM")
    rows = table(heads, [_row(entry, on_gpu) for entry in course.phases])
    note = "GiB, the highest of each phase" + (f"; the card gives {gib(page.budget_bytes):.2f}" if on_gpu else "")
    note += "; !: outside the predicted range" if any(entry.is_inside is False for entry in course.phases) else ""
    return Group(*lines, Text(), rows, Text(note, style="dim"))


def _estimated(page: RunPage) -> str:
    forecast = page.course.forecast
    if forecast is None or page.device == "cpu":
        return ""
    high = f" to {format_seconds(forecast.step_seconds_high)}" if forecast.step_seconds_high else ""
    return f" (estimated {format_seconds(forecast.step_seconds)}{high})"


def _row(entry: RunPhase, on_gpu: bool) -> tuple[str, ...]:
    device = _gib(entry.peaks["device_bytes"])
    ranged = " to ".join(_gib(value) for value in entry.device_range or ())
    middle = (ranged, f"{device}{'' if entry.is_inside is not False else ' !'}") if on_gpu else ()
    return (entry.phase, str(entry.times), *middle, _gib(entry.peaks["host_bytes"]))


def _gib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{gib(nbytes):.2f}"


def _answer(page: RunPage) -> dict[str, Any]:
    """The run's current numbers, as JSON."""
    course = page.course
    return {
        "state": page.state,
        "message": page.message or None,
        "step": page.done,
        "steps": page.total,
        "loss": course.loss.mean[-1] if course.loss.mean else None,
        "smoothed_loss": course.smoothed[-1] if course.smoothed else None,
        "step_seconds": course.recent_seconds,
        "seconds_left": course.seconds_left,
        "starts": len(course.parts),
        "repeated_steps": page.repeated,
        "phases": {
            entry.phase: {
                "times": entry.times,
                "seconds": round(entry.seconds, 3),
                **entry.peaks,
                "predicted_low_bytes": entry.device_range[0] if entry.device_range else None,
                "predicted_high_bytes": entry.device_range[1] if entry.device_range else None,
                "inside": entry.is_inside,
            }
            for entry in course.phases
        },
        "samples": [name for entry in page.rounds for name in entry.files],
    }
