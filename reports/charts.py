"""Geometry of the charts: where on a chart a number of the data lies. Pure, and without any number of its own.

Charts are inline SVG drawn by the macros of `templates/`; docs/report.md says why no chart library is used.
Widths are in per cent of the chart and heights in pixels, so that a page fits a phone without its text shrinking.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from planner.estimate.timeline import Point, Timeline

if TYPE_CHECKING:
    from planner.launch.run_course import MemoryBin
    from planner.rehearsal.live_memory import MemoryCourse

T = TypeVar("T")

SIDE = 1000
"""Units of a chart's inner box, to each side."""
LONG = 10_000
"""The same from left to right, of a chart that can be zoomed."""
RADIUS = 100
"""Of the gauge, in its own units."""
HEADROOM = 1.06
FEWEST = 2
"""Round numbers of a logarithmic axis; where there are no more, evenly spread ones say more."""


@dataclass(frozen=True)
class Area:
    """One part of the timeline: its name, and an SVG path in the chart's inner box."""

    name: str
    path: str


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic scale from numbers to per cent of a chart's side."""

    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        """The place of a value in per cent from the low end."""
        if self.log:
            low, high, value = (math.log(max(number, 1e-9)) for number in (self.low, self.high, value))
        else:
            low, high = self.low, self.high
        return 100 * (value - low) / ((high - low) or 1)

    def ticks(self, most: int = 5) -> list[float]:
        """Round numbers on the axis for marks, about `most` of them."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            marks = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
            marks = [tick for tick in marks if self.low <= tick <= self.high]
            # Less than a decade has too few of 1, 2, 5: such an axis is marked in even steps.
            if len(marks) > FEWEST:
                return marks
        span = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(span))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= span)
        first = math.ceil(self.low / step)
        return [step * index for index in range(first, math.floor(self.high / step) + 1)]


def padded_axis(values: Sequence[float], log: bool = False) -> Axis:
    """An axis over all values with some room at both ends; the values must be positive."""
    low, high = min(values), max(values)
    if log:
        return Axis(low / 1.25, high * 1.25, True)
    room = (high - low or high or 1.0) * 0.12
    return Axis(max(0.0, low - room), high + room)


def top(*values: int) -> int:
    """The upper end of an axis that starts at nothing and shows all of these."""
    return int(max(values) * HEADROOM) or 1


def areas(timeline: Timeline, highest: int) -> list[Area]:
    """The parts of a step stacked on what is outside torch, from below, each from the bottom to its upper edge: to be
    drawn from the last to the first. ``highest``: bytes at the upper edge of the chart."""
    totals = [timeline.outside_bytes] * len(timeline.points)
    parts = [Area("context", _filled(timeline, totals, highest))]
    for place, name in enumerate(timeline.parts):
        totals = [total + point.parts[place] for total, point in zip(totals, timeline.points, strict=True)]
        parts.append(Area(name, _filled(timeline, totals, highest)))
    return parts


def reserved(timeline: Timeline, highest: int) -> str:
    """The SVG path of device bytes by the allocator's reserved segments, with what is outside torch."""
    return _edge(timeline, _device_bytes(timeline), highest)


def reserved_area(timeline: Timeline, highest: int) -> str:
    """The area below `reserved`: drawn behind the parts, what is seen of it is fragmentation."""
    return _filled(timeline, _device_bytes(timeline), highest)


def _device_bytes(timeline: Timeline) -> list[int]:
    return [timeline.outside_bytes + point.reserved_bytes for point in timeline.points]


def _filled(timeline: Timeline, values: Sequence[int], highest: int) -> str:
    return f"{_edge(timeline, values, highest)}V{SIDE}H0Z"


def _edge(timeline: Timeline, values: Sequence[int], highest: int) -> str:
    """A line through bytes at each of a step's points, in relative moves: they are half as long to write."""
    last = max(timeline.events, 1)
    return relative(
        [
            (round(LONG * point.at / last), round(SIDE * (1 - value / highest)))
            for point, value in zip(timeline.points, values, strict=True)
        ]
    )


def relative(spots: Sequence[tuple[int, int]]) -> str:
    """A line through places in a chart's own units."""
    moves = [f"{x - before_x} {y - before_y}" for (before_x, before_y), (x, y) in itertools.pairwise(spots)]
    return f"M{spots[0][0]} {spots[0][1]}" + (f"l{' '.join(moves)}" if moves else "")


def aligned(timeline: Timeline, reference: Timeline) -> list[int]:
    """Where a step's points lie over another step: each pass as wide as the other's, else the step as a whole."""
    ends = [*(mark.at for mark in timeline.marks[1:]), max(timeline.events, 1)]
    wide = [*(mark.at for mark in reference.marks[1:]), max(reference.events, 1)]
    if [mark.name for mark in timeline.marks] != [mark.name for mark in reference.marks]:
        ends, wide = ends[-1:], wide[-1:]
    places, at = [], 0
    for point in timeline.points:
        while at < len(ends) - 1 and point.at >= ends[at]:
            at += 1
        first, left = (ends[at - 1], wide[at - 1]) if at else (0, 0)
        share = (point.at - first) / max(ends[at] - first, 1)
        places.append(round(LONG * (left + share * (wide[at] - left)) / wide[-1]))
    return places


def over(timeline: Timeline, places: Sequence[int], highest: int) -> str:
    """The line of a step's allocated device bytes at such places."""
    values = [round(SIDE * (1 - device_bytes(timeline, point) / highest)) for point in timeline.points]
    return relative(list(zip(places, values, strict=True)))


def device_bytes(timeline: Timeline, point: Point) -> int:
    """What is allocated at a point, with what is outside torch."""
    return timeline.outside_bytes + sum(point.parts)


