"""How a run of `vplan train` ended: the answer of one that finished or was stopped, and the error of any other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.catalog import card_lookup
from planner.commands._shared.rendering.render import used_bar
from planner.commands._shared.training.run_progress import Follower
from planner.commands._shared.verb import DONE, show
from planner.errors import VplanError
from planner.launch import checkpoints, launch
from planner.launch.stop import STOPPED
from planner.spec.plan import RAN_OUT

if TYPE_CHECKING:
    from rich.console import Console

    from planner.spec.plan import Estimate


def show_finished(
    request: launch.RunRequest,
    begun: int | None,
    follower: Follower,
    estimate: Estimate | None,
    notes: Sequence[str],
    as_json: bool,
) -> int:
    """Prints the answer of a completed run; returns the exit code. ``begun``: the step at which it was resumed."""
    last, output = follower.last or {}, Path(request.output)
    answer = {
        "output": str(output),
        "weights": str(output / launch.FINAL),
        "checkpoint": str(output / checkpoints.FOLDER / checkpoints.folder_name(request.steps)),
        "steps": request.steps,
        "training": {name: value for name, value in request.plan.training.to_json().items() if value is not None},
        "resumed_from": begun,
        "loss": last.get("loss"),
        "step_seconds": follower.step_seconds,
        "peak": follower.peaks or None,
        "samples": follower.samples,
        "notes": notes,
    }
    card = card_lookup.parse_gpus(request.plan.machine.gpu)[1]
    budget = estimate.budget_bytes if estimate else card.allocatable_bytes
    show(answer, as_json, lambda console: _render_finished(console, answer, budget))
    return DONE


def show_stopped(ended: launch.Outcome, output: Path, steps: int, notes: Sequence[str], as_json: bool) -> int:
    """Prints where a run of so many steps was stopped on request; returns the exit code."""
    newest, _ = checkpoints.newest(output, checkpoints.run_id(output))
    assert newest is not None, "it stops after a checkpoint"
    answer = {
        "output": str(output),
        "checkpoint": str(newest),
        "stopped_after": steps_of(newest),
        "steps": steps,
        "notes": notes,
    }

    def render(console: Console) -> None:
        console.print(ended.message, style="bold")
        console.print(f"checkpoint: {newest}", markup=False, soft_wrap=True)
        console.print("next: run the same command again: it resumes from there", style="bold")

    show(answer, as_json, render)
    return STOPPED


def raise_unless_ok(ended: launch.Outcome, output: Path) -> None:
    """Raises a VplanError with the reason a run, or its encoding, ended, and the checkpoint to resume from."""
    if ended.name == "ok":
        return
    if ended.name == "refused" and ended.exit_code == 1:  # before any training
        raise VplanError(ended.message, ended.fix, ended.exit_code)
    message, fix = ended.message, ended.fix
    if ended.name in RAN_OUT:
        message = f"{which_memory(ended)}: {message}"
        fix = "use less memory, e.g. with --gradient-checkpointing full, and run the command again"
    if ended.name == "nan":
        fix = "try a lower --learning-rate, and check the data of that step"
    raise VplanError(f"{message}; {_last(output)}", fix, ended.exit_code)


def which_memory(ended: launch.Outcome) -> str:
    """Which memory ran out, and at which shape."""
    shape = ended.shape
    size = f" at {shape['frames']}x{shape['height']}x{shape['width']}" if shape else ""
    return f"out of {'GPU' if ended.name == 'oom' else 'host'} memory{size}"


def _last(output: Path) -> str:
    """The checkpoint to resume from, in words."""
    newest, _ = checkpoints.newest(output, checkpoints.run_id(output))
    return f"the last good checkpoint is {newest}" if newest else "there is no checkpoint yet"


def resume_hint(output: Path) -> str:
    """What a stopped run leaves behind and how to resume it, in words."""
    return f"{_last(output)}; encoded data is kept, and the same command resumes from there"


def steps_of(checkpoint: Path | None) -> int | None:
    """The number of steps that a checkpoint has completed."""
    if checkpoint is None:
        return None
    return int(checkpoints.read_manifest(checkpoint)["step"])


def _render_finished(console: Console, answer: dict[str, Any], budget: int) -> None:
    loss, peak = answer["loss"], (answer["peak"] or {}).get("device_bytes")
    console.print(f"trained to step {answer['steps']}", style="bold green", end="")
    console.print("" if loss is None else f", loss {loss:.4f}")
    if peak is not None:
        console.print(used_bar(console, peak, budget))
    for name in ("weights", "checkpoint"):
        console.print(f"{name}: {answer[name]}", markup=False, soft_wrap=True)
    if answer["samples"]:
        console.print(f"samples: {len(answer['samples'])} in {Path(answer['samples'][0]).parent}", markup=False)
    if console.is_terminal:
        console.print()
        more = f"to continue, the same with --steps {2 * answer['steps']}"
        console.print(f"next: {more}", style="bold", markup=False, soft_wrap=True)
