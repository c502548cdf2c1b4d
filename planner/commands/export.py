"""`vplan export`: a plan as another trainer's own files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from planner.commands._shared.request import TypedQuestion, request_options
from planner.commands._shared.verb import Verb, examples, json_option, show, starting_with
from planner.dialects.base.launchers import ALLOCATOR
from planner.errors import VplanError
from planner.foreign.export import export, export_targets, flags_of, write_files
from planner.foreign.trainer_search import suggest_for, trainer_of
from planner.terminal import echo
from planner.units import format_gib

if TYPE_CHECKING:
    from rich.console import Console


def _page(context: click.Context, _parameter: click.Parameter, asked: bool) -> None:
    if asked:
        from planner.foreign.docs_pages import trainers_page

        echo(trainers_page(), nl=False)
        context.exit()


def _complete(_context: click.Context, _option: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return starting_with(export_targets(), incomplete)


@click.command(
    cls=Verb,
    epilog=examples(
        "vplan export plan.toml --to musubi-tuner -o out",
        "vplan export plan.toml --to diffusion-pipe -o out --nearest",
        "vplan export wan2.1-t2v-14b --to musubi-tuner --gpu 24GB -o out",
        "vplan export plan.toml --to accelerate -o out --json",
    ),
)
@request_options(searched=True)
@click.option("--to", "name", required=True, metavar="TRAINER", shell_complete=_complete, help="Trainer to write for; "
              "`accelerate` writes accelerate and DeepSpeed configs for your own script.")  # fmt: skip
@click.option("-o", "--output", required=True, metavar="DIR", help="Folder to write the files to.")
@click.option(
    "--nearest", is_flag=True, help="If the trainer does not support the plan, export the nearest one it supports."
)
@click.option("--markdown", is_flag=True, is_eager=True, expose_value=False, callback=_page,
              help="Print docs/trainers.md: which plan fields each trainer supports.")  # fmt: skip
@click.option("--force", is_flag=True, help="Overwrite existing files.")
@json_option
def command(asked: TypedQuestion, name: str, output: str, nearest: bool, force: bool, as_json: bool) -> int:
    """Write a plan as another trainer's files: complete, ready to start, with a comment for each field of the plan.

    What that trainer does not support is refused by name, and the nearest plan it supports is offered. Given a model
    and a card instead, the best plan that the trainer can express is searched first. What only you know (paths of data
    and weights) is at the top, to be filled in.
    """
    if asked.plan is not None and not asked.typed:
        plan = asked.plan
    else:
        _, found = suggest_for(asked.to_question(), name)
        plan = found.to_plan(trainer_of(name, found.plan.job.model))
        if found.plan.verdict == "no":
            fault = f"no plan of {plan.job.model} fits as {name} trains it: at least {format_gib(found.plan.low_bytes)}"
            raise VplanError(fault, f"see `vplan suggest {plan.job.model} --for {name}` with the same options", 3)
    done = export(plan, name, nearest)
    name = done.trainer
    paths = write_files(done, Path(output), force)
    estimate = done.plan.estimate
    answer = {
        "trainer": name,
        "files": [str(path) for path in paths],
        "start": done.start,
        "carried": {setting: list(fields) for setting, fields in done.carried.items()},
        "left_out": {field: str(value) for field, value in done.left_out.items()},
        "changed": {field: str(value) for field, value in done.changed.items()},
        "estimate": estimate.to_json() if estimate else None,
    }

    def render(console: Console) -> None:
        def say(line: str) -> None:
            console.print(line, markup=False, soft_wrap=True)

        if done.changed:
            say(f"The nearest plan that {name} supports: {flags_of(done.changed)}")
        for path in paths:
            say(f"wrote {path}")
        if estimate:
            peak, budget = format_gib(estimate.peak.device_bytes), format_gib(estimate.budget_bytes)
            say(f"As {name} does it: {estimate.verdict}, {peak} of {budget} at {estimate.peak.moment}")
        if done.left_out:
            say("Your script must do: " + ", ".join(f"{field} {value}" for field, value in done.left_out.items()))
        counts_on = f" (it sets {ALLOCATOR}, on which the estimate counts)" if done.sets_allocator else ""
        # The trainers' own Python runs on Windows; the script that starts it is bash's.
        say(f"Start it in {output}: {done.start}{counts_on}")

    show(answer, as_json, render)
    return 0
