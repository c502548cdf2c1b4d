"""`vplan demo`: a tiny model and three clips, to try a whole training run without a GPU or a download."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from planner.commands._shared.verb import DONE, Verb, examples, json_option, show
from planner.errors import VplanError
from planner.launch import demo

if TYPE_CHECKING:
    from rich.console import Console

NEEDED = ("torch", "diffusers", "transformers", "av")

SHAPE = ("--frames", "9", "--resolution", "64x96")
"""Half the frames of a demo clip, at its full size."""


@click.command(cls=Verb, epilog=examples("vplan demo demo", "vplan demo demo --json"))
@click.argument("folder", metavar="DIR")
@json_option
def command(folder: str, as_json: bool) -> int:
    """Write a tiny model and three clips, to try training without a GPU.

    The model is a Wan2.1 pipeline in diffusers format with 0.2 MB of random weights. What it makes is noise; all
    else is as with a real one. The answer lists the commands that train it on a CPU, which takes a minute or two.
    Nothing is downloaded. Needs pip install 'vplan[train]'.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise VplanError(f"the demo needs {', '.join(missing)}: not installed", "pip install 'vplan[train]'")
    place = Path(folder).expanduser()
    demo.write(place.absolute())
    answer = {
        "model": str(place / demo.MODEL),
        "clips": str(place / demo.CLIPS),
        "commands": [shlex.join(["vplan", *words]) for words in _next(place)],
    }

    def render(console: Console) -> None:
        console.print(f"wrote {answer['model']} (a tiny Wan2.1, random weights) and {answer['clips']}", markup=False)
        console.print("to train it on the CPU:", style="bold")
        for line in answer["commands"]:
            console.print(f"  {line}", markup=False, soft_wrap=True)

    show(answer, as_json, render)
    return DONE


def _next(place: Path) -> list[list[str]]:
    """The commands that train it, in order: record, suggest, train."""
    plan = str(place / "plan.toml")
    run = ["--data", str(place / demo.CLIPS), "--output", str(place / "run")]
    return [
        ["record", str(place / demo.MODEL), "--name", "demo"],
        ["suggest", "demo", "--gpu", "24GB", *SHAPE, "-o", plan],
        ["train", plan, *run, "--device", "cpu", "--steps", "60", "--learning-rate", "0.01"],
    ]
