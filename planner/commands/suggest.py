"""`vplan suggest`: the best way to train a model on a card; without a card or a model, a table over all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.shell_completion import CompletionItem

from planner.catalog import card_lookup, lookup
from planner.commands import USAGE
from planner.commands._shared.data_options import (
    AskedLength,
    asked_length,
    evened_plan,
    refuse_of_ours,
    whole_job_of,
    whole_job_options,
    with_proposed_shapes,
)
from planner.commands._shared.gpu_count import (
    CountedGpus,
    TimeLimits,
    asked_limits,
    count_gpus,
    limit_options,
    refuse_limits,
)
from planner.commands._shared.plan_table import PlanTable, whole_job_found
from planner.commands._shared.rendering import render, render_job, render_rows
from planner.commands._shared.rendering.render_relaxed import relaxed_lines
from planner.commands._shared.rendering.wrapping import print_lines, wrapped
from planner.commands._shared.request import (
    TypedQuestion,
    answer_with_samples,
    refuse_without_cuda,
    request_options,
)
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
    typed_command,
    verdict_exit_code,
    write_report,
)
from planner.errors import VplanError
from planner.estimate.bucket_batches import EvenedPlan
from planner.estimate.whole_job import WholeJob
from planner.layout.unpriced import refuse_trainers_of_cuda
from planner.search.objectives.objective import PREFERRED
from planner.search.question import Question, Suggestion
from planner.search.suggester import Suggester
from planner.spec.job import Bucket
from planner.spec.plan import Estimate

if TYPE_CHECKING:
    from rich.console import Console


def _complete_trainer(_context: click.Context, _option: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from planner.foreign.export import export_targets

    return starting_with(export_targets(), incomplete)


@click.command(
    cls=Verb,
    epilog=examples(
        "vplan suggest --gpu 24GB --frames 81",
        "vplan suggest wan2.1-i2v-14b-480p --gpu h100-80gb --frames 129 -o plan.toml",
        "vplan suggest flux.1-dev --method full",
        "vplan suggest wan2.1-t2v-14b --gpu 24GB --for musubi-tuner -o out",
        "vplan suggest wan2.1-t2v-14b --gpu rtx4090 --frames max",
        "vplan suggest wan2.1-t2v-1.3b --steps 2000 --price 24GB=0.4 --price 80GB=2.5",
        "vplan suggest wan2.1-t2v-14b --gpu h100 --steps 2000 --max-hours 24",
    ),
)
@request_options(searched=True, own_card=True)
@whole_job_options
@limit_options
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
    **said: Any,
) -> int:
    """Find the fastest way to train that fits, lossless if possible.

    Options you set stay fixed; the rest is searched. Without --gpu the answer is for the card of this machine; where
    there is none, or with --gpu all, for every card class. Without --model it covers every model that can train at that
    length. With --steps or --epochs it also tells the hours, kWh and money of the whole job.
    """
    started = time.perf_counter()
    cards = [] if asked.gpu else [group.name for group in card_lookup.gpu_classes()]
    length, auto = asked_length(said, cards, proposes=asked.wants_shapes), asked.wants_shapes
    limits = asked_limits(said, length)
    refuse_limits(limits, {"leave out --for": trainer is not None, "write the shapes of --buckets": auto})
    to = _Outputs(output, report, as_json, strict)
    if trainer is not None:
        refuse_of_ours(said, trainer, auto)
        return _for_trainer(asked, trainer, prefer, allow is not None, length, to)
    asked, samples = with_proposed_shapes(asked, said)
    most = samples if auto else None
    makes_samples = asked.asks_for_samples(said) is not None
    if asked.model is None and asked.gpu is None:
        raise VplanError("no --model and no --gpu", "pass one of them, as --gpu 24GB", USAGE)
    several = lookup.several(asked.model) if asked.model and asked.gpu else ()
    single = asked.model is not None and asked.gpu is not None and not several
    refuse_limits(limits, {"name one of each: vplan suggest MODEL --gpu CARD": not single})
    if single:
        suggester = Suggester(asked.trainer, prefer)
        if makes_samples:
            asked = _with_samples(asked, suggester, allow is not None)
        return _for_one(started, asked, suggester, allow is not None, length, limits, most, to)
    if makes_samples:
        asked = asked.with_samples()
    one = several and f"write one of {', '.join(several)}"
    if report or output:
        raise VplanError(
            f"{'--report' if report else '-o'} needs a single plan", one or "pass --model and --gpu", USAGE
        )
    kind = "models" if asked.model is None or several else "classes"
    if length and length.folders and kind == "models":
        raise VplanError("--data needs a single model", one or "pass --model", USAGE)
    if length and kind == "classes":
        question = asked.to_question(gpu=card_lookup.gpu_classes()[0].name)
        length = length.counting(question.model, question.job)
    table = PlanTable(asked, prefer, allow is not None, several, length)
    return _show_table(started, table, kind, to)


class _Outputs(NamedTuple):
    """Where the answer goes, and whether a tight plan counts as one."""

    output: str | None
    report: str | None
    as_json: bool
    strict: bool


def _show_table(started: float, table: PlanTable, kind: str, to: _Outputs) -> int:
    """Prints a line for each model or class of card."""
    rows = table.models() if kind == "models" else table.classes()
    answer = {
        kind: [row.to_json(kind) for row in rows],
        **(render_rows.best_rows(rows) if table.length and kind == "classes" else {}),
        "considered": sum(row.considered for row in rows),
        "seconds": round(time.perf_counter() - started, 3),
    }
    show(answer, to.as_json, lambda console: render_rows.print_rows(console, table.first_line(), kind, rows))
    verdicts = [row.plan.verdict for row in rows if row.plan]
    return min((verdict_exit_code(verdict, strict=to.strict) for verdict in verdicts), default=DOES_NOT_FIT)


def _with_samples(asked: TypedQuestion, suggester: Suggester, lossy: bool) -> TypedQuestion:
    """The question with the requested validation samples, made in the way that the answer's plan has room for."""

    def answer(asked: TypedQuestion) -> tuple[TypedQuestion, bool]:
        found = suggester.fitting(asked.to_question()._replace(allow_lossy=lossy))[1]
        return asked, found is not None and found.plan.verdict != "no"

    return answer_with_samples(asked, answer, lambda found: found[1])[0]


