"""Progress of a search that measures: a live table on a terminal, else a line for every change."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from planner.commands._shared.rendering.render import used_bar
from planner.commands._shared.verb import table
from planner.spec.wording import ways
from planner.terminal import console
from planner.units import format_seconds, gib

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from planner.tune.study import StudyTrial
    from planner.tune.worker import Tuning

COLUMNS = (">#", "plan", ">est. GiB", ">took", ">s/step", "outcome")


class Progress:
    """The progress of a search by probes, shown on stderr while it runs."""

    def __init__(self, study: str, storage: str) -> None:
        from rich.live import Live

        self._console = console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._said: set[tuple[int, str]] = set()
        self._study = f"study {study} in {storage}"
        self._tuning: Tuning | None = None
        if self._live is None:
            self._console.print(self._study, style="dim", soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            if self._tuning is not None:
                self.show(self._tuning, "")  # with what the last probe came to
            if self._live.is_started:
                self._live.stop()
            else:  # of a study that has ended already, nothing was shown
                self._console.print(self._study, style="dim", soft_wrap=True)

    def show(self, tuning: Tuning, now: str) -> None:
        """Shows the probes so far and, as `now`, the current activity (empty at the end)."""
        self._tuning = tuning
        rows = [_cells(tuning, number, trial) for number, trial in enumerate(tuning.study.trials(), start=1)]
        if self._live:
            beneath = [f"now: {now}"] if now else []
            self._live.start()  # not before there is something to show: it ends what it shows with a line
            self._live.update(_page(self._console, rows, tuning, [*beneath, self._study]), refresh=True)
            return
        for number, cells in enumerate(rows, start=1):
            if (number, cells[-1]) not in self._said:
                self._said.add((number, cells[-1]))
                line = f"[{number}] {cells[1]}: estimated {cells[2]} GiB"
                took = "rehearsed" if tuning.tuner.basis == "rehearsed" else "measured"
                seen = f", {took} {cells[3]} GiB" if cells[3] != "-" else ""
                seen += f", {cells[4]} s/step" if cells[4] != "-" else ""
                self._console.print(f"{line}{seen}: {cells[-1]}", soft_wrap=True, markup=False)


def _page(console: Console, rows: list[tuple[str, ...]], tuning: Tuning, beneath: list[str]) -> RenderableType:
    """The layout of every answer: the best plan so far, its bar and options, then the probes."""
    from rich.console import Group
    from rich.text import Text

    best, parts = tuning.tuner.best, []
    if best is None:
        parts.append(Text("no plan proved yet", style="bold"))
    else:
        seen, budget = best.measured, best.estimate.budget_bytes
        seconds, basis = seen.step_seconds, ""
        if seconds is None:
            seconds, basis = best.estimate.step_seconds, " (estimated)"
        parts.append(Text(f"best so far: {format_seconds(seconds)} per step{basis}", style="bold green"))
        if seen.device_bytes is not None:
            parts.append(used_bar(console, seen.device_bytes, budget))
        parts.append(Text(f"plan: {ways(best.estimate)}", style="bold"))
    return Group(*parts, Text(), table(COLUMNS, rows), Text(), *(Text(line, style="dim") for line in beneath))


def _cells(tuning: Tuning, number: int, trial: StudyTrial) -> tuple[str, ...]:
    found = tuning.tuner.search.try_estimate(trial.plan.job, trial.plan.configuration.strategy)
    shape = trial.plan.job
    what = ways(found) if found else "not recorded"
    if tuning.tuner.goal.objective:
        what = f"{shape.frames}x{shape.height}x{shape.width} x {shape.batch_size}: {what}"
    estimated = f"{gib(found.peak.device_bytes):.2f}" if found else "-"
    if trial.row is None:
        return str(number), what, estimated, "-", "-", "measuring"
    seen = trial.row.measured
    device = "-" if seen.device_bytes is None else f"{gib(seen.device_bytes):.2f}"
    seconds = "-" if seen.step_seconds is None else f"{seen.step_seconds:.2f}"
    outcome = f"{seen.outcome} in {seen.phase}" if seen.outcome != "ok" and seen.phase else seen.outcome
    return (
        str(number),
        what,
        estimated,
        device,
        seconds,
        f"{outcome} (from the ledger)" if trial.from_ledger else outcome,
    )
