"""`vplan calibrate --grid`: measures the plans of a grid in separate processes, into a file of rows that can be
resumed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from planner.commands import USAGE
from planner.commands._shared.verb import DONE, show, table
from planner.commands.probe import FAILED, keep, told_line
from planner.errors import VplanError
from planner.evidence.jsonl import append_row, rows_by_id
from planner.evidence.ledger import Ledger, default_path
from planner.evidence.measurement import ProbeRow
from planner.parallel import spread
from planner.probe.grid_file import read_grid
from planner.probe.grid_schedule import STEPS, Candidate, measuring_order, pricing
from planner.probe.probe import RealRunner
from planner.probe.runner import Runner
from planner.spec.job import Machine
from planner.terminal import echo
from planner.units import format_seconds

if TYPE_CHECKING:
    from rich.console import Console

FEW = 8
"""Up to this many plans, estimating them here is faster than starting more processes for it."""

FAULTS = ("crash", "timeout")
"""Outcomes that say nothing about a plan's memory."""


@dataclass(frozen=True, kw_only=True)
class GridOptions:
    """The typed options of a command that measures a grid."""

    grid: str
    output: str | None
    max_minutes: float | None
    dry_run: bool
    retry: bool
    histories: str | None
    time_limit: int

    def check(self) -> None:
        """Raises a VplanError for options that contradict each other."""
        if self.output is None and not self.dry_run:
            raise VplanError("--grid needs an output file", "pass -o ROWS.jsonl", USAGE)
        if self.output is not None and not Path(self.output).absolute().parent.is_dir():
            raise VplanError(f"there is no folder for {self.output}", "create it, or choose another file")
        if self.histories is not None and not Path(self.histories).is_dir():
            raise VplanError(f"there is no folder {self.histories}", f"create it: mkdir {self.histories}")
        read_grid(self.grid)


class Where(NamedTuple):
    """The machine, device and runner that measure a grid."""

    runner: Runner
    machine: Machine
    host_ram: int | None
    device: Literal["cuda", "cpu", "none"]
    """`none`: a virtual or simulated machine, whose rows stay out of the user's ledger"""


@dataclass
class Campaign:
    """A grid being measured; every row is written to disk before the next plan starts."""

    asked: GridOptions
    where: Where
    rows: list[ProbeRow] = field(default_factory=list)
    """measured in this run"""
    refused: list[tuple[str, str]] = field(default_factory=list)
    """(plan, why it cannot run here)"""
    known: int = 0
    """number of plans that had a row already"""
    left: list[Candidate] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)
    _paces: list[float] = field(default_factory=list)
    """measured over expected seconds of this run's plans"""

    def plan(self) -> list[Candidate]:
        """Reads the grid and returns the plans still to be measured, in the grid's order."""
        entries = read_grid(self.asked.grid)
        arguments = entries, self.where.machine, self.where.host_ram, self.where.device == "cpu"
        numbers = [str(number) for number in range(len(entries))]
        ask = pricing(*arguments)
        few = len(numbers) <= FEW
        found = list(map(ask, numbers) if few else spread(pricing, arguments, numbers, "reading the grid"))
        self.refused = [(each.entry.title, each.skip) for each in found if each.skip is not None]
        able = [each for each in found if each.skip is None]
        _check_names(able)
        there = rows_by_id(self.asked.output) if self.asked.output else {}
        done = {name for name, row in there.items() if not (self.asked.retry and _failed(row))}
        self.known = sum(each.name in done for each in able)
        before = [each.entry for each in able if each.name in done]
        self.left = measuring_order((each for each in able if each.name not in done), before)
        return self.left

    def run(self) -> None:
        """Measures the remaining plans one after another, as long as there is time for the next."""
        grid = Path(self.asked.grid).stem
        ledger, total = Ledger(default_path()), len(self.left)
        for number, each in enumerate(tuple(self.left), start=1):
            expected = each.seconds * self.pace
            if self._seconds_left < expected:
                continue  # a shorter one may still fit
            start = f"[{number}/{total}] {each.entry.title}"
            echo(f"{start}: about {format_seconds(expected)}; {self._outlook()}", err=True)
            began = time.monotonic()
            runner = self.where.runner
            if isinstance(runner, RealRunner):
                first = each.entry.job.model not in {row.job.model for row in self.rows}
                runner = replace(runner, config=each.entry.config, profiles=runner.profiles and first)
            self.left.remove(each)
            try:
                row = runner.run(each.plan, steps=STEPS, time_limit=self.asked.time_limit, encode=each.entry.encode)
            except VplanError as error:  # other plans may still run, e.g. if only this one needs a missing package
                self.refused.append((each.entry.title, error.message))
                echo(f"{start}: skipped: {error.message}", err=True)
                continue
            seconds = time.monotonic() - began
            row = row.replace(grid=grid, details={**row.details, "wall_seconds": round(seconds, 1)})
            assert self.asked.output is not None, "checked before"
            append_row(self.asked.output, row.to_json())
            if self.where.device != "none":
                keep(ledger, row)
            self.rows.append(row)
            self._paces.append(seconds / each.seconds)
            echo(f"{start}: {told_line(row.to_json())}", err=True)
            if self.asked.histories and each.is_off(row) and isinstance(runner, RealRunner):
                path = Path(self.asked.histories) / f"{row.id}.json"
                echo(f"{start}: off the estimate; running it again for {path}", err=True)
                self._record(each, replace(runner, history=path))

    def _record(self, each: Candidate, runner: RealRunner) -> None:
        """Runs a plan again to record its allocator history. Its row is not kept, because recording costs time."""
        try:
            runner.run(each.plan, steps=1, time_limit=self.asked.time_limit)
        except VplanError as error:  # e.g. a full disk: the rows matter more
            echo(f"warning: {error}", err=True)

    @property
    def pace(self) -> float:
        """The median of measured over expected seconds in this run; 1 before the first."""
        return statistics.median(self._paces) if self._paces else 1.0

    @property
    def _seconds_left(self) -> float:
        if self.asked.max_minutes is None:
            return float("inf")
        return self.asked.max_minutes * 60 - (time.monotonic() - self._began)

    def _outlook(self) -> str:
        """A sentence about how long the remaining plans take, and how many of them fit the time limit."""
        needed = sum(each.seconds for each in self.left) * self.pace
        words = f"{format_seconds(needed)} for all {len(self.left)} left"
        limit = self._seconds_left
        return words if needed <= limit else f"{words}; time limit in {format_seconds(limit)}"

    def answer(self) -> dict[str, Any]:
        """The answer for `--json`: outcomes, what is left, and why plans were refused."""
        outcomes: dict[str, int] = {}
        for row in self.rows:
            outcomes[row.measured.outcome] = outcomes.get(row.measured.outcome, 0) + 1
        return {
            "grid": self.asked.grid,
            "rows": self.asked.output,
            "probes": [row.to_json() for row in self.rows],
            "outcomes": outcomes,
            "known": self.known,
            "refused": [{"plan": title, "why": why} for title, why in self.refused],
            "left": [{"plan": each.entry.title, "id": each.name, "seconds": each.seconds} for each in self.left],
            "seconds": time.monotonic() - self._began,
        }


