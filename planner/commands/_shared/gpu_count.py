"""The number of GPUs that keeps a time limit: `vplan suggest --max-hours`, `--max-step-seconds`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from planner.catalog import card_lookup
from planner.commands import USAGE
from planner.commands._shared.data_options import LENGTHS, AskedLength
from planner.commands._shared.request import TypedQuestion
from planner.commands._shared.verb import FiniteRange, Function, table
from planner.errors import VplanError
from planner.estimate.roofline import Span
from planner.estimate.whole_job import WholeJob
from planner.search.question import Question
from planner.spec.plan import Estimate

if TYPE_CHECKING:
    from rich.console import Console

COUNTS = (1, 2, 4, 8)
"""Numbers of GPUs to try on one computer; several computers have the largest of them each."""

LIMITS = ("max_hours", "max_step_seconds")

FindPlan = Callable[[Question], Estimate | None]
"""Finds the best plan that runs for a question, if there is one."""

FindWholeJob = Callable[[Estimate], WholeJob | None]
"""The whole job of a plan, if a length was given."""


def limit_options(function: Function) -> Function:
    """Adds the time limits; the command gets them by name, and turns them into `TimeLimits`."""
    more = FiniteRange(0, min_open=True)
    hours, seconds = "Fewest GPU-hours within X hours.", "Fewest GPUs whose step takes at most X seconds."
    function = click.option("--max-step-seconds", type=more, metavar="X", help=seconds)(function)
    return click.option("--max-hours", type=more, metavar="X", help=hours)(function)


class TimeLimits(NamedTuple):
    """Upper limits of a job's times; infinite if not given."""

    hours: float
    step_seconds: float

    def over(self, row: CountRow) -> float:
        """The factor by which a plan exceeds the limits, by its upper ends; infinite without a plan."""
        if row.plan is None or row.plan.step_seconds_high is None:
            return math.inf
        hours = row.whole.hours.high / self.hours if row.whole else 0.0
        return max(hours, row.plan.step_seconds_high / self.step_seconds)

    def words(self) -> str:
        """The limits as typed."""
        said = (("--max-hours", self.hours), ("--max-step-seconds", self.step_seconds))
        return " ".join(f"{flag} {value:g}" for flag, value in said if value < math.inf)


def asked_limits(options: dict[str, Any], length: AskedLength | None) -> TimeLimits | None:
    """Removes the limits from a command's options and returns them; None if there are none."""
    hours, seconds = (options.pop(name) for name in LIMITS)
    if hours is not None and length is None:
        raise VplanError("--max-hours is about a whole job", f"say how long it is: {LENGTHS}", USAGE)
    if hours is None and seconds is None:
        return None
    return TimeLimits(*(math.inf if limit is None else limit for limit in (hours, seconds)))


class CountRow(NamedTuple):
    """The plan and job on one number of GPUs."""

    question: Question
    plan: Estimate | None
    whole: WholeJob | None

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return self.question.machine.world

    @property
    def cost(self) -> tuple[float, int]:
        """For comparing rows: GPU-hours by the upper end if known, then GPUs."""
        return (self.gpus * self.whole.hours.high if self.whole else 0.0), self.gpus


