"""`vplan train --slurm FILE`: the batch script of the command that was typed, on the plan in its output folder."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import click
from click.core import ParameterSource

from planner.commands._shared.request import FIELDS
from planner.commands._shared.verb import DONE, show
from planner.errors import VplanError, quoted
from planner.file_writing import write_file
from planner.launch.slurm import slurm_script
from planner.preflight import preflight
from planner.spec.plan import Plan
from planner.spec.training import TrainingSettings
from planner.worker_process import vplan_command

LEFT_OUT = ("plan_path", "slurm", "node_rank", "main_address", "main_port", "print_command", "as_json")
"""Options of `vplan train` that the script sets itself, or that do not concern the run."""

OURS, HEAD_BYTES = b"\n#SBATCH --job-name=vplan-", 4096
"""How a script of ours is recognised, and within how many bytes."""


def write_script(file: Path, plan: Plan, output: Path, as_json: bool) -> int:
    """Writes the batch script of the running command, and prints how to submit it."""
    context = click.get_current_context()
    found, _ = preflight.estimated(plan, must=False)
    script = slurm_script(
        plan,
        vplan_command(
            "train", str(output / "plan.toml"), *retyped(context, {*FIELDS, *TrainingSettings.model_fields, *LEFT_OUT})
        ),
        log=f"{output}/".replace("%", "%%") + "slurm-%j.log",
        steps=context.params["steps"],
        estimate=found,
        gpu=context.params["device"] == "cuda",
    )
    try:
        if file.is_file() and not _is_ours(file):
            raise VplanError(f"{quoted(str(file))} exists and is no batch script of vplan's", "choose another file")
        write_file(file, script)
    except OSError as error:
        raise VplanError(f"cannot write {quoted(str(file))}: {error.strerror}", "choose another file") from None
    answer = {"script": str(file), "nodes": plan.machine.nodes}
    show(answer, as_json, lambda console: console.print(f"submit it with: sbatch {file}", markup=False))
    return DONE


def _is_ours(file: Path) -> bool:
    with file.open("rb") as opened:
        return OURS in opened.read(HEAD_BYTES)


def retyped(context: click.Context, left_out: Collection[str]) -> list[str]:
    """The options of the running command as typed, without those in `left_out`; names of existing files become absolute
    paths."""
    words: list[str] = []
    for option in context.command.params:
        name = option.name or ""
        typed = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if not isinstance(option, click.Option) or not typed or name in left_out:
            continue
        value = context.params[name]
        if option.is_flag:
            words.append((option.opts if value else option.secondary_opts)[0])
            continue
        for one in value if option.multiple else [value]:
            path = Path(str(one)).expanduser()
            # A folder called 100 or constant is not meant by --steps 100 or --schedule constant.
            named = isinstance(option.type, click.types.StringParamType) and path.exists()
            words += [option.opts[0], str(path.absolute()) if named else str(one)]
    return words
