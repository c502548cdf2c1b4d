"""What the page of a training run shows, as plain records: `planner.launch.run_course` has every number of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from planner.launch.launch import PREPARE_FOLDER, RUN_FOLDER, SAMPLES
from planner.launch.run_history import RunHistory, SampleRound, read_facts
from planner.units import format_seconds, gib, plural
from planner.worker_process import REQUEST

if TYPE_CHECKING:
    from planner.launch.run_course import Curve, MemoryBin, RunCourse, RunPhase

MOST_ROUNDS = 12
"""Rounds of samples on a page, the first and the last among them."""

STATES = {
    "encoding": "Encoding the data",
    "loading": "Loading the model",
    "running": "Training",
    "finished": "Finished",
    "failed": "Failed",
    "stopped": "Not running on this computer",
}


class CounterLine(NamedTuple):
    """A line of the memory chart."""

    counter: str
    name: str
    kind: str
    """class of the line"""


DEVICE_LINES = (
    CounterLine("device_bytes", "device", "measured"),
    CounterLine("reserved_bytes", "reserved", "reserved"),
    CounterLine("allocated_bytes", "allocated", "allocated"),
)
"""The highest first."""
HOST_LINES = (CounterLine("host_bytes", "host RAM", "measured"),)


@dataclass(frozen=True)
class RunPage:
    """The content of one HTML file about one run."""

    title: str
    state: str
    """one of `STATES`"""
    message: str
    """why it failed"""
    done: int
    total: int | None
    course: RunCourse
    rounds: tuple[SampleRound, ...]
    rounds_made: int
    repeated: int
    device: str
    missing: tuple[str, ...]
    created: str
    live: bool = False
    """served while the run goes on: the page looks for news"""
    samples_folder: str = SAMPLES
    """where the samples are, from the page"""
    template: ClassVar[str] = "run.html"

    @property
    def verdict(self) -> str:
        """Where the run is, in a line."""
        words = STATES[self.state]
        if self.total:
            words += f": step {self.done} of {self.total}"
        if self.state == "running" and self.course.seconds_left is not None:
            words += f", {format_seconds(self.course.seconds_left)} left"
        return words

    @property
    def prediction(self) -> str:
        """How the run compares with the plan, in a sentence; empty where nothing can be compared."""
        compared = [phase for phase in self.course.phases if phase.is_inside is not None]
        if not compared:
            return ""
        beyond = [phase.phase for phase in compared if not phase.is_inside]
        if not beyond:
            return f"Memory is within the predicted range in {plural(len(compared), 'phase')}."
        return f"Memory is outside the predicted range in {', '.join(beyond)}."

    @property
    def lines(self) -> tuple[CounterLine, ...]:
        """The lines of the memory chart: those of the GPU, else host RAM."""
        measured = [
            line for line in DEVICE_LINES if any(entry.high[line.counter] is not None for entry in self.course.memory)
        ]
        return tuple(measured) or HOST_LINES

    @property
    def highest_bytes(self) -> int:
        """The most that the memory chart shows."""
        shown = [entry.high[line.counter] or 0 for entry in self.course.memory for line in self.lines]
        predicted = [entry.predicted[1] for entry in self.course.memory if entry.predicted]
        return max([*shown, *predicted, self.budget_bytes], default=0)

    @property
    def budget_bytes(self) -> int:
        """What the card gives; 0 where no card is watched."""
        forecast = self.course.forecast
        return forecast.budget_bytes if forecast and self.device != "cpu" else 0

    @property
    def prompts(self) -> tuple[str, ...]:
        """Those of the samples, by their places in a round."""
        return max((entry.prompts for entry in self.rounds), key=len, default=())


def run_page(
    history: RunHistory, *, live: bool = False, created: str | None = None, folder: Path | None = None
) -> RunPage:
    """The page of a run as its files say now. ``folder``: where the page will be, if not beside the run's files."""
    from planner.launch.run_course import course  # numpy, which no other page needs

    state = history.state()
    start = history.starts[-1] if history.starts else None
    return RunPage(
        title=f"{_model(history)}: {history.output.name}",
        state=state.name,
        message=state.message,
        done=history.done,
        total=history.total_steps,
        course=course(history),
        rounds=_spread(tuple(history.rounds[step] for step in sorted(history.rounds))),
        rounds_made=len(history.rounds),
        repeated=history.repeated,
        device=start.device if start else "",
        missing=start.missing if start else (),
        created=created or moment(datetime.now(UTC).timestamp()),
        live=live,
        samples_folder=_samples_from(folder, history.output) if folder else SAMPLES,
    )


def _samples_from(folder: Path, output: Path) -> str:
    """Where a run's samples are, from a folder."""
    try:
        return Path(os.path.relpath(output.resolve() / SAMPLES, folder.resolve())).as_posix()
    except ValueError:  # on another drive
        return (output.resolve() / SAMPLES).as_posix()


def _model(history: RunHistory) -> str:
    """What is trained, by the request of its process."""
    for folder in (RUN_FOLDER, PREPARE_FOLDER):
        plan = read_facts(history.output / folder / REQUEST).get("plan")
        if isinstance(plan, dict) and isinstance(plan.get("job"), dict):
            return str(plan["job"].get("model"))
    return "a training run"


def _spread(rounds: tuple[SampleRound, ...]) -> tuple[SampleRound, ...]:
    """At most `MOST_ROUNDS` of all, evenly over the run."""
    last = len(rounds) - 1
    if last < MOST_ROUNDS:
        return rounds
    return tuple(rounds[round(place * last / (MOST_ROUNDS - 1))] for place in range(MOST_ROUNDS))


def moment(unix_seconds: float) -> str:
    """A time as people write it, in UTC."""
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def memory_readings(page: RunPage) -> list[str]:
    """What each stretch of the memory chart says under the pointer."""
    return [_memory_words(entry, page.lines) for entry in page.course.memory]


def _memory_words(entry: MemoryBin, lines: tuple[CounterLine, ...]) -> str:
    peaks = [(line.name, entry.high[line.counter]) for line in lines]
    words = [f"{name} {gib(value):.2f}" for name, value in peaks if value is not None]
    expected = f"; predicted {gib(entry.predicted[0]):.2f} to {gib(entry.predicted[1]):.2f}" if entry.predicted else ""
    return f"{format_seconds(entry.ended)}, {entry.phase}: {', '.join(words)} GiB{expected}"


def step_readings(points: Curve, smoothed: tuple[float, ...], unit: str) -> list[str]:
    """What each point of a chart by step says under the pointer."""
    words = [f"step {step:.0f}: {mean:.4g} {unit}" for step, mean in zip(points.steps, points.mean, strict=True)]
    if points.per_point > 1:
        ranges = zip(words, points.low, points.high, strict=True)
        words = [f"{text} ({low:.4g} to {high:.4g})" for text, low, high in ranges]
    if smoothed:
        words = [f"{text}, smoothed {mean:.4g}" for text, mean in zip(words, smoothed, strict=True)]
    return words


def highest(phases: tuple[RunPhase, ...], counter: str) -> str:
    """The highest peak of a counter in all phases, GiB."""
    peaks = [peak for entry in phases if (peak := entry.peaks[counter]) is not None]
    return f"{gib(max(peaks)):.2f}" if peaks else "?"


def phase_words(entry: RunPhase) -> str:
    """How a phase's device memory compares with what was predicted."""
    if entry.is_inside is None or entry.error_share is None:
        return ""
    where = "in range" if entry.is_inside else "outside"
    return f"{where}, {100 * entry.error_share:+.1f}%"
