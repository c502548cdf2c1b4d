"""`vplan estimate`: the memory and time that one way of training needs, phase by phase."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from planner.commands._shared.data_options import asked_length, whole_job_options, with_proposed_shapes
from planner.commands._shared.rendering.render import (
    print_answer,
    print_assumptions,
    print_estimate,
    print_next,
)
from planner.commands._shared.rendering.render_job import print_shapes, print_whole_job
from planner.commands._shared.request import TypedQuestion, refuse_without_cuda, request_options
from planner.commands._shared.verb import (
    Verb,
    examples,
    json_option,
    output_option,
    report_option,
    save_plan,
    show,
    verdict_exit_code,
    write_report,
)
from planner.dialects.base import cli_words
from planner.errors import VplanError
from planner.estimate.bucket_batches import with_batch_sizes
from planner.estimate.estimate import assess
from planner.evidence.from_ledger import with_learned
from planner.layout.recordings import load_facts
from planner.layout.run import Facts
from planner.search.question import Question
from planner.spec.job import Job, Strategy
from planner.spec.plan import Estimate, Plan

if TYPE_CHECKING:
    from rich.console import Console


@click.command(
    cls=Verb,
    epilog=examples(
        "vplan estimate wan2.1-t2v-1.3b --gpu 24GB --frames 81",
        "vplan estimate plan.toml --frames 49 --json",
        "vplan estimate plan.toml --epochs 10 --data clips --price 2.5",
    ),
)
@request_options(own_card=True)
@whole_job_options
@click.option("--strict", is_flag=True, help="Exit with code 3 if the verdict is tight.")
@output_option("the plan")
@report_option
@json_option
def command(
    asked: TypedQuestion, strict: bool, output: str | None, report: str | None, as_json: bool, **said: Any
) -> int:
    """Estimate one configuration: peak memory by phase, its breakdown, host RAM, seconds per step.

    Nothing is searched: options you do not set take vplan's defaults (`vplan suggest` searches instead). With --steps
    or --epochs it also tells the hours, kWh and money of the whole job.
    """
    if asked.asks_for_samples(said):
        asked = asked.with_samples()
    length = asked_length(said, proposes=asked.wants_shapes)
    auto = asked.wants_shapes
    asked, most = with_proposed_shapes(asked, said)
    question, estimate, facts = estimated(asked)

    def facts_of(job: Job) -> Facts:
        candidate = replace(estimate.configuration, job=job)
        return with_learned(load_facts(candidate, question.model, question.gpu), asked.trainer)

    def price(job: Job) -> Estimate:
        return assess(replace(estimate.configuration, job=job), facts_of(job), asked.trainer).estimate

    even = with_batch_sizes(estimate, price, most) if auto else None
    if even:
        estimate, facts = even.plan, facts_of(even.plan.job)
    whole = length.of(estimate, facts, asked.trainer) if length else None
    refuse_without_cuda(question.gpu, {"-o": bool(output), "--report": bool(report)})
    if output:
        save_plan(Plan.of(estimate, trainer=asked.trainer), output)

    if report:
        write_report(report, [(output or "plan.toml", Plan.of(estimate, trainer=asked.trainer))])

    def render(console: Console) -> None:
        print_answer(console, question, estimate)
        print_estimate(console, estimate, whole)
        print_assumptions(console, question, estimate)
        if even:
            print_shapes(console, even)
        if whole:
            print_whole_job(console, whole)
        if not asked.typed & Strategy.model_fields.keys() and asked.plan is None:
            searched = cli_words.command("suggest", estimate.job, Strategy(), estimate.machine)
            console.print(f"to search for the best options: {searched}", style="bold", markup=False, soft_wrap=True)
        print_next(console, estimate, output)

    answer = estimate.to_json() | ({"buckets": [shape.to_json() for shape in even.shapes]} if even else {})
    answer |= {"whole_job": whole.to_json()} if whole else {}
    show(answer, as_json, render)
    return verdict_exit_code(estimate.verdict, strict=strict)


def estimated(asked: TypedQuestion) -> tuple[Question, Estimate, Facts]:
    """The complete question, its estimate including the notes about defaults, and the facts behind it."""
    question = asked.to_question()
    configuration = question.configuration()
    if question.frames_max:
        raise VplanError("estimate takes one length; --frames max is a search", "use vplan suggest --frames max")
    facts = with_learned(load_facts(configuration, question.model, question.gpu), asked.trainer)
    estimate = assess(configuration, facts, asked.trainer).estimate
    return question, estimate.replace(assumptions=(*question.assumptions, *estimate.assumptions)), facts
