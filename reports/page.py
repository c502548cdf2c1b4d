"""One HTML file out of the data: templates, style and script are put together; the file is replaced whole."""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import jinja2

from planner.errors import VplanError, quoted
from planner.estimate.timeline import PhaseParts
from planner.evidence import held_out as halves
from planner.evidence.accuracy import Comparison
from planner.file_writing import write_file
from planner.launch.run_history import BINS
from planner.search.capacity_map import Cell
from planner.spec.plan import Breakdown
from planner.units import GIB, format_seconds, gib
from reports import charts, run_data
from reports.data import Fact, PlanData

if TYPE_CHECKING:
    from planner.rehearsal.live_memory import MemoryCourse
    from reports.rehearsal_data import RehearsalPage
    from reports.run_data import RunPage

TEMPLATES = Path(__file__).with_name("templates")
AXES = {"frames": "frames", "batch": "batch_size"}
LETTERS = "ABCDEFGH"
"""Names of the ladder's ways in the cells of the capacity map."""


@dataclass(frozen=True)
class Page:
    """The content of one HTML file: plans, accuracy, environment."""

    title: str
    plans: tuple[PlanData, ...] = ()
    compared: tuple[Comparison, ...] = ()
    summary: dict[str, Any] = field(default_factory=dict)
    """of `compared`, as `planner.evidence.accuracy.summary` gives it"""
    halves: dict[str, dict[str, Any]] = field(default_factory=dict)
    """of `compared`, as `planner.evidence.held_out.halves` gives it"""
    environment: tuple[Fact, ...] = ()
    command: str = ""
    """that makes this page again"""
    template: ClassVar[str] = "page.html"


