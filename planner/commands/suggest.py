"""`vplan suggest`: the best way to train on a card; without a card, on any; without a model, any model."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click
from click.shell_completion import CompletionItem

from planner.catalog import lookup
from planner.commands import USAGE
from planner.commands._shared import render
from planner.commands._shared.request import TypedQuestion, request_options
from planner.commands._shared.verb import (
    DOES_NOT_FIT,
    Verb,
    examples,
    forced,
    json_option,
    output_option,
    report_option,
    save_plan,
    show,
    starting_with,
    verdict_exit_code,
    write_report,
)
from planner.errors import VplanError
from planner.parallel import spread
from planner.search.objectives import PREFERRED
from planner.search.question import Question, Suggestion
from planner.search.suggester import Suggester, assumptions
from planner.spec.plan import Estimate
from planner.units import format_gib, gib

if TYPE_CHECKING:
    from rich.console import Console


def _complete_trainer(_context: click.Context, _option: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from planner.foreign.export import targets

    return starting_with(targets(), incomplete)


@click.command(
    cls=Verb,
    epilog=examples(
        "vplan suggest --gpu 24GB --frames 81",
        "vplan suggest wan2.1-i2v-14b-480p --gpu h100-80gb --frames 129 -o plan.toml",
        "vplan suggest flux.1-dev --method full",
        "vplan suggest wan2.1-t2v-14b --gpu 24GB --for musubi-tuner -o out",
        "vplan suggest wan2.1-t2v-14b --gpu rtx4090 --frames max",
    ),
)
@request_options(searched=True)
@click.option(
    "--prefer",
    type=click.Choice(["speed", *PREFERRED]),
    default="speed",
    help="What to maximise, subject to your other options.  [default: speed]",
)
@click.option(
    "--allow", "allow", type=click.Choice(["lossy"]), help="Also consider lossy options when a lossless plan fits."
)
@click.option(
    "--for",
    "trainer",
    metavar="TRAINER",
    is_eager=True,
    shell_complete=_complete_trainer,
    help="Search what this trainer can express (musubi-tuner, ...), as it trains; -o DIR writes its files.",
)
@click.option("--strict", is_flag=True, help="Exit with code 3 if the verdict is tight.")
@output_option("the plan")
@report_option
@json_option
def command(
    asked: TypedQuestion,
    prefer: str,
    allow: str | None,
    trainer: str | None,
    strict: bool,
    output: str | None,
    report: str | None,
    as_json: bool,
) -> int:
    """Find the fastest way to train that fits, lossless if possible.

    Options you set stay fixed; the rest is searched. Without --gpu the answer covers every card class, without --model
    every model that can train at that length.
    """
    started = time.perf_counter()
    if trainer is not None:
        return _for_trainer(asked, trainer, prefer, allow is not None, _Outputs(output, report, as_json, strict))
    if asked.model is None and asked.gpu is None:
        raise VplanError("no --model and no --gpu", "pass one of them, as --gpu 24GB", USAGE)
    if asked.model is not None and asked.gpu is not None:
        question = asked.settle()._replace(allow_lossy=allow is not None)
        suggestion = Suggester(asked.trainer, prefer).suggest(question)
        if output:
            save_plan(suggestion.to_plan(asked.trainer), output)
        if report:
            write_report(report, [(output or "plan.toml", suggestion.to_plan(asked.trainer))])
        answer = suggestion.to_json(time.perf_counter() - started)
        show(answer, as_json, lambda console: _print_one(console, question, suggestion, output))
        return verdict_exit_code(suggestion.plan.verdict, strict=strict)
    if report:
        raise VplanError("--report needs a single plan", "pass --model and --gpu", USAGE)
    if output:
        raise VplanError("-o needs a single plan", "pass --model and --gpu", USAGE)
    kind = "models" if asked.model is None else "classes"
    table = _Table(asked, prefer, allow is not None)
    rows = table.models() if asked.model is None else table.classes()
    answer = {
        kind: [row.to_json(kind) for row in rows],
        "considered": sum(row.considered for row in rows),
        "seconds": round(time.perf_counter() - started, 3),
    }
    show(answer, as_json, lambda console: render.print_rows(console, table.first_line(), kind, rows))
    verdicts = [row.plan.verdict for row in rows if row.plan]
    return min((verdict_exit_code(verdict, strict=strict) for verdict in verdicts), default=DOES_NOT_FIT)


class _Outputs(NamedTuple):
    """Where the answer goes, and whether a tight one is one."""

    output: str | None
    report: str | None
    as_json: bool
    strict: bool


def _for_trainer(asked: TypedQuestion, trainer: str, prefer: str, lossy: bool, to: _Outputs) -> int:
    """The best plan that another trainer can express; its files too, where a folder is named."""
    from planner.foreign.export import check_target, export, write_files  # other questions start faster without
    from planner.foreign.trainer_search import suggest_for, trainer_of

    started = time.perf_counter()
    question, suggestion = suggest_for(asked.settle()._replace(allow_lossy=lossy), trainer, prefer)
    trainer = check_target(trainer)
    plan = suggestion.to_plan(trainer_of(trainer))
    answer = suggestion.to_json(time.perf_counter() - started)
    written: list[str] = []
    if to.output and to.output.endswith(".toml"):
        save_plan(plan, to.output)
    elif to.output and suggestion.plan.verdict != "no":
        written = [str(path) for path in write_files(export(plan, trainer), Path(to.output), forced())]
    if to.report:
        write_report(to.report, [(to.output or "plan.toml", plan)])

    def render_all(console: Console) -> None:
        render.print_suggestion(console, question, suggestion)
        for path in written:
            console.print(f"wrote {path}", markup=False, soft_wrap=True)

    show({**answer, "trainer": trainer, "files": written}, to.as_json, render_all)
    return verdict_exit_code(suggestion.plan.verdict, strict=to.strict)


class _Table:
    """The answer for every model, or for every class of card: a line each, worked out on several cores."""

    def __init__(self, asked: TypedQuestion, prefer: str, allow_lossy: bool) -> None:
        self.asked = asked
        self.prefer = prefer
        self.allow_lossy = allow_lossy
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
    def _typed(self) -> tuple[TypedQuestion, str, bool]:
        return self.asked, self.prefer, self.allow_lossy

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
        return render.TableRow(name, plan, "", search.considered)


def _row_maker(asked: TypedQuestion, prefer: str, allow_lossy: bool) -> Callable[[str], render.TableRow | VplanError]:
    return _Table(asked, prefer, allow_lossy).row


def _shortage(least: Estimate) -> str:
    """What the tightest plan needs, in words."""
    ram = least.machine.host_ram
    if least.limit == "host":
        return f"needs at least {format_gib(least.host_ram_bytes)} of host RAM"
    reason = f"needs at least {gib(least.peak.device_bytes):.1f} GiB"
    return reason + (f" with {format_gib(ram)} of host RAM" if ram and least.host_ram_bytes > 0.8 * ram else "")


def _print_one(console: Console, question: Question, suggestion: Suggestion, output: str | None) -> None:
    render.print_suggestion(console, question, suggestion)
    render.print_next(console, suggestion.plan, output)
