"""One HTML file out of the data: templates, style and script are put together; the file is replaced whole."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jinja2
from markupsafe import Markup

from planner.errors import VplanError, quoted
from planner.estimate.timeline import PhaseParts
from planner.evidence import held_out as halves
from planner.evidence.accuracy import Comparison
from planner.file_writing import write_file
from planner.launch.run_history import BINS
from planner.search.capacity_map import Cell
from planner.search.question import Switch
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
HEADROOM_STEPS = (0.1, 0.25, 0.5)
"""Shares of the budget from which more of it is left: a darker cell of the map."""
STEPS = 1000
"""Steps of which hours are told: nobody knows a plan's."""
CUT = 2
"""Budgets at which the axis of what options saved ends; what is beyond is drawn torn off."""
SCRIPTS = ("page.js", "step.js", "map.js")


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
    script = "\n".join((TEMPLATES / name).read_text(encoding="utf-8") for name in SCRIPTS)
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


def prepare(name: str = Page.template) -> None:
    """Compiles a template and all that it refers to, which takes longer than filling them in; for a process that waits
    for a page's data anyway."""
    environment = _environment()
    found, waiting = set[str](), ["style.css", name]
    while waiting:
        if (name := waiting.pop()) not in found:
            found.add(name)
            environment.get_template(name)
            text = (TEMPLATES / name).read_text(encoding="utf-8")
            waiting += re.findall(r'\{% (?:extends|include|import) "([^"]+)"', text)


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
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters |= {"gib": _gib, "signed_gib": _signed, "seconds": format_seconds, "pct": _share, "at": _at}
    environment.globals |= {"charts": charts, "letters": LETTERS, "gib": gib, "told": _told}
    environment.globals |= {"told_over": _told_over, "map_cells": _cells, "headroom": _headroom, "hours": _hours}
    environment.globals |= {"switch_words": _switch_words, "short_seconds": _short_seconds, "steps": STEPS, "cut": CUT}
    environment.filters |= {"long": _long, "command": _command}
    environment.tests["effective"] = _did_something
    environment.globals |= {"cell_notes": _cell_notes, "is_first_of": _is_first_of}
    environment.globals |= {"front": _front, "ticks_gib": _ticks_gib, "used_parts": _parts_used, "is_own": _is_own}
    environment.globals |= {"agreement": _agreement, "seconds_agreement": _seconds_agreement, "halves_words": halves}
    environment.filters |= {"moment": run_data.moment, "share": _per_cent, "place": _place}
    environment.globals |= {"memory_readings": run_data.memory_readings, "step_readings": run_data.step_readings}
    environment.globals |= {"phase_words": run_data.phase_words, "highest": run_data.highest, "bins": BINS}
    environment.globals |= {"rungs_used": _rungs_used, "course_readout": _course}
    return environment


def _raw(text: str) -> str:
    """Our own style and script, which autoescape must leave alone. Nothing of the data is in them."""
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


def _told(data: PlanData) -> dict[str, Any]:
    """A step for the script that reads it out under the cursor: MiB, seconds, and names by their places in lists."""
    timeline, names = data.timeline, _Names()
    return {
        "outside": _mib(timeline.outside_bytes),
        "parts": timeline.parts,
        "at": [_long(point.at, max(timeline.events, 1)) for point in timeline.points],
        "mib": [[_mib(part) for part in point.parts] for point in timeline.points],
        "reserved": [_mib(point.reserved_bytes) for point in timeline.points],
        "seconds": [round(moment.seconds, 2) for moment in data.moments],
        "place": [names.place(moment.place) for moment in data.moments],
        "operator": [names.place(moment.operator) for moment in data.moments],
        "owners": [[[names.place(owner), _mib(nbytes)] for owner, nbytes in moment.owners] for moment in data.moments],
        "names": names.all,
    }


def _told_over(plans: Sequence[PlanData]) -> dict[str, Any]:
    """Several plans' steps over each other, for the same script."""
    names = _Names()
    return {
        "series": [
            {
                "name": data.name,
                "at": charts.aligned(data.timeline, plans[0].timeline),
                "mib": [_mib(charts.device_bytes(data.timeline, point)) for point in data.timeline.points],
                "seconds": [round(moment.seconds, 2) for moment in data.moments],
                "place": [names.place(moment.place) for moment in data.moments],
            }
            for data in plans
        ],
        "names": names.all,
    }


class _Names:
    """Names that are said often, each once."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._places: dict[str, int] = {}

    def place(self, name: str) -> int:
        """Where a name stands in the list."""
        if name not in self._places:
            self._places[name] = len(self.all)
            self.all.append(name)
        return self._places[name]


def _long(value: float, total: float) -> int:
    """Where a place from the left is, in the units of a chart that can be zoomed."""
    return round(charts.LONG * value / total)


def _mib(nbytes: int) -> int:
    return round(nbytes / 2**20)


def _cells(data: PlanData) -> dict[str, Any]:
    """The cells of the capacity map for the script that tells of the one that was clicked: row by row."""
    capacity, templates = data.capacity, _Names()
    return {
        "ways": [
            way + (" (lossy)" if look.strategy.lossy_fields(data.estimate.job) else "")
            for way, look in zip(data.ladder, capacity.ladder, strict=True)
        ],
        "cells": [_cell(data, cell, templates) for row in capacity.cells for cell in row],
        "commands": templates.all,
    }


SHAPE = "{shape}"
"""Stands for the flags of a cell's shape in the command of its strategy, which many cells have in common."""


