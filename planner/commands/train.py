"""`vplan train`: trains a plan on data, from the first check to the finished weights."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.catalog import lookup
from planner.commands._shared.data_options import data_options, typed_settings, with_proposed_shapes
from planner.commands._shared.options import training_options
from planner.commands._shared.request import TypedQuestion, request_options
from planner.commands._shared.training.pick_plan import PLAN, choose, weights_of
from planner.commands._shared.training.run_end import resume_hint
from planner.commands._shared.training.training_supervisor import ENTRIES, TrainingSupervisor
from planner.commands._shared.verb import (
    FiniteRange,
    Verb,
    answer_console,
    examples,
    json_option,
    stoppable,
    talk,
)
from planner.dataset.sources import sources
from planner.errors import VplanError, quoted
from planner.launch import launch
from planner.launch.stop import StopSignal
from planner.launch.training_settings import with_options
from planner.preflight import preflight
from planner.spec.job import Bucket
from planner.spec.plan import read_plan
from planner.spec.training import TrainingSettings
from planner.terminal import echo

if TYPE_CHECKING:
    from planner.catalog.profiles import ModelProfile


@click.command(
    cls=Verb,
    epilog=examples(
        "vplan train plan.toml --data clips --output run --weights Wan2.1-T2V-1.3B",
        "vplan train my-wan --gpu 24GB --data clips --output run --steps 2000",
        "vplan train plan.toml --data dataset.toml --output run --weights Wan2.1-T2V",
        "vplan train plan.toml --data clips --output run --trigger 'ohwx man' --flip",
        "vplan train plan.toml --data clips --output run --log-with tensorboard",
        "vplan train plan.toml --data clips --output run --nodes 2 --slurm job.sh",
        "vplan train my-wan --gpu 24GB --data clips --output run --validate-every 250",
        "vplan train plan.toml --data clips --output run --timestep-shift 3",
    ),
)
@request_options(searched=True)
@data_options(required=True)
@click.option("--output", required=True, metavar="DIR", help="Folder for everything the run writes.")
@click.option("--weights", metavar="DIR", help="Model folder in diffusers format; not needed for your own models.")
@click.option(
    "--transformer",
    metavar="FILE",
    help="One .safetensors file with the transformer, as ComfyUI reads it, in place of the folder's own.",
)
@click.option(
    "--steps",
    type=click.IntRange(1, 10**5),
    default=1000,
    show_default=True,
    metavar="N",
    help="Total optimizer steps.",
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
    help="Steps between validation samples.  [default: none are made; with --validation-mode on, at the end]",
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
@click.option(
    "--expert-steps",
    type=click.IntRange(1, 10**5),
    metavar="N",
    help="With --experts both, steps that one trains before the next is drawn.  [default: 10, as estimated]",
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
@training_options
@json_option
def command(asked: TypedQuestion, data: str, output: str, as_json: bool, **said: Any) -> int:
    """Train from a plan, or plan a model and train it.

    A dataset.toml lists folders, each with its own settings (docs/training.md has them all):

    \b
      [[source]]
      folder = "clips"
      trigger = "ohwx man"
      repeats = 3

    The plan is checked against what is free now, and the data is encoded once and cached. The same command again
    resumes training from its last checkpoint. A model whose samples are asked for (--validate-every,
    --validation-prompt, ...) is planned with --validation-mode on; a given plan must have it. On SIGUSR1, or when a
    file OUTPUT/stop appears, it writes a checkpoint after the current step and ends with exit code 138. Exit code 3: it
    does not fit; 4: it failed for another reason.
    """
    place = Path(output).expanduser().absolute()
    # Before anything is planned or written.
    sources(Path(data).expanduser(), typed_settings(said))
    with_options(TrainingSettings(), said)
    trained = asked.model or (asked.plan.job.model if asked.plan else None)
    if trained is not None:
        _check_data(lookup.model(trained), Path(data).expanduser())
    if asked.model is not None:
        weights_of(lookup.model(asked.model), said["weights"])
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VplanError(f"cannot make {quoted(output)}: {error.strerror}", "name another --output") from None
    with launch.locked(place, said["node_rank"]) as is_locked:
        if not is_locked and sys.platform != "win32":
            echo(f"warning: the drive of {place} has no locks: start no second run there meanwhile", err=True)
        planned = asked.plan is None and not (place / PLAN).exists()  # which prints what it found
        console = talk() if as_json else answer_console()  # with --json, stdout has only the final answer
        asked, most = _with_shapes(asked, Path(data).expanduser(), place, said)
        chosen = choose(asked, place, asked.asks_for_samples(said), most, console)
        plan = preflight.ready(chosen.plan)
        plan = plan.replace(training=with_options(plan.training, said))
        with stoppable(lambda: resume_hint(place)), StopSignal(place, first=said["node_rank"] == 0):
            supervisor = TrainingSupervisor(plan, Path(data).expanduser().absolute(), place, said)
            if said["node_rank"] == 0:
                chosen.keep(place, searched=planned)
            return supervisor.run(as_json, begins=not planned)


def _with_shapes(
    asked: TypedQuestion, data: Path, place: Path, options: Mapping[str, Any]
) -> tuple[TypedQuestion, Mapping[Bucket, int]]:
    """The question with the shapes of `--buckets auto`: those of the kept plan of an earlier call, which the data had
    then, else those of the data now, with the number of samples of each."""
    kept = place / PLAN
    if asked.wants_shapes and (data / ENTRIES).is_file():
        fault = f"--buckets auto looks into clips, and {data} holds encoded samples"
        raise VplanError(fault, "write their shapes: --buckets FxHxW,...")
    if asked.wants_shapes and asked.plan is None and kept.is_file():
        return asked.with_shapes(read_plan(kept).job.buckets), {}
    return with_proposed_shapes(asked, {**options, "data": str(data)})


def _check_data(model: ModelProfile, data: Path) -> None:
    """Raises a VplanError if the data has to be encoded and the family cannot encode it."""
    if model.traits.not_encoded and not (data / ENTRIES).is_file():
        fault = f"vplan train cannot encode {model.traits.not_encoded} for {model.title} yet"
        fix = f"pass samples that are encoded already ({ENTRIES} in --data), or train another model: see `vplan models`"
        raise VplanError(fault, fix)
