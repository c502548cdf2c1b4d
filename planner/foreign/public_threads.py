"""What people reported in public threads, beside what `vplan check` says of the same command.

The rows are `profiles/measurements/threads/<trainer>.toml`: a command or config with its outcome, where it stands, and
per field what was completed because the thread does not say it. They are read and priced by what `check` itself uses.
"""

# No `from __future__ import annotations` here: pydantic would compile every field's annotation again at each start.
import statistics
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import model_validator

import profiles
from planner import dialects
from planner.dialects.base.script import Script, from_file
from planner.errors import VplanError
from planner.foreign.case import read_case
from planner.foreign.check import Checked, check_case
from planner.schema import Positive, Record
from planner.units import gib

FOLDER = profiles.MEASUREMENTS / "threads"
LEFT_OUT = "left_out.toml"
"""The file of the threads that were looked at and are no row, with the reasons."""

Outcome = Literal["ran", "ran-out", "ran-out-of-host"]


class PublicThread(Record):
    """One reported run. Paths, prompts and names of outputs in it are ours; flags and values are the thread's."""

    id: str
    url: str
    trainer: str
    """the file that it is a row of"""
    collected: str
    """the day it was found on, and a letter where it is that day's second collection; the rows of one collection were
    all found before any of them was priced"""
    date: str | None = None
    kind: Literal["report", "documentation"] = "report"
    """a run that somebody reported, or what the trainer's own pages say that a setting takes"""
    command: str = ""
    """a shell script; empty where a config file is all that is given"""
    files: dict[str, str] = {}
    """name -> text of what the command reads; the first is the config itself where there is no command"""
    gpu: str
    gpus: int | None = None
    host_ram: str | None = None
    reserve: str | None = None
    """what its message says that other processes hold of the card"""
    os: Literal["linux", "windows", "wsl"] | None = None
    told: dict[str, Any] = {}
    """what is given to `vplan check` beside the command: frames, height, width, model"""
    outcome: Outcome
    phase: str | None = None
    """where it ran out; of a run, the phase that the printed number is of, where it is not the whole run's"""
    printed_gib: str | None = None
    """as printed, whose last digit is its precision; programs that say GB mean GiB"""
    counter: Literal["device", "reserved", "allocated"] = "device"
    step_seconds: Positive | None = None
    completed: dict[str, str] = {}
    """field -> what was put there though the thread does not say it, and why; empty where all is the thread's"""
    older: str | None = None
    """how the trainer differed then from what we read, where that decides the outcome"""
    cause: str | None = None
    """why the answer is another one than the outcome, where the thread or the trainer's source shows it"""

    @model_validator(mode="after")
    def _is_whole(self) -> "PublicThread":
        if not self.command and not self.files:
            raise VplanError(f"thread {self.id} has neither command nor file", "add one")
        for name in self.files:
            # the current folder is looked in first: no file there has such a name
            if not any(part.startswith(self.id) for part in PurePosixPath(name).parts):
                raise VplanError(f"thread {self.id}: file {name} has another's name", f"begin it with {self.id}")
        return self

    @property
    def printed(self) -> tuple[float, float] | None:
        """What was printed as an interval in GiB: 12.2 is 12.15 to 12.25."""
        if self.printed_gib is None:
            return None
        half = 0.5 * 10.0 ** -len(self.printed_gib.partition(".")[2])
        return float(self.printed_gib) - half, float(self.printed_gib) + half

    def script(self, folder: Path) -> Script:
        """The row as `check` is given it, with its files written into a folder."""
        for name, text in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        if not self.command:
            return from_file(folder / next(iter(self.files)))
        path = folder / f"{self.id}.sh"
        path.write_text(self.command, encoding="utf-8")
        return from_file(path)