def _for_one(
    started: float,
    asked: TypedQuestion,
    suggester: Suggester,
    lossy: bool,
    length: AskedLength | None,
    limits: TimeLimits | None,
    most: Mapping[Bucket, int] | None,
    to: _Outputs,
) -> int:
    """Prints the answer for one model on one card. ``most``: the number of samples of each proposed shape."""
    limited = "--max-hours and --max-step-seconds"
    asks = {"-o": bool(to.output), "--report": bool(to.report), limited: limits is not None}
    refuse_without_cuda(card_lookup.parse_gpus(asked.gpu or "")[1], asks)
    counted = _counted(asked, suggester, limits, length, lossy=lossy) if limits else None
    question = (counted.chosen.question if counted else asked.to_question())._replace(allow_lossy=lossy)
    suggestion = suggester.suggest(question, _early(started, suggester, length))
    even = evened_plan(suggester, suggestion.plan, most) if most is not None else None
    suggestion = suggestion._replace(plan=even.plan) if even else suggestion
    whole = whole_job_found(length, suggester, suggestion.plan)
    if to.output:
        save_plan(suggestion.to_plan(asked.trainer), to.output)
    if to.report:
        plans = [(to.output or "plan.toml", suggestion.to_plan(asked.trainer))]
        write_report(to.report, plans, changes=relaxed_lines(suggestion))
    answer = suggestion.to_json(time.perf_counter() - started) | _json(whole, even)
    answer |= counted.to_json() if counted else {}

    def print_one(console: Console) -> None:
        if counted:
            counted.print_miss(console)
        render.print_suggestion(console, question, suggestion, whole)
        if even:
            render_job.print_shapes(console, even)
        if whole:
            render_job.print_whole_job(console, whole)
        if counted:
            counted.print(console)
        render.print_next(console, suggestion.plan, to.output)

    show(answer, to.as_json, print_one)
    if counted and not counted.meets:
        return DOES_NOT_FIT
    return verdict_exit_code(suggestion.plan.verdict, strict=to.strict)


