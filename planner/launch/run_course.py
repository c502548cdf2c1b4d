"""Downsampled curves of a run: memory over time by phase next to the prediction, losses, seconds per step."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from planner.launch.launch import RunForecast
from planner.launch.run_history import BINS, COUNTERS, PHASES, RunHistory
from planner.spec.plan import PhasePeak

RECENT = 20
"""Latest steps whose median is the current step time."""

SHARE = 50
"""The loss is smoothed over one part in this many of all steps, and over at least `FEWEST` steps."""
FEWEST = 10

Numbers = NDArray[numpy.float64]


@dataclass(frozen=True)
class Curve:
    """A value by step in at most `BINS` points: lowest, highest and mean of each group of consecutive steps."""

    steps: tuple[float, ...]
    """last step of each group"""
    low: tuple[float, ...]
    high: tuple[float, ...]
    mean: tuple[float, ...]
    per_point: int
    """steps per group"""


@dataclass(frozen=True)
class MemoryBin:
    """An interval of a run's time: the phase that took most of it, and for each counter the lowest and highest peak
    within it, in bytes; None where not measured."""

    began: float
    """seconds of running time, without pauses between starts"""
    ended: float
    phase: str
    low: dict[str, int | None]
    high: dict[str, int | None]
    predicted: tuple[int, int] | None
    """(low, high) device bytes of the phase with the highest prediction"""
    failed: bool


@dataclass(frozen=True)
class RunPhase:
    """One phase of a run: count, total seconds, peaks, and the prediction."""

    phase: str
    times: int
    seconds: float
    peaks: dict[str, int | None]
    predicted: PhasePeak | None
    device_range: tuple[int, int] | None
    host_bytes: int | None
    """predicted, for all processes on a node"""

    @property
    def error_share(self) -> float | None:
        """Error of the predicted device memory, relative to the measured one."""
        measured = self.peaks["device_bytes"]
        return self.predicted.device_bytes / measured - 1 if measured and self.predicted else None

    @property
    def is_inside(self) -> bool | None:
        """Whether the measured device memory is in the predicted range."""
        measured, predicted = self.peaks["device_bytes"], self.device_range
        return None if measured is None or predicted is None else predicted[0] <= measured <= predicted[1]


@dataclass(frozen=True)
class RunPart:
    """What one start of a run did, from its first phase to where it ended."""

    unix_seconds: float
    first_step: int
    """steps done before it"""
    last_step: int
    """the last step that it logged"""
    began: float
    """seconds of running time, without pauses between starts"""
    seconds: float
    failed_phase: str
    """the phase in which it failed; empty if it did not fail"""


@dataclass(frozen=True)
class RunCourse:
    """All numbers on a run's report page."""

    memory: tuple[MemoryBin, ...]
    phases: tuple[RunPhase, ...]
    parts: tuple[RunPart, ...]
    loss: Curve
    smoothed: tuple[float, ...]
    """smoothed loss at the points of `loss`"""
    smoothed_over: int
    """steps that it is averaged over"""
    learning_rate: Curve
    step_seconds: Curve
    recent_seconds: float | None
    """median step time of the latest steps"""
    seconds_left: float | None
    forecast: RunForecast | None
    """forecast of the last start"""


