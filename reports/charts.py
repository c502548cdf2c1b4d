"""Geometry of the charts: where on a chart a number of the data lies. Pure, and without any number of its own.

Charts are inline SVG drawn by the macros of `templates/charts.html`. Why no chart library: the page must work from a
mail attachment, without network and without JavaScript, print, follow the reader's theme (CSS variables) and stay
small; plotly is 3 to 5 MB a file, and a picture from matplotlib has neither themes nor text a screen reader knows.
Widths are in per cent of the chart and heights in pixels, so that a page fits a phone without its text shrinking.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from planner.estimate.timeline import Timeline

if TYPE_CHECKING:
    from planner.launch.run_course import MemoryBin
    from planner.rehearsal.live_memory import MemoryCourse

T = TypeVar("T")

SIDE = 1000
"""Units of a chart's inner box, to each side."""
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


def around(values: Sequence[float], log: bool = False) -> Axis:
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
    """The parts of a step stacked on what is outside torch, from below; ``highest``: bytes at the upper edge."""
    points = timeline.points
    floor = [timeline.outside_bytes] * len(points)
    parts = [Area("context", _between(timeline, [0] * len(points), floor, highest))]
    for place, name in enumerate(timeline.parts):
        ceiling = [below + point.parts[place] for below, point in zip(floor, points, strict=True)]
        parts.append(Area(name, _between(timeline, floor, ceiling, highest)))
        floor = ceiling
    return parts


def reserved(timeline: Timeline, highest: int) -> str:
    """The SVG path of device bytes by the allocator's reserved segments, with what is outside torch."""
    device_bytes = [timeline.outside_bytes + point.reserved_bytes for point in timeline.points]
    return "M" + "L".join(_spots(timeline, device_bytes, highest))


def spots(timeline: Timeline, points: Sequence[tuple[float, int]], highest: int) -> str:
    """The SVG path of a line through (events since the step began, bytes). ``highest``: bytes at the upper edge."""
    last = max(timeline.events, 1)
    return polyline([(100 * at / last, 100 * value / highest) for at, value in points])


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


def _between(timeline: Timeline, below: Sequence[int], above: Sequence[int], highest: int) -> str:
    upper, lower = _spots(timeline, above, highest), _spots(timeline, below, highest)
    return "M" + "L".join([*upper, *reversed(lower)]) + "Z"


def _spots(timeline: Timeline, values: Sequence[int], highest: int) -> list[str]:
    last = max(timeline.events, 1)
    return [
        f"{round(SIDE * point.at / last)} {round(SIDE * (1 - value / highest))}"
        for point, value in zip(timeline.points, values, strict=True)
    ]


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