def _early(started: float, suggester: Suggester, length: AskedLength | None) -> Callable[[Suggestion], object] | None:
    """Passes the plan on before its alternatives are computed, if the caller wants it early."""
    tell = typed_command().early
    if tell is None:
        return None

    def found(suggestion: Suggestion) -> None:
        whole = whole_job_found(length, suggester, suggestion.plan)
        tell(suggestion.to_json(time.perf_counter() - started) | _json(whole, None))

    return found


def _for_trainer(
    asked: TypedQuestion, trainer: str, prefer: str, lossy: bool, length: AskedLength | None, to: _Outputs
) -> int:
    """Prints the best plan that another trainer can express; also writes its files if a folder is given."""
    from planner.foreign.export import check_target, export, write_files  # other questions start faster without
    from planner.foreign.trainer_search import suggest_for, trainer_of

    started, target = time.perf_counter(), check_target(trainer)
    if asked.gpu:
        refuse_trainers_of_cuda(card_lookup.parse_gpus(asked.gpu)[1], trainer)
    if several := lookup.several(asked.model) if asked.model and asked.gpu else ():
        if to.output or to.report:
            raise VplanError("-o and --report need a single plan", f"write one of {', '.join(several)}", USAGE)
        return _show_table(started, PlanTable(asked, prefer, lossy, several, length, target), "models", to)
    question, suggestion = suggest_for(asked.to_question()._replace(allow_lossy=lossy), trainer, prefer)
    plan = suggestion.to_plan(trainer_of(target, suggestion.plan.job.model))
    whole = whole_job_of(length, suggestion.plan, plan.trainer)
    answer = suggestion.to_json(time.perf_counter() - started) | _json(whole, None)
    written: list[str] = []
    if to.output and to.output.endswith(".toml"):
        save_plan(plan, to.output)
    elif to.output and suggestion.plan.verdict != "no":
        written = [str(path) for path in write_files(export(plan, target), Path(to.output), forced())]
    if to.report:
        write_report(to.report, [(to.output or "plan.toml", plan)], changes=relaxed_lines(suggestion))

    def render_all(console: Console) -> None:
        render.print_suggestion(console, question, suggestion, whole)
        for path in written:
            console.print(f"wrote {path}", markup=False, soft_wrap=True)
        if written and whole and (words := _length_words(plan.trainer, whole.steps)):
            print_lines(console, wrapped(words, console.width, "  "))

    show({**answer, "trainer": target, "files": written}, to.as_json, render_all)
    return verdict_exit_code(suggestion.plan.verdict, strict=to.strict)


def _length_words(trainer: str, steps: int) -> str:
    """How the trainer's files are told the length of the job, which no plan holds; empty where they have no setting."""
    from planner import dialects

    keys = [name.rpartition(":")[2] for name in dialects.dialect(trainer).steps]
    if not keys:
        return ""
    epochs = "".join(f", without {key}" for key in keys[1:] if key.endswith("epochs"))
    return f"they train as long as the trainer's example: for {steps} steps set {keys[0]} to {steps}{epochs}"


def _counted(
    asked: TypedQuestion, suggester: Suggester, limits: TimeLimits, length: AskedLength | None, *, lossy: bool
) -> CountedGpus:
    """The number of GPUs that keeps the time limits."""

    def best(question: Question) -> Estimate | None:
        found = suggester.best(suggester.search(question._replace(allow_lossy=lossy)), explain=False)
        return found.plan if found else None

    steps = length.length.steps if length else None
    return count_gpus(asked, limits, best, lambda plan: whole_job_found(length, suggester, plan), steps)


def _json(whole: WholeJob | None, even: EvenedPlan | None) -> dict[str, Any]:
    shapes = {"buckets": [shape.to_json() for shape in even.shapes]} if even else {}
    return shapes | ({"whole_job": whole.to_json()} if whole else {})
