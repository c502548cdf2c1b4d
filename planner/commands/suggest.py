"""`vplan suggest`: the best way to train on a card; without a card, on any; without a model, any model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from planner.catalog import lookup
from planner.commands import USAGE
from planner.commands._shared import render
from planner.commands._shared.data_options import AskedLength, asked_length, whole_job_options, with_proposed_shapes
from planner.commands._shared.request import TypedQuestion, request_options
from planner.commands._shared.verb import (
    DOES_NOT_FIT,
    Verb,
    examples,
    json_option,
    output_option,
    report_option,
    show,
    verdict_exit_code,
    write_report,
)
from planner.errors import VplanError
from planner.estimate.bucket_batches import EvenedPlan, evened
from planner.estimate.estimate import assess
from planner.estimate.whole_job import WholeJob
from planner.parallel import spread
from planner.search.objectives import PREFERRED
from planner.search.question import Question
from planner.search.suggester import Suggester, assumptions
from planner.spec.job import Bucket, Job
from planner.spec.plan import Estimate, write_plan
from planner.units import format_gib, gib

if TYPE_CHECKING:
    from rich.console import Console


@click.command(
    cls=Verb,
    epilog=examples(
        "vplan suggest --gpu 24GB --frames 81",
        "vplan suggest wan2.1-i2v-14b-480p --gpu h100-80gb --frames 129 -o plan.toml",
        "vplan suggest flux.1-dev --method full",
        "vplan suggest wan2.1-t2v-14b --gpu rtx4090 --frames max",
        "vplan suggest wan2.1-t2v-1.3b --steps 2000 --price 24GB=0.4 --price 80GB=2.5",
    ),
)
@request_options(searched=True)
@whole_job_options
@click.option(
    "--prefer",
    type=click.Choice(["speed", *PREFERRED]),
    default="speed",
    help="What to maximise, subject to your other options.  [default: speed]",
)
@click.option(
    "--allow", "allow", type=click.Choice(["lossy"]), help="Also consider lossy options when a lossless plan fits."
)
@click.option("--strict", is_flag=True, help="Exit with code 3 if the verdict is tight.")
@output_option("the plan")
@report_option
@json_option
def command(
    asked: TypedQuestion,
    prefer: str,
    allow: str | None,
    strict: bool,
    output: str | None,
    report: str | None,
    as_json: bool,
    **said: Any,
) -> int:
    """Find the fastest way to train that fits, lossless if possible.

    Options you set stay fixed; the rest is searched. Without --gpu the answer covers every card class, without --model
    every model that can train at that length. With --steps or --epochs it also tells the hours, kWh and money of the
    whole job.
    """
    started = time.perf_counter()
    cards = [] if asked.gpu else [group.name for group in lookup.gpu_classes()]
    length, auto = asked_length(said, cards, proposes=asked.wants_shapes), asked.wants_shapes
    asked, most = with_proposed_shapes(asked, said)
    if asked.model is None and asked.gpu is None:
        raise VplanError("no --model and no --gpu", "pass one of them, as --gpu 24GB", USAGE)
    if asked.model is not None and asked.gpu is not None:
        question = asked.settle()._replace(allow_lossy=allow is not None)
        suggester = Suggester(asked.trainer, prefer)
        suggestion = suggester.suggest(question)
        even = _evened(suggester, suggestion.plan, most) if auto else None
        suggestion = suggestion._replace(plan=even.plan) if even else suggestion
        whole = _whole_job(length, suggester, suggestion.plan)
        if output:
            write_plan(suggestion.to_plan(asked.trainer), output)
        if report:
            write_report(report, [(output or "plan.toml", suggestion.to_plan(asked.trainer))])
        answer = suggestion.to_json(time.perf_counter() - started) | _json(whole, even)

        def print_one(console: Console) -> None:
            render.print_suggestion(console, question, suggestion)
            if even:
                render.print_shapes(console, even)
            if whole:
                render.print_whole_job(console, whole)
            render.print_next(console, suggestion.plan, output)

        show(answer, as_json, print_one)
        return verdict_exit_code(suggestion.plan.verdict, strict=strict)
    if report:
        raise VplanError("--report needs a single plan", "pass --model and --gpu", USAGE)
    if output:
        raise VplanError("-o needs a single plan", "pass --model and --gpu", USAGE)
    kind = "models" if asked.model is None else "classes"
    if length and length.folders and asked.model is None:
        raise VplanError("--data needs a single model", "pass --model", USAGE)
    if length and asked.model is not None:
        question = asked.settle(gpu=lookup.gpu_classes()[0].name)
        length = length.counting(question.model, question.job)
    table = _Table(asked, prefer, allow is not None, length)
    rows = table.models() if asked.model is None else table.classes()
    answer = {
        kind: [row.to_json(kind) for row in rows],
        **(render.best_rows(rows) if length and kind == "classes" else {}),
        "considered": sum(row.considered for row in rows),
        "seconds": round(time.perf_counter() - started, 3),
    }

    def print_table(console: Console) -> None:
        render.print_rows(console, table.first_line(), kind, rows)
        if length and kind == "classes":
            render.print_best(console, rows)

    show(answer, as_json, print_table)
    verdicts = [row.plan.verdict for row in rows if row.plan]
    return min((verdict_exit_code(verdict, strict=strict) for verdict in verdicts), default=DOES_NOT_FIT)


class _Table:
    """The answer for every model, or for every class of card: a line each, worked out on several cores."""

    def __init__(self, asked: TypedQuestion, prefer: str, allow_lossy: bool, length: AskedLength | None = None) -> None:
        self.asked = asked
        self.prefer = prefer
        self.allow_lossy = allow_lossy
        self.length = length
        self.suggester = Suggester(asked.trainer, prefer)

    def models(self) -> list[render.TableRow]:
        """A line for every model that can train at that length."""
        frames = self.asked.job.get("frames")
        names = [name for name in lookup.model_names() if lookup.model(name).kind == "video" or frames in (None, 1)]
        rows, refusals = [], []
        for name, found in zip(names, spread(_row_maker, self._typed, names, "models"), strict=True):
            if isinstance(found, VplanError):
                refusals.append(found)
                found = render.TableRow(name, None, found.message, 0)
            rows.append(found)
        if refusals and len(refusals) == len(rows):
            raise refusals[0]
        return rows

    def classes(self) -> list[render.TableRow]:
        """A line for every class of card."""
        rows = []
        for found in spread(_row_maker, self._typed, [group.name for group in lookup.gpu_classes()], "cards"):
            if isinstance(found, VplanError):
                raise found
            rows.append(found)
        return rows

    @property
    def _typed(self) -> tuple[TypedQuestion, str, bool, AskedLength | None]:
        return self.asked, self.prefer, self.allow_lossy, self.length

    def row(self, name: str) -> render.TableRow | VplanError:
        """The line for one model, or for one class of card of the model that was typed; or why there is none."""
        try:
            if self.asked.model is None:
                return self._row(name, self.asked.settle(model=name))
            return self._row(name, self.asked.settle(gpu=name))
        except VplanError as error:
            return error

    def first_line(self) -> str:
        """How a question about many was understood."""
        asked = self.asked
        if asked.model is None:
            count, card = lookup.parse_gpus(asked.gpu or "")
            several = f"{count} x " if count > 1 else ""
            return f"all known models, {asked.job.get('method', 'lora')}, on {several}{card.title}: " + (
                f"{card.allocatable_gib:.2f} GiB usable"
            )
        return f"{lookup.model(asked.model).title}, {asked.job.get('method', 'lora')}, on every card class"

    def _row(self, name: str, question: Question) -> render.TableRow:
        search = self.suggester.search(question._replace(allow_lossy=self.allow_lossy))
        suggestion = self.suggester.best(search, explain=False)
        plan = suggestion.plan if suggestion else search.tightest(question.job)
        if plan is None or plan.verdict == "no":
            reason = _shortage(plan) if plan else search.missing.message if search.missing else ""
            return render.TableRow(name, None, reason, search.considered)
        plan = plan.replace(assumptions=assumptions(question, plan))
        whole = _whole_job(self.length, self.suggester, plan)
        return render.TableRow(name, plan, "", search.considered, whole)


def _row_maker(
    asked: TypedQuestion, prefer: str, allow_lossy: bool, length: AskedLength | None
) -> Callable[[str], render.TableRow | VplanError]:
    return _Table(asked, prefer, allow_lossy, length).row


def _whole_job(length: AskedLength | None, suggester: Suggester, plan: Estimate) -> WholeJob | None:
    """The whole job of a plan that was found, where one was asked for and the plan runs."""
    if length is None or plan.verdict == "no":
        return None
    screen = suggester.screen
    return length.of(plan, screen.facts(plan.configuration), suggester.trainer, screen.run_cache.lay_out)


def _evened(suggester: Suggester, plan: Estimate, most: Mapping[Bucket, int]) -> EvenedPlan:
    """The plan with a batch size for each of its shapes."""

    def price(job: Job) -> Estimate:
        candidate = replace(plan.configuration, job=job)
        facts, lay_out = suggester.screen.facts(candidate), suggester.screen.run_cache.lay_out
        return assess(candidate, facts, suggester.trainer, lay_out, flushes=False).estimate

    return evened(plan, price, most)


def _json(whole: WholeJob | None, even: EvenedPlan | None) -> dict[str, Any]:
    shapes = {"buckets": [shape.to_json() for shape in even.shapes]} if even else {}
    return shapes | ({"whole_job": whole.to_json()} if whole else {})


def _shortage(least: Estimate) -> str:
    """What the tightest plan needs, in words."""
    ram = least.machine.host_ram
    if least.limit == "host":
        return f"needs at least {format_gib(least.host_ram_bytes)} of host RAM"
    reason = f"needs at least {gib(least.peak.device_bytes):.1f} GiB"
    return reason + (f" with {format_gib(ram)} of host RAM" if ram and least.host_ram_bytes > 0.8 * ram else "")