def _cell(data: PlanData, cell: Cell, templates: _Names) -> dict[str, Any]:
    seconds, command = data.cell_seconds.get(cell.shape), data.cell_commands.get(cell.shape, "")
    frames = cell.shape[0] if data.capacity.axis == "frames" else data.estimate.job.frames
    shape = f"--frames {frames} --height {cell.shape[1]} --width {cell.shape[2]}"
    return {
        "shape": " x ".join(map(str, cell.shape)),
        "verdict": cell.verdict,
        "way": cell.rung,
        "need": _gib(cell.device_bytes),
        "free": _gib(data.estimate.budget_bytes - cell.device_bytes),
        "step": format_seconds(seconds) if seconds is not None else "",
        "command": [templates.place(command.replace(shape, SHAPE)), shape],
        "notes": _cell_notes(data, cell),
    }


def _cell_notes(data: PlanData, cell: Cell) -> str:
    notes = ["encoded in tiles"] if cell.tiled else []
    notes += ["with more host RAM it would fit the card"] if cell.shape in data.short_of_ram else []
    notes += [f"measured: {', '.join(seen)}"] if (seen := data.measured.get(cell.shape)) else []
    return "; ".join(notes)


def _headroom(data: PlanData, cell: Cell) -> str:
    """The class of a cell's colour: how much of the budget is left."""
    if cell.verdict != "fits":
        return cell.verdict
    left = 1 - cell.device_bytes / max(data.estimate.budget_bytes, 1)
    return f"fits room-{sum(left >= step for step in HEADROOM_STEPS)}"


def _short_seconds(seconds: float) -> str:
    """Seconds of a step in a cell: two digits, or three."""
    return f"{seconds:.0f}" if seconds >= 9.95 else f"{seconds:.1f}" if seconds >= 0.995 else f"{seconds:.2f}"


def _hours(seconds: float, high: float | None = None) -> str:
    """The hours of `STEPS` steps, and up to how many."""
    low, most = (f"{value * STEPS / 3600:.3g}" for value in (seconds, high or seconds))
    return f"{low} to {most}" if low != most else low


def _command(text: str) -> Markup:
    """A command whose options are not broken behind their dashes: a line would end in "--"."""
    words = [Markup('<span class="flag">{}</span>').format(word) if "-" in word else word for word in text.split(" ")]
    return Markup(" ").join(words)


def _did_something(switch: Switch) -> bool:
    """Whether a switch changed memory or time: the others came along."""
    return bool(switch.device_bytes) or abs(switch.step_seconds) > 1e-9


def _switch_words(switch: Switch) -> str:
    """A switch as a row of the table says it."""
    name = switch.field.replace("_", " ")
    if isinstance(switch.after, bool):
        return f"{name} {'on' if switch.after else 'off'}"
    return f"{name} {switch.before} to {switch.after}"


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
    """The ways of the ladder that are best somewhere on the map, the most used first."""
    used = Counter(cell.rung for row in data.capacity.cells for cell in row if cell.rung is not None)
    return [rung for rung, _ in used.most_common()]


def _is_first_of(plans: Sequence[PlanData], data: PlanData, of: str = "cards") -> bool:
    """Whether no plan before it on the page says the same: of what other cards take, of the measured rows."""

    def said(plan: PlanData) -> object:
        if of == "compared":
            return [entry.row.id for entry in plan.compared]
        return plan.estimate.job, plan.estimate.machine.gpus, plan.estimate.machine.nodes, plan.note

    return next(plan for plan in plans if said(plan) == said(data)) is data


def _is_own(cell: Cell, data: PlanData) -> bool:
    job = data.estimate.job
    return cell.shape == (getattr(job, AXES[data.capacity.axis]), job.height, job.width)


class AgreementPoint(NamedTuple):
    """A point of a chart of predicted over measured: GiB, or seconds of a step."""

    measured: float
    predicted: float
    row: str
    """the row's id"""
    held_out: bool


def _agreement(compared: Sequence[Comparison]) -> list[AgreementPoint]:
    """Memory of the rows that have both numbers, the measured one the lower bound of its interval."""
    return [
        AgreementPoint(entry.measured.low_gib, entry.predicted_gib, entry.row.id, entry.row.held_out)
        for entry in compared
        if entry.measured is not None and entry.predicted_gib is not None
    ]


def _seconds_agreement(compared: Sequence[Comparison]) -> list[AgreementPoint]:
    """The same of the seconds of a step, once a run."""
    return [
        AgreementPoint(entry.row.step_seconds, entry.predicted_seconds, entry.row.id, entry.row.held_out)
        for entry in compared
        if entry.judges and entry.row.step_seconds and entry.predicted_seconds
    ]