def render(page: Page | RehearsalPage | RunPage) -> str:
    """The HTML of a page, with style and script inside."""
    environment = _environment()
    style = environment.get_template("style.css").render()
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    # The page loads nothing, and of scripts runs only its own: names in it come from users' files, and the page may be
    # passed on.
    policy = "; ".join(
        [
            "default-src 'none'",
            f"style-src '{_digest(style)}'",
            f"script-src '{_digest(script)}'",
            *_sources(page),
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    html: str = environment.get_template(page.template).render(
        page=page, style=_raw(style), script=_raw(script), policy=policy
    )
    return html


def _sources(page: Page | RehearsalPage | RunPage) -> list[str]:
    """What a page loads: that of a run shows the samples beside it, and a live one asks the server for news."""
    if page.template != "run.html":
        return []
    where = "'self'" if getattr(page, "live", False) else "'self' file:"
    return [f"img-src {where}", f"media-src {where}", "connect-src 'self'"]


def write(html: str, path: str | Path) -> None:
    """Writes the file atomically: it holds the old page or the new one, never a part. Raises a VplanError when it
    cannot be written."""
    check_name(path)
    path = Path(path)
    try:
        write_file(path, html)
    except OSError as error:
        raise VplanError(f"cannot write report {quoted(str(path))}: {error.strerror}", "choose another file") from None


def check_name(path: str | Path) -> None:
    """Raises a VplanError unless the path ends in .html or .htm: it may be a plan that was meant as input."""
    if Path(path).suffix.lower() not in (".html", ".htm"):
        raise VplanError(f"the report {quoted(str(path))} is no .html file", "name one, as report.html")


def prepare() -> None:
    """Compiles the templates, which takes longer than filling them in; for a process that waits for a page's data
    anyway."""
    for name in _environment().list_templates(extensions=["css", "html"]):
        _environment().get_template(name)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        # A misspelt name in a template is an error, not an empty cell.
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"gib": _gib, "signed_gib": _signed, "seconds": format_seconds, "pct": _share, "at": _at}
    environment.globals |= {"charts": charts, "letters": LETTERS, "gib": gib, "timeline": _spots}
    environment.globals |= {"front": _front, "ticks_gib": _ticks_gib, "used_parts": _parts_used, "is_own": _is_own}
    environment.globals |= {"agreement": _agreement, "seconds_agreement": _seconds, "halves_words": halves}
    environment.filters |= {"moment": run_data.moment, "share": _per_cent, "place": _place}
    environment.globals |= {"memory_readings": run_data.memory_readings, "step_readings": run_data.step_readings}
    environment.globals |= {"phase_words": run_data.phase_words, "highest": run_data.highest, "bins": BINS}
    environment.globals |= {"rungs_used": _rungs_used, "course_readout": _course}
    return environment


def _raw(text: str) -> str:
    """Our own style and script, which autoescape must leave alone. Nothing of the data is in them."""
    from markupsafe import Markup

    return Markup(text)


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _gib(nbytes: int) -> str:
    return f"{gib(nbytes):.2f}"


def _signed(nbytes: int) -> str:
    return f"{gib(nbytes):+.2f}"


def _share(value: float, total: float) -> str:
    """As an SVG length."""
    return f"{100 * value / total:.2f}%"


def _at(value: float) -> str:
    return f"{value:.2f}%"


def _per_cent(value: float, total: float) -> float:
    """As the script looks for it under the pointer."""
    return round(100 * value / total, 2)


def _place(value: float, axis: charts.Axis) -> float:
    return round(axis.at(value), 2)


def _spots(data: PlanData) -> dict[str, Sequence[Any]]:
    """A timeline for the script that shows its exact numbers under the pointer: GiB by part, and the reserved."""
    timeline = data.timeline
    return {
        "events": [timeline.events],
        "parts": timeline.parts,
        "at": [point.at for point in timeline.points],
        "gib": [[round(gib(part), 2) for part in point.parts] for point in timeline.points],
        "reserved": [round(gib(point.reserved_bytes), 2) for point in timeline.points],
    }


def _course(course: MemoryCourse) -> dict[str, Sequence[Any]]:
    """A run for the script that shows its exact numbers under the pointer: GiB."""
    return {
        "events": [max(course.events - 1, 1)],
        "parts": ["allocated"],
        "at": [point.event for point in course.points],
        "gib": [[round(gib(point.allocated_bytes), 2)] for point in course.points],
        "reserved": [round(gib(point.reserved_bytes), 2) for point in course.points],
    }


def _front(data: PlanData, x: charts.Axis, y: charts.Axis) -> list[tuple[float, float]]:
    """Where the ways lie that no other beats."""
    return [
        (x.at(candidate.device_bytes), y.at(candidate.step_seconds)) for candidate in data.candidates if candidate.front
    ]


def _ticks_gib(axis: charts.Axis) -> list[float]:
    """Round numbers of GiB along an axis of bytes."""
    return charts.Axis(axis.low / GIB, axis.high / GIB, axis.log).ticks()


def _parts_used(phases: Sequence[PhaseParts]) -> list[str]:
    """The parts that any phase has."""
    return [name for name in Breakdown.model_fields if any(getattr(phase.breakdown, name) for phase in phases)]


def _rungs_used(data: PlanData) -> list[int]:
    """The ways of the ladder that are best somewhere on the map."""
    return sorted({cell.rung for row in data.capacity.cells for cell in row if cell.rung is not None})


def _is_own(cell: Cell, data: PlanData) -> bool:
    job = data.estimate.job
    return cell.shape == (getattr(job, AXES[data.capacity.axis]), job.height, job.width)


def _agreement(compared: Sequence[Comparison]) -> list[tuple[float, float, str, bool]]:
    """(measured, predicted, id, held out) of the rows that have both, the measured one the nearest of its interval."""
    return [
        (entry.measured.low_gib, entry.predicted_gib, entry.row.id, entry.row.held_out)
        for entry in compared
        if entry.measured is not None and entry.predicted_gib is not None
    ]


def _seconds(compared: Sequence[Comparison]) -> list[tuple[float, float, str, bool]]:
    """The same of the seconds of a step, once a run."""
    return [
        (entry.row.step_seconds, entry.predicted_seconds, entry.row.id, entry.row.held_out)
        for entry in compared
        if entry.judges and entry.row.step_seconds and entry.predicted_seconds
    ]
