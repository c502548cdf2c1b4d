"""`vplan estimate`: what one way of training needs, phase by phase."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from planner.commands._shared.data_options import asked_length, whole_job_options, with_proposed_shapes
from planner.commands._shared.render import headline, print_estimate, print_next, print_shapes, print_whole_job
from planner.commands._shared.request import TypedQuestion, request_options
from planner.commands._shared.verb import (
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
from planner.estimate.bucket_batches import evened
from planner.estimate.estimate import assess
from planner.evidence.from_ledger import with_learned
from planner.layout.inputs import load_facts
from planner.layout.run import Facts
from planner.spec.job import Job
from planner.spec.plan import Estimate, Plan, write_plan

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
@request_options()
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
    length = asked_length(said, proposes=asked.wants_shapes)
    auto = asked.wants_shapes
    asked, most = with_proposed_shapes(asked, said)
    question = asked.settle()
    configuration = question.configuration()
    if question.frames_max:
        raise VplanError("estimate takes one length; --frames max is a search", "use vplan suggest --frames max")

    def facts_of(job: Job) -> Facts:
        return with_learned(load_facts(replace(configuration, job=job), question.model, question.gpu), asked.trainer)

    def price(job: Job) -> Estimate:
        return assess(replace(configuration, job=job), facts_of(job), asked.trainer).estimate

    found = price(configuration.job)
    even = evened(found, price, most) if auto else None
    found = even.plan if even else found
    found = found.replace(assumptions=(*question.assumptions, *found.assumptions))
    whole = length.of(found, facts_of(found.job), asked.trainer) if length else None
    if output:
        write_plan(Plan.of(found, trainer=asked.trainer), output)

    if report:
        write_report(report, [(output or "plan.toml", Plan.of(found, trainer=asked.trainer))])

    def render(console: Console) -> None:
        headline(console, question, found)
        print_estimate(console, found)
        if even:
            print_shapes(console, even)
        if whole:
            print_whole_job(console, whole)
        print_next(console, found, output)

    answer = found.to_json() | ({"buckets": [shape.to_json() for shape in even.shapes]} if even else {})
    answer |= {"whole_job": whole.to_json()} if whole else {}
    show(answer, as_json, render)
    return verdict_exit_code(found.verdict, strict=strict)