@dataclass(frozen=True)
class ThreadScore:
    """A row with the answer of `check`, or with the reason that there is none."""

    thread: PublicThread
    checked: Checked | None
    refused: str = ""

    @cached_property
    def verdict(self) -> str:
        """What `check` says; empty where it reads nothing."""
        return self.checked.outcome.estimate.verdict if self.checked else ""

    @property
    def agrees(self) -> bool | None:
        """Whether the verdict is the outcome: `tight` is met by either, and running out of host RAM only by a verdict
        that host RAM decides. None where nothing was read."""
        if self.checked is None:
            return None
        if self.thread.outcome == "ran":
            return self.verdict in ("fits", "tight")
        host = self.checked.outcome.estimate.limit == "host"
        return self.verdict in ("no", "tight") and host == (self.thread.outcome == "ran-out-of-host")

    @property
    def phase_agrees(self) -> bool | None:
        """Whether it ends where it ended; None where the thread does not say, or the verdict is another one."""
        if self.checked is None or not self.agrees or self.thread.phase is None or self.thread.outcome == "ran":
            return None
        return self.checked.outcome.phase == self.thread.phase

    @property
    def predicted_gib(self) -> tuple[float, float, float] | None:
        """Low, peak and high of the counter that was printed; the range is the device's, at the same distance."""
        if self.checked is None:
            return None
        estimate = self.checked.outcome.estimate
        phase = estimate.phases.get(self.thread.phase) if self.thread.outcome == "ran" else None  # type: ignore[call-overload]  # any text may be asked
        peak = getattr(phase or estimate.peak, f"{self.thread.counter}_bytes")
        below = estimate.peak.device_bytes - estimate.low_bytes
        above = estimate.high_bytes - estimate.peak.device_bytes
        return gib(peak - below), gib(peak), gib(peak + above)

    @property
    def number_agrees(self) -> bool | None:
        """Whether the printed number lies in the range; None without a number, or an answer."""
        if (printed := self.thread.printed) is None or (told := self.predicted_gib) is None:
            return None
        return told[0] <= printed[1] and printed[0] <= told[2]

    @property
    def error_pct(self) -> float | None:
        """The distance of the peak to what was printed, in percent of it; negative where it is too low."""
        if (printed := self.thread.printed) is None or (told := self.predicted_gib) is None:
            return None
        nearest = min(max(told[1], printed[0]), printed[1])
        return (told[1] / nearest - 1) * 100

    @property
    def false_fits(self) -> bool:
        """Whether it was called `fits` and ran out."""
        return self.verdict == "fits" and self.thread.outcome != "ran"

    @property
    def explained(self) -> str:
        """What is known of a disagreement, in words."""
        return self.thread.older or self.thread.cause or "not explained"

    def to_json(self) -> dict[str, Any]:
        """The row as `accuracy --threads --json` lists it."""
        thread, checked = self.thread, self.checked
        return {
            "id": thread.id,
            "url": thread.url,
            "trainer": thread.trainer,
            "kind": thread.kind,
            "collected": thread.collected,
            "gpu": thread.gpu,
            "outcome": thread.outcome,
            "reported_phase": thread.phase,
            "printed_gib": thread.printed_gib,
            "counter": thread.counter if thread.printed_gib else None,
            "reported_step_seconds": thread.step_seconds,
            "completed": sorted(thread.completed),
            "refused": self.refused or None,
            "unknown": list(checked.case.invocation.unknown) if checked else [],
            "verdict": self.verdict or None,
            "limit": checked.outcome.estimate.limit if checked else None,
            "phase": checked.outcome.phase if checked else None,
            "predicted_gib": self.predicted_gib,
            "step_seconds": checked.outcome.estimate.step_seconds if checked else None,
            "agrees": self.agrees,
            "phase_agrees": self.phase_agrees,
            "number_agrees": self.number_agrees,
            "error_pct": self.error_pct,
            "older": thread.older,
            "cause": thread.cause,
        }


def bundled_threads() -> list[PublicThread]:
    """All rows, in the order of trainers and of their files."""
    found: list[PublicThread] = []
    for path in sorted(FOLDER.glob("*.toml")):
        if path.name != LEFT_OUT:
            rows = tomllib.loads(path.read_text(encoding="utf-8"))["thread"]
            found += [PublicThread.read({"trainer": path.stem, **row}, path.name) for row in rows]
    return found


def left_out() -> dict[str, list[str]]:
    """Reason -> the threads that were looked at and are no row for it."""
    table = tomllib.loads((FOLDER / LEFT_OUT).read_text(encoding="utf-8"))
    return {entry["why"]: entry["urls"] for entry in table["reason"]}


def score(thread: PublicThread) -> ThreadScore:
    """Reads and prices one row as `vplan check` does, without a search for fixes."""
    machine = {name: getattr(thread, name) for name in ("gpu", "gpus", "host_ram", "reserve", "os")}
    with tempfile.TemporaryDirectory() as folder:
        try:
            dialect, given = dialects.read_script(thread.script(Path(folder)))
            case = read_case(dialect, given, thread.told, machine)
            return ThreadScore(thread, check_case(case, search=False))
        except VplanError as error:
            return ThreadScore(thread, None, error.message)


def summary(scores: Sequence[ThreadScore]) -> dict[str, Any]:
    """How many are read, and of these how many agree; those that an older version of the trainer explains apart."""
    read = [each for each in scores if each.checked]
    today = [each for each in read if each.agrees or not each.thread.older]
    numbered = [each for each in today if not each.thread.older]
    errors = [abs(each.error_pct) for each in numbered if each.error_pct is not None]
    return {
        "of": len(scores),
        "read": len(read),
        "older": len(read) - len(today),
        "agree": sum(each.agrees is True for each in today),
        "agree_of": len(today),
        "tight": sum(each.agrees is True and each.verdict == "tight" for each in today),
        "phase_agree": _yes(each.phase_agrees for each in today),
        "phase_of": _said(each.phase_agrees for each in today),
        "number_agree": _yes(each.number_agrees for each in numbered),
        "number_of": len(errors),
        "median_abs_pct": statistics.median(errors) if errors else None,
        "max_abs_pct": max(errors, default=None),
        "false_fits": sum(each.false_fits for each in today),
        "not_explained": sum(each.agrees is False and each.explained == "not explained" for each in today),
    }


def _summaries(scores: Sequence[ThreadScore], key: Callable[[PublicThread], str]) -> dict[str, dict[str, Any]]:
    """The summary of each part that shares a key."""
    names = sorted({key(each.thread) for each in scores})
    return {name: summary([each for each in scores if key(each.thread) == name]) for name in names}


def _yes(answers: Iterable[bool | None]) -> int:
    return sum(answer is True for answer in answers)


def _said(answers: Iterable[bool | None]) -> int:
    return sum(answer is not None for answer in answers)


def answer(scores: Sequence[ThreadScore]) -> dict[str, Any]:
    """The object that `accuracy --threads --json` prints."""
    whole = [each for each in scores if not each.thread.completed]
    return {
        "threads": [each.to_json() for each in scores],
        "summary": summary(scores),
        "by_trainer": _summaries(scores, lambda thread: thread.trainer),
        "by_collection": _summaries(scores, lambda thread: thread.collected),
        "by_kind": _summaries(scores, lambda thread: thread.kind),
        "nothing_completed": summary(whole),
        "left_out": {why: len(urls) for why, urls in left_out().items()},
    }