def seconds_ticks(timeline: Timeline, seconds: Sequence[float]) -> list[tuple[float, int]]:
    """(seconds, events since the step began) of round times in a step; ``seconds``: of its points."""
    if not seconds or seconds[-1] <= 0:
        return []
    ticks = []
    for tick in Axis(0, seconds[-1]).ticks(6):
        place = next(index for index, at in enumerate(seconds) if at >= tick)
        ticks.append((tick, timeline.points[place].at))
    return ticks


def arc(first: float, last: float) -> str:
    """A stretch of the gauge's half circle, from and to shares of it."""
    ends = []
    for share in (first, last):
        angle = math.pi * (1 - min(max(share, 0.0), 1.0))
        ends.append(f"{RADIUS * math.cos(angle):.1f} {-RADIUS * math.sin(angle):.1f}")
    return f"M{ends[0]}A{RADIUS} {RADIUS} 0 0 1 {ends[1]}"


def spoke(share: float, inner: float, outer: float) -> tuple[float, float, float, float]:
    """(x1, y1, x2, y2) of a line across the gauge at a share of it, between two parts of its radius."""
    angle = math.pi * (1 - min(max(share, 0.0), 1.0))
    x, y = RADIUS * math.cos(angle), -RADIUS * math.sin(angle)
    return round(inner * x, 1), round(inner * y, 1), round(outer * x, 1), round(outer * y, 1)


def spots(timeline: Timeline, points: Sequence[tuple[float, int]], highest: int) -> str:
    """The SVG path of a line through (events since the step began, bytes). ``highest``: bytes at the upper edge."""
    last = max(timeline.events, 1)
    return relative([(round(LONG * at / last), round(SIDE * (1 - value / highest))) for at, value in points])


def course_area(course: MemoryCourse, outside_bytes: int, highest: int) -> str:
    """What is allocated over a run's events, on what is outside torch."""
    upper = course_spots(course, [point.allocated_bytes for point in course.points], outside_bytes, highest)
    floor = 100 * outside_bytes / highest
    return polyline([(upper[0][0], floor), *upper, (upper[-1][0], floor)]) + "Z"


def course_spots(
    course: MemoryCourse, values: Sequence[int], outside_bytes: int, highest: int
) -> list[tuple[float, float]]:
    """(per cent from the left, per cent from the bottom) of a value at each point of a run, above what is outside
    torch; ``highest``: bytes at the upper edge."""
    last = max(course.events - 1, 1)
    return [
        (100 * point.event / last, 100 * (outside_bytes + value) / highest)
        for point, value in zip(course.points, values, strict=True)
    ]


def course_phases(course: MemoryCourse) -> list[tuple[float, float, str]]:
    """(from, to, name) of the phases of a run, in per cent of its events; those without an event are left out."""
    last = max(course.events - 1, 1)
    ends = [*(start for start, _ in course.phases[1:]), last]
    spans = zip(course.phases, ends, strict=True)
    return [(100 * start / last, 100 * end / last, name) for (start, name), end in spans if end > start]


def line(xs: Sequence[float], ys: Sequence[float | None], x: Axis, y: Axis) -> str:
    """The SVG path of a line through points, with gaps where there is no value."""
    return "".join(polyline(stretch) for stretch in _stretches(xs, ys, x, y))


def between(xs: Sequence[float], low: Sequence[float], high: Sequence[float], x: Axis, y: Axis) -> str:
    """The SVG path of the area from a lower to an upper line; empty for a single point."""
    if len(xs) < 2:
        return ""
    upper = [(x.at(at), y.at(value)) for at, value in zip(xs, high, strict=True)]
    lower = [(x.at(at), y.at(value)) for at, value in zip(xs, low, strict=True)]
    return polyline([*upper, *reversed(lower)]) + "Z"


def _stretches(
    xs: Sequence[float], ys: Sequence[float | None], x: Axis, y: Axis
) -> Iterator[list[tuple[float, float]]]:
    stretch: list[tuple[float, float]] = []
    for at, value in zip(xs, ys, strict=True):
        if value is not None:
            stretch.append((x.at(at), y.at(value)))
        elif stretch:
            yield stretch
            stretch = []
    if stretch:
        yield stretch


def level(memory: Sequence[MemoryBin], counter: str, x: Axis, y: Axis) -> str:
    """The SVG path of a counter's highest value in each stretch of a run's time, as steps."""
    ends = [at for entry in memory for at in (entry.began, entry.ended)]
    return line(ends, [entry.high[counter] for entry in memory for _ in range(2)], x, y)


def predicted_bands(memory: Sequence[MemoryBin]) -> list[tuple[float, float, int, int]]:
    """(from, to, low bytes, high bytes) of neighbouring stretches of a run's time with the same prediction."""
    return [
        (group[0].began, group[-1].ended, *ranged)
        for ranged, group in _neighbours(memory, lambda entry: entry.predicted)
        if ranged is not None
    ]


def phase_spans(memory: Sequence[MemoryBin]) -> list[tuple[float, float, str]]:
    """(from, to, phase) of neighbouring stretches of a run's time that are mostly of one phase."""
    return [(group[0].began, group[-1].ended, phase) for phase, group in _neighbours(memory, lambda entry: entry.phase)]


def _neighbours(memory: Sequence[MemoryBin], of: Callable[[MemoryBin], T]) -> Iterator[tuple[T, list[MemoryBin]]]:
    for value, group in itertools.groupby(memory, of):
        yield value, list(group)


def polyline(spots: Sequence[tuple[float, float]]) -> str:
    """A line through (per cent from the left, per cent from the bottom)."""
    return "M" + "L".join(f"{round(x * SIDE / 100)} {round(SIDE - y * SIDE / 100)}" for x, y in spots)
