"""`vplan train`: runs a plan on data, from the first check to the finished weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from planner.catalog import lookup
from planner.commands._shared.pick_plan import PLAN, choose, weights_of
from planner.commands._shared.request import TypedQuestion, request_options
from planner.commands._shared.training_supervisor import TrainingSupervisor, resume_hint
from planner.commands._shared.verb import (
    FiniteRange,
    Verb,
    answer_console,
    examples,
    json_option,
    stoppable,
    talk,
)
from planner.errors import VplanError, quoted
from planner.launch import launch
from planner.preflight import preflight

if TYPE_CHECKING:
    pass

SCHEDULES = get_args(launch.Schedule)


@click.command(
    cls=Verb,
    epilog=examples(
        "vplan train plan.toml --data clips --output run --weights Wan2.1-T2V-1.3B",
        "vplan train my-wan --gpu 24GB --data clips --output run --steps 2000",
        "vplan train plan.toml --data clips --output run --log-with tensorboard",
        "vplan train plan.toml --data clips --output run --nodes 2 --slurm job.sh",
        "vplan train plan.toml --data clips --output run --validation-mode on",
    ),
)
@request_options(searched=True)
@click.option("--data", required=True, metavar="DIR", help="Clips or images with their captions.")
@click.option("--output", required=True, metavar="DIR", help="Folder for everything the run writes.")
@click.option("--weights", metavar="DIR", help="Model folder in diffusers format; not needed for your own models.")
@click.option(
    "--steps",
    type=click.IntRange(1, 10**5),
    default=1000,
    show_default=True,
    metavar="N",
    help="Total optimizer steps.",
)
@click.option(
    "--learning-rate", type=FiniteRange(0, min_open=True), metavar="X", help="[default: 1e-4 for lora, 1e-5 for full]"
)
@click.option(
    "--lr-scheduler",
    type=click.Choice(SCHEDULES),
    default="constant",
    show_default=True,
    metavar="NAME",
    help=f"One of {', '.join(SCHEDULES)}.",
)
@click.option(
    "--warmup-steps", type=click.IntRange(0, 10**5), default=0, metavar="N", help="Learning-rate warm-up steps."
)
@click.option("--seed", type=click.IntRange(0, 10**5), default=0, show_default=True, metavar="N")
@click.option(
    "--checkpoint-every",
    type=click.IntRange(1, 10**5),
    default=50,
    show_default=True,
    metavar="N",
    help="Steps between checkpoints.",
)
@click.option(
    "--keep-checkpoints",
    type=click.IntRange(1, 10**5),
    default=2,
    show_default=True,
    metavar="N",
    help="Checkpoints to keep for resuming; the LoRA files of all stay.",
)
@click.option(
    "--resume",
    default="auto",
    show_default=True,
    metavar="auto|no|DIR",
    help="Resume from the newest complete checkpoint, start over, or resume from DIR.",
)
@click.option(
    "--validate-every",
    type=click.IntRange(1, 10**5),
    metavar="N",
    help="Steps between validation samples (default: only at the end).",
)
@click.option(
    "--validation-prompt", multiple=True, metavar="TEXT", help="Prompt of a validation sample; may be repeated."
)
@click.option(
    "--validation-prompts", metavar="FILE", help="File with one prompt per line.  [default: a caption from the data]"
)
@click.option(
    "--validation-steps", type=click.IntRange(1, 1000), metavar="N", help="Denoising steps per validation sample."
)
@click.option(
    "--validation-guidance", type=FiniteRange(0, 100), metavar="X", help="Guidance scale of validation samples."
)
@click.option("--skip-bad", is_flag=True, help="Skip unusable clips instead of refusing to start.")
@click.option(
    "--log-with",
    type=click.Choice(launch.TRACKERS),
    metavar="NAME",
    help="Also log to one of accelerate's trackers: tensorboard, wandb, ...",
)
@click.option("--node-rank", type=click.IntRange(0), default=0, metavar="N", help="Rank of this node, from 0.")
@click.option("--main-address", metavar="HOST", help="Address of the first node, with --nodes.")
@click.option(
    "--main-port", type=click.IntRange(1, 65_535), default=launch.PORT, metavar="N", help="Free port on the first node."
)
@click.option(
    "--print-command", is_flag=True, help="Prepare everything and print the launch command without running it."
)
@click.option("--slurm", metavar="FILE", help="Write a batch script for sbatch instead of training.")
@click.option(
    "--device", type=click.Choice(["cuda", "cpu"]), default="cuda", help="cpu is for tiny models.  [default: cuda]"
)
@json_option
def command(asked: TypedQuestion, data: str, output: str, as_json: bool, **said: Any) -> int:
    """Train from a plan, or plan a model and train it.

    The plan is checked against what is free now, and the data is encoded once and cached. The same command again
    resumes training from its last checkpoint. Exit code 3: it does not fit; 4: it failed for another reason.
    """
    place = Path(output).expanduser().absolute()
    if not Path(data).expanduser().is_dir():
        raise VplanError(f"there is no folder {quoted(data)}", "pass the folder with your clips: --data DIR")
    if asked.model is not None:  # before anything is planned or written
        weights_of(lookup.model(asked.model), said["weights"])
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VplanError(f"cannot make {quoted(output)}: {error.strerror}", "name another --output") from None
    with launch.locked(place, said["node_rank"]):
        planned = asked.plan is None and not (place / PLAN).exists()  # which says what it found
        console = talk() if as_json else answer_console()  # with --json stdout is for the last answer alone
        plan = preflight.ready(choose(asked, place, first=said["node_rank"] == 0, console=console))
        with stoppable(lambda: resume_hint(place)):
            supervisor = TrainingSupervisor(plan, Path(data).expanduser().absolute(), place, said)
            return supervisor.run(as_json, begins=not planned)