def _failed(row: Mapping[str, Any]) -> bool:
    measured = row.get("measured")
    return isinstance(measured, dict) and measured.get("outcome") in FAULTS


def _check_names(candidates: Sequence[Candidate]) -> None:
    """Raises a VplanError for entries with the same plan, which would be measured once but counted twice."""
    titles: dict[str, str] = {}
    for each in candidates:
        if each.name in titles:
            fault = f"two plans of the grid are the same: {titles[each.name]!r} and {each.entry.title!r}"
            raise VplanError(fault, "remove one of them")
        titles[each.name] = each.entry.title


def measure(asked: GridOptions, where: Where, as_json: bool) -> int:
    """Measures a grid and prints the answer; returns the exit code."""
    campaign = Campaign(asked, where)
    campaign.plan()
    if not asked.dry_run:
        campaign.run()
        if not campaign.rows and not campaign.known and not campaign.left and campaign.refused:
            raise VplanError(f"no plan of the grid can run here: {campaign.refused[0][1]}", "see `vplan doctor`")
    show(campaign.answer(), as_json, lambda console: _render(console, campaign))
    return FAILED if any(row.measured.outcome in FAULTS for row in campaign.rows) else DONE


def _render(console: Console, campaign: Campaign) -> None:
    asked = campaign.asked
    if asked.dry_run:
        end, lines = 0.0, []
        for number, each in enumerate(campaign.left, start=1):
            end += each.seconds
            lines.append((str(number), each.entry.title, f"{each.seconds:.0f}", format_seconds(end)))
        console.print(table((">", "plan", ">seconds", ">done after"), lines))
    for title, why in campaign.refused:
        console.print(f"skipped: {title}: {why}", style="dim", markup=False, soft_wrap=True)
    ended = ", ".join(f"{count} {outcome}" for outcome, count in campaign.answer()["outcomes"].items())
    words = [f"{len(campaign.rows)} measured{f' ({ended})' if ended else ''}", f"{campaign.known} already there"]
    words += [f"{len(campaign.refused)} cannot run here", f"{len(campaign.left)} left"]
    console.print(", ".join(words), style="bold", markup=False)
    if campaign.left and not asked.dry_run:
        needed = format_seconds(sum(each.seconds for each in campaign.left) * campaign.pace)
        console.print(f"the same command continues; the rest takes about {needed}", markup=False)
    if asked.output and not asked.dry_run:
        console.print(f"rows are in {asked.output}: `vplan accuracy {asked.output}`", markup=False, soft_wrap=True)
