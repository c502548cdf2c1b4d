"""The docs' pages of the five stories show what vplan says. `python tests/e2e/stories/test_story_pages.py` writes them
anew."""

from __future__ import annotations

import shlex
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from click.testing import CliRunner  # noqa: E402

from planner.commands import cli  # noqa: E402
from tests.e2e.stories import stories  # noqa: E402

FOLDER = ROOT / "docs" / "stories"
COLUMNS = "110"


class Run(NamedTuple):
    """One command of a page: what is said in front of it, vplan's options, and what is checked."""

    text: str
    options: str
    given: str
    file: str = ""
    """the name of the file that the command lies in; empty when it is typed"""


class Page(NamedTuple):
    title: str
    text: str
    runs: tuple[Run, ...]


PAGES = {
    "diffsynth": Page(
        "DiffSynth-Studio: a LoRA of Wan 2.1 I2V 14B on one 80 GB card",
        "Reported as modelscope/DiffSynth-Studio#455: out of memory on 80 GB. Advice that still goes round names "
        "`--training_strategy deepspeed_stage_3`, a flag of a script that is gone.",
        (
            Run("The repository's own command, 81 frames, fits:", "--gpu h100-80gb", stories.DIFFSYNTH),
            Run("129 frames do not:", "--gpu h100-80gb", f"{stories.DIFFSYNTH} --num_frames 129"),
            Run("The command of early 2025:", "--gpu h100-80gb --frames 81", stories.DIFFSYNTH_OLD),
        ),
    ),
    "easyanimate": Page(
        "EasyAnimate 5.1: full fine-tuning of the 7B model on four 80 GB cards",
        "Reported as aigc-apps/EasyAnimate#200. `--low_vram`, `--vae_mini_batch=1`, bf16 and checkpointing were on "
        "already.",
        (Run("The script as reported:", "--gpu h100-80gb", stories.EASYANIMATE, "train.sh"),),
    ),
    "latentsync": Page(
        "LatentSync: stage 1 on a 24 GB card",
        "Reported as bytedance/LatentSync#278: training runs, and dies when a checkpoint is saved. Its authors say "
        "that it takes 23 GB.",
        (Run("Stage 1 at 256 pixels:", "--gpu rtx4090", stories.LATENTSYNC),),
    ),
    "sd-scripts": Page(
        "sd-scripts: full fine-tuning of FLUX.1-dev on one 80 GB card",
        "Reported as kohya-ss/sd-scripts#1517.",
        (
            Run("As reported, with Prodigy and nothing cached:", "--gpu h100-80gb", stories.FLUX),
            Run("Repaired:", "--gpu h100-80gb", stories.REPAIRED + stories.BOTH_CACHES),
        ),
    ),
    "diffusers": Page(
        "diffusers: Wan 2.1 I2V 14B with group offload on a 24 GB card",
        "Reported as huggingface/diffusers#11041. There is no command line: people paste Python, which is read as a "
        "syntax tree and never run.",
        (
            Run("By leaf, with a stream:", "--gpu 24GB", stories.PIPELINE, "infer.py"),
            Run("On a computer with 32 GiB of RAM:", "--gpu 24GB --host-ram 32GiB", stories.PIPELINE, "infer.py"),
        ),
    ),
}


def page(name: str) -> str:
    """The page as vplan answers now."""
    found = PAGES[name]
    parts = [f"# {found.title}", found.text]
    shown: set[str] = set()
    for run in found.runs:
        parts.append(run.text)
        if run.file:
            if run.file not in shown:
                language = "python" if run.file.endswith(".py") else "sh"
                parts.append(f"```{language}\n{run.given}```")
            shown.add(run.file)
            parts.append(f"```console\n$ vplan check {run.file} {run.options}\n{answer(run)}```")
        else:
            parts.append(f"```console\n$ vplan check {run.options} -- {wrapped(run.given)}\n{answer(run)}```")
    return "\n\n".join(parts) + "\n"


def wrapped(command: str) -> str:
    """A long command, a few flags to a line."""
    return command.replace(" --", " \\\n    --")


def answer(run: Run) -> str:
    """What vplan prints."""
    with tempfile.TemporaryDirectory() as folder:
        what = ["--", *shlex.split(run.given)]
        if run.file:
            path = Path(folder) / run.file
            path.write_text(run.given, encoding="utf-8")
            what = [str(path)]
        words = ["check", *run.options.split(), *what]
        done = CliRunner().invoke(cli, words, env={"COLUMNS": COLUMNS})
    return "\n".join(line.rstrip() for line in done.output.splitlines()) + "\n"


@pytest.mark.parametrize("name", PAGES)
def test_the_page_shows_what_vplan_says(name: str) -> None:
    assert (FOLDER / f"{name}.md").read_text(encoding="utf-8") == page(name)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in PAGES:
        (FOLDER / f"{name}.md").write_text(page(name), encoding="utf-8")