def course(history: RunHistory) -> RunCourse:
    """Computes the numbers of a run so far."""
    steps, seconds = numpy.array(history.steps.step), numpy.array(history.steps.seconds)
    loss = curve(steps, numpy.array(history.loss))
    over = max(FEWEST, len(steps) // SHARE)
    recent = statistics.median(history.steps.seconds[-RECENT:]) if len(steps) else None
    total = history.total_steps
    intervals = _Intervals(history)
    return RunCourse(
        memory=intervals.bins(),
        phases=intervals.phases(),
        parts=intervals.parts(),
        loss=loss,
        smoothed=smoothed(steps, numpy.array(history.loss), loss, over),
        smoothed_over=over,
        learning_rate=curve(steps, numpy.array(history.learning_rate)),
        step_seconds=curve(steps, seconds),
        recent_seconds=recent,
        seconds_left=None if recent is None or total is None else max(0, total - history.done) * recent,
        forecast=history.starts[-1].forecast if history.starts else None,
    )


def curve(steps: Numbers, values: Numbers) -> Curve:
    """Downsamples values by step to at most `BINS` points of equally many steps; the last point may have fewer."""
    count = len(values)
    per_point = max(1, math.ceil(count / BINS))
    if not count:
        return Curve((), (), (), (), per_point)
    firsts = numpy.arange(0, count, per_point)
    lengths = numpy.diff(numpy.append(firsts, count))
    return Curve(
        steps=tuple(steps[numpy.append(firsts[1:], count) - 1].tolist()),
        low=tuple(numpy.fmin.reduceat(values, firsts).tolist()),
        high=tuple(numpy.fmax.reduceat(values, firsts).tolist()),
        mean=tuple((numpy.add.reduceat(values, firsts) / lengths).tolist()),
        per_point=per_point,
    )


def smoothed(steps: Numbers, values: Numbers, points: Curve, over: int) -> tuple[float, ...]:
    """Mean of the last ``over`` values (fewer at the beginning) at each point of a curve."""
    if not len(values):
        return ()
    sums = numpy.concatenate(([0.0], numpy.cumsum(values)))
    ends = numpy.searchsorted(steps, points.steps, side="right")
    begins = numpy.maximum(0, ends - over)
    return tuple(((sums[ends] - sums[begins]) / (ends - begins)).tolist())


class _Intervals:
    """All logged intervals of a run in order of time, on a clock that stops between starts."""

    def __init__(self, history: RunHistory) -> None:
        columns = (history.steps, history.others)
        self.history = history
        ended = _joined([each.ended for each in columns])
        order = numpy.argsort(ended, kind="stable")
        self.phase = _joined([each.phase for each in columns])[order].astype(int)
        self.step = _joined([each.step for each in columns])[order]
        self.counters = {name: _joined([each.counters[name] for each in columns])[order] for name in COUNTERS}
        failed = numpy.zeros(len(ended), bool)
        failed[[len(history.steps) + place for place in history.failed]] = True
        self.failed = failed[order]
        ended = ended[order]
        # Rounded times of two neighbours may overlap.
        began = numpy.maximum(ended - _joined([each.seconds for each in columns])[order], _before(ended))
        encode, load = PHASES.index("encode"), PHASES.index("load")
        is_start = (self.phase == encode) | ((self.phase == load) & (_before(self.phase, -1) != encode))
        if len(is_start):
            is_start[0] = True
        self.part = numpy.cumsum(is_start) - 1
        """for each interval, the number of the start it belongs to"""
        self.unix = ended
        waited = numpy.where(is_start, began - _before(ended, began[0] if len(began) else 0.0), 0.0)
        stopped = numpy.cumsum(numpy.maximum(waited, 0.0)) + (began[0] if len(began) else 0.0)
        self.began, self.ended = began - stopped, ended - stopped
        # A start that never finished loading has no forecast of its own.
        loads = numpy.flatnonzero((self.phase == load) & ~self.failed)
        self.forecasts: dict[int, RunForecast | None] = {
            int(self.part[place]): start.forecast for place, start in zip(loads, history.starts, strict=False)
        }

    def bins(self) -> tuple[MemoryBin, ...]:
        """Memory over time in at most `BINS` bins; with at most that many intervals, each gets its own bin."""
        if not len(self.ended):
            return ()
        if len(self.ended) <= BINS:
            groups = [numpy.array([place]) for place in range(len(self.ended))]
            edges = list(zip(self.began.tolist(), self.ended.tolist(), strict=True))
        else:
            marks = numpy.linspace(0.0, float(self.ended[-1]), BINS + 1)
            first = numpy.searchsorted(self.ended, marks[:-1], side="right")
            last = numpy.searchsorted(self.began, marks[1:], side="left")
            groups = [numpy.arange(begin, max(end, begin + 1)) for begin, end in zip(first, last, strict=True)]
            edges = list(zip(marks[:-1].tolist(), marks[1:].tolist(), strict=True))
        return tuple(self._bin(group, *edge) for group, edge in zip(groups, edges, strict=True))

    def _bin(self, group: NDArray[numpy.int64], began: float, ended: float) -> MemoryBin:
        spent = numpy.minimum(self.ended[group], ended) - numpy.maximum(self.began[group], began)
        by_phase = numpy.bincount(self.phase[group], numpy.maximum(spent, 1e-9), len(PHASES))
        kinds = numpy.unique(numpy.stack((self.part[group], self.phase[group])), axis=1).T
        ranges = [found for part, phase in kinds if (found := self._range(int(part), PHASES[phase]))]
        return MemoryBin(
            began=began,
            ended=ended,
            phase=PHASES[int(by_phase.argmax())],
            low={name: _bytes(numpy.fmin.reduce(column[group])) for name, column in self.counters.items()},
            high={name: _bytes(numpy.fmax.reduce(column[group])) for name, column in self.counters.items()},
            predicted=max(ranges, default=None),
            failed=bool(self.failed[group].any()),
        )

    def _range(self, part: int, phase: str) -> tuple[int, int] | None:
        forecast = self.forecasts.get(part)
        peak = _predicted(forecast, phase)
        if forecast is None or peak is None or self._is_cpu:
            return None
        return round(peak.device_bytes * forecast.low_share), round(peak.device_bytes * forecast.high_share)

    @property
    def _is_cpu(self) -> bool:
        """Whether the run was on the CPU: predictions are of GPU memory, so there is nothing to compare."""
        return bool(self.history.starts) and self.history.starts[-1].device == "cpu"

    def phases(self) -> tuple[RunPhase, ...]:
        """Each phase, over the starts whose forecast is that of the last start."""
        if not len(self.ended):
            return ()
        last = int(self.part[-1])
        forecast = self.forecasts.get(last)
        alike = [part for part in range(last + 1) if self.forecasts.get(part, forecast) == forecast]
        mine = numpy.isin(self.part, alike)
        found = []
        for number, phase in enumerate(PHASES):
            chosen = mine & (self.phase == number)
            if not chosen.any():
                continue
            host = forecast.host_phases if forecast and not self._is_cpu else {}
            found.append(
                RunPhase(
                    phase=phase,
                    times=int(chosen.sum()),
                    seconds=float((self.ended - self.began)[chosen].sum()),
                    peaks={name: _bytes(numpy.fmax.reduce(column[chosen])) for name, column in self.counters.items()},
                    predicted=None if self._is_cpu else _predicted(forecast, phase),
                    device_range=self._range(last, phase),
                    host_bytes=max((host[name] for name in _names(phase) if name in host), default=None),
                )
            )
        return tuple(found)

    def parts(self) -> tuple[RunPart, ...]:
        """The starts of the run."""
        found = []
        for number in range(int(self.part[-1]) + 1 if len(self.part) else 0):
            places = numpy.flatnonzero(self.part == number)
            first, last = places[0], places[-1]
            loads = places[self.phase[places] == PHASES.index("load")]
            before = self.step[loads[0]] if len(loads) else self.step[first]
            found.append(
                RunPart(
                    unix_seconds=float(self.unix[first] - (self.ended[first] - self.began[first])),
                    first_step=int(before),
                    last_step=int(max(before, self.step[places].max())),
                    began=float(self.began[first]),
                    seconds=float(self.ended[last] - self.began[first]),
                    failed_phase=PHASES[self.phase[last]] if self.failed[last] else "",
                )
            )
        return tuple(found)


def _names(phase: str) -> tuple[str, ...]:
    """Names of a logged phase in an estimate, which splits a step into train and optimizer."""
    return ("train", "optimizer") if phase == "train" else (phase,)


def _predicted(forecast: RunForecast | None, phase: str) -> PhasePeak | None:
    if forecast is None:
        return None
    peaks = [peak for name, peak in forecast.phases.items() if name in _names(phase)]
    return max(peaks, key=lambda peak: peak.device_bytes, default=None)


def _joined(columns: list[object]) -> Numbers:
    return numpy.concatenate([numpy.array(column, dtype=float) for column in columns])


def _before(values: Numbers, first: float = -math.inf) -> Numbers:
    """The values shifted by one place, starting with ``first``."""
    return numpy.concatenate(([first], values[:-1])) if len(values) else values


def _bytes(value: float) -> int | None:
    return None if math.isnan(value) else int(value)
