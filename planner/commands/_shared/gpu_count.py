"""How many GPUs it takes to keep a limit of time: `vplan suggest --max-hours`, `--max-step-seconds`."""

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
"""GPUs of one computer that are tried; several computers have the most of these each."""

LIMITS = ("max_hours", "max_step_seconds")

FindPlan = Callable[[Question], Estimate | None]
"""The best plan that runs for a question, if there is one."""

FindWholeJob = Callable[[Estimate], WholeJob | None]
"""The whole job of a plan, where its length was said."""


def limit_options(function: Function) -> Function:
    """Adds the limits of time; the command gets them by name, and makes `TimeLimits` of them."""
    more = FiniteRange(0, min_open=True)
    hours, seconds = "Fewest GPU-hours within X hours.", "Fewest GPUs whose step takes at most X seconds."
    function = click.option("--max-step-seconds", type=more, metavar="X", help=seconds)(function)
    return click.option("--max-hours", type=more, metavar="X", help=hours)(function)


class TimeLimits(NamedTuple):
    """What a job may take at the most; infinite where nothing was said."""

    hours: float
    step_seconds: float

    def over(self, row: CountRow) -> float:
        """What a plan takes over what it may, by the upper ends of both; infinite where there is no plan."""
        if row.plan is None or row.plan.step_seconds_high is None:
            return math.inf
        hours = row.whole.hours.high / self.hours if row.whole else 0.0
        return max(hours, row.plan.step_seconds_high / self.step_seconds)

    def words(self) -> str:
        """As typed."""
        said = (("--max-hours", self.hours), ("--max-step-seconds", self.step_seconds))
        return " ".join(f"{flag} {value:g}" for flag, value in said if value < math.inf)


def asked_limits(said: dict[str, Any], length: AskedLength | None) -> TimeLimits | None:
    """The limits in a command's options, which it has no more; None where there are none."""
    hours, seconds = (said.pop(name) for name in LIMITS)
    if hours is not None and length is None:
        raise VplanError("--max-hours is about a whole job", f"say how long it is: {LENGTHS}", USAGE)
    if hours is None and seconds is None:
        return None
    return TimeLimits(*(math.inf if limit is None else limit for limit in (hours, seconds)))


class CountRow(NamedTuple):
    """What so many GPUs take."""

    question: Question
    plan: Estimate | None
    whole: WholeJob | None

    @property
    def gpus(self) -> int:
        """Of all nodes."""
        return self.question.machine.world

    @property
    def cost(self) -> tuple[float, int]:
        """GPU-hours at the most where they are known; then GPUs."""
        return (self.gpus * self.whole.hours.high if self.whole else 0.0), self.gpus


class CountedGpus(NamedTuple):
    """The counts that were tried, and the one that is answered."""

    limits: TimeLimits
    rows: Sequence[CountRow]
    chosen: CountRow
    steps: int | None = None
    """optimizer steps as typed; None where the length is in epochs, or was not said"""

    @property
    def meets(self) -> bool:
        """Whether the answer keeps the limits."""
        return self.limits.over(self.chosen) <= 1

    def to_json(self) -> dict[str, Any]:
        """As in `--json`."""
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
        """Prints, before a plan that fits but is too slow, that it is."""
        if not self.meets:
            console.print(f"too slow: nothing tried keeps {self.limits.words()}; the closest plan is", style="red")

    def print(self, console: Console) -> None:
        """Prints a line for each count, and whether the limits are kept."""
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
        """Why more GPUs do not shorten a job whose steps were typed: each brings samples of its own to every step."""
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
    """Of the counts that a computer has, and several where nodes were typed, or of the one that was typed, the cheapest
    that keeps the limits; else the one that comes closest. Where a step takes too long, GPUs that share every sample
    are asked about too. ``steps``: those that were typed. A VplanError where no count can be asked about."""
    rows, refused = [], None
    for count in _counts(asked):
        of_count = asked._replace(machine={**asked.machine, **count})
        try:
            rows.append(_row(of_count, best, whole))
        except VplanError as error:  # what was typed is for more GPUs, or for one
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
    """The same GPUs sharing every sample, whose steps are shorter and have one sample each; nothing where the model or
    what was typed does not allow that."""
    if "context_parallel" in asked.typed:
        return []
    strategy = {**asked.strategy, "context_parallel": gpus}
    try:
        row = _row(asked._replace(strategy=strategy, typed=asked.typed | {"context_parallel"}), best, whole)
    except VplanError:
        return []
    return [row] if row.plan else []


def _counts(asked: TypedQuestion) -> Sequence[Mapping[str, int]]:
    """What to try of a machine's GPUs and nodes: those of one computer, then 2, 4, ... computers with all of theirs, to
    as many as were typed. Nothing but the machine itself where GPUs were typed, or it is this one."""
    if "gpus" in asked.typed or asked.here is not None or card_lookup.parse_gpus(asked.gpu or "")[0] > 1:
        return ({},)
    most = asked.machine.get("nodes", 1)
    alone = [{"gpus": count} for count in COUNTS]
    if most == 1:
        return alone
    nodes = [2**power for power in range(1, most.bit_length()) if 2**power < most]
    return [*({**count, "nodes": 1} for count in alone), *({"gpus": COUNTS[-1], "nodes": n} for n in (*nodes, most))]


def refuse_limits(limits: TimeLimits | None, why: Mapping[str, bool]) -> None:
    """Raises a VplanError for limits beside what they say nothing of. ``why``: the fix, and whether it is that."""
    for fix, holds in why.items():
        if limits is not None and holds:
            raise VplanError(f"{limits.words()} is asked of vplan's own plan for one model and card", fix, USAGE)