class CountedGpus(NamedTuple):
    """The tried numbers of GPUs, and the one chosen."""

    limits: TimeLimits
    rows: Sequence[CountRow]
    chosen: CountRow
    steps: int | None = None
    """optimizer steps as typed; None if the length is in epochs or was not given"""

    @property
    def meets(self) -> bool:
        """Whether the chosen one keeps the limits."""
        return self.limits.over(self.chosen) <= 1

    def to_json(self) -> dict[str, Any]:
        """The object for `--json`."""
        return {"meets": self.meets, "gpu_counts": [self._row_json(row) for row in self.rows]}

    def _row_json(self, row: CountRow) -> dict[str, Any]:
        plan, hours = row.plan, row.whole.hours if row.whole else None
        return {
            "gpus": row.gpus,
            "nodes": row.question.machine.nodes,
            "context_parallel": row.question.strategy.context_parallel,
            "verdict": plan.verdict if plan else "no",
            "lossy": list(plan.lossy) if plan else [],
            "step_seconds": plan.step_seconds if plan else None,
            "step_seconds_high": plan.step_seconds_high if plan else None,
            "hours": hours.low if hours else None,
            "hours_high": hours.high if hours else None,
            "gpu_hours": row.gpus * hours.high if hours else None,
            "meets": self.limits.over(row) <= 1,
        }

    def print_miss(self, console: Console) -> None:
        """Prints, before a plan that fits but is too slow, that no number of GPUs keeps the limits."""
        if not self.meets:
            console.print(f"too slow: nothing tried keeps {self.limits.words()}; the closest plan is", style="red")

    def print(self, console: Console) -> None:
        """Prints a line for each number of GPUs, and whether the limits are kept."""
        console.print()
        names = (">GPUs", "verdict", ">s/step", *((">hours", ">GPU-hours") if self.chosen.whole else ()), "within")
        console.print(table(names, [self._cells(row) for row in self.rows]))
        if (shared := self.chosen.question.strategy.context_parallel) > 1:
            flags = f"--gpus {shared} --context-parallel {shared}"
            console.print(f"{flags}: they share every sample, so a step has 1, not {shared}")
        if not self.meets:
            counts = ", ".join(dict.fromkeys(str(row.gpus) for row in self.rows))
            console.print(f"no number of GPUs tried ({counts}) keeps {self.limits.words()}{self._why()}", style="red")

    def _why(self) -> str:
        """Why more GPUs do not shorten a job whose steps were typed: each GPU adds samples to every step."""
        most = max(row.gpus for row in self.rows)
        if self.steps is None or most == 1 or self.limits.hours == math.inf:
            return ""
        fewer = f"--steps {-(-self.steps // most)}" if self.steps >= most else "fewer --steps"
        return (
            f": N GPUs see N times the samples in as many steps, so {self.steps} steps take about as long on any. "
            f"To train on as many samples as 1 GPU does, say the length in --epochs (with --data), or {fewer} on {most}"
        )

    def _cells(self, row: CountRow) -> tuple[str, ...]:
        plan, hours = row.plan, row.whole.hours if row.whole else None
        within = "yes" if self.limits.over(row) <= 1 else "no"
        nodes = f" on {row.question.machine.nodes} nodes" if row.question.machine.nodes > 1 else ""
        shared = " to a sample" if row.question.strategy.context_parallel > 1 else ""
        gpus = f"{row.gpus}{shared}{nodes}"
        if plan is None or plan.step_seconds_high is None:
            return gpus, "no", "-", *(("-", "-") if self.chosen.whole else ()), within
        spans = [Span(plan.step_seconds, plan.step_seconds_high)]
        spans += [hours, hours.times(row.gpus)] if hours else []
        verdict = plan.verdict + (" (lossy)" if plan.lossy else "")
        return gpus, verdict, *(f"{span.low:.3g} to {span.high:.3g}" for span in spans), within


def count_gpus(
    asked: TypedQuestion, limits: TimeLimits, best: FindPlan, whole: FindWholeJob, steps: int | None = None
) -> CountedGpus:
    """The cheapest number of GPUs that keeps the limits, else the one that comes closest. Tried are those of one
    computer, several computers if nodes were typed, or only the typed number. If a step takes too long, context
    parallelism is tried too. ``steps``: as typed. Raises a VplanError if none can be tried."""
    rows, refused = [], None
    for count in _counts(asked):
        of_count = asked._replace(machine={**asked.machine, **count})
        try:
            rows.append(_row(of_count, best, whole))
        except VplanError as error:  # the typed options need more GPUs, or exactly one
            refused = refused or error
            continue
        if rows[-1].gpus > 1 and limits.step_seconds < math.inf and limits.over(rows[-1]) > 1:
            rows += _shared(of_count, rows[-1].gpus, best, whole)
    if not rows:
        assert refused is not None
        raise refused
    met = [row for row in rows if limits.over(row) <= 1]
    chosen = min(met, key=lambda row: row.cost) if met else min(rows, key=limits.over)
    return CountedGpus(limits, rows, chosen, steps)


def _row(asked: TypedQuestion, best: FindPlan, whole: FindWholeJob) -> CountRow:
    question = asked.to_question()
    plan = best(question)
    return CountRow(question, plan, whole(plan) if plan else None)


def _shared(asked: TypedQuestion, gpus: int, best: FindPlan, whole: FindWholeJob) -> list[CountRow]:
    """The same GPUs with context parallelism, whose steps are shorter and have one sample each; empty if the model or
    the typed options do not allow it."""
    if "context_parallel" in asked.typed:
        return []
    strategy = {**asked.strategy, "context_parallel": gpus}
    try:
        row = _row(asked._replace(strategy=strategy, typed=asked.typed | {"context_parallel"}), best, whole)
    except VplanError:
        return []
    return [row] if row.plan else []


def _counts(asked: TypedQuestion) -> Sequence[Mapping[str, int]]:
    """The machines to try: with the numbers of GPUs of one computer, then 2, 4, ... full computers up to the typed
    nodes. Only the machine itself if GPUs were typed, or if it is this computer."""
    if "gpus" in asked.typed or asked.here is not None or card_lookup.parse_gpus(asked.gpu or "")[0] > 1:
        return ({},)
    most = asked.machine.get("nodes", 1)
    alone = [{"gpus": count} for count in COUNTS]
    if most == 1:
        return alone
    nodes = [2**power for power in range(1, most.bit_length()) if 2**power < most]
    return [*({**count, "nodes": 1} for count in alone), *({"gpus": COUNTS[-1], "nodes": n} for n in (*nodes, most))]


def refuse_limits(limits: TimeLimits | None, why: Mapping[str, bool]) -> None:
    """Raises a VplanError for limits combined with options that they do not apply to. ``why``: (fix, whether it
    applies)."""
    for fix, holds in why.items():
        if limits is not None and holds:
            raise VplanError(f"{limits.words()} is asked of vplan's own plan for one model and card", fix, USAGE)
