"""From nothing to a LoRA file: README's commands for `vplan demo`, as they stand there, in an empty folder."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import subprocess
from pathlib import Path

import pytest

import vplan

pytest.importorskip("torch")
pytest.importorskip("av")

README = (Path(vplan.HOME) / "README.md").read_text(encoding="utf-8")
PATIENCE = 600
LIMIT_SECONDS = 180.0
"""Of processor time for all of it: what three minutes on a computer of one core are."""


def run(words: list[str], place: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "VPLAN_HOME": str(place / "home")}
    command = vplan.command(*words)
    done = subprocess.run(
        command, cwd=place, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert done.returncode == code, done.stderr
    return done


def test_the_demo_of_the_readme_trains_from_zero(tmp_path: Path) -> None:
    (block,) = (block for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) if "vplan demo" in block)
    first, *others = (shlex.split(line)[1:] for line in block.splitlines())
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    answer = json.loads(run([*first, "--json"], tmp_path).stdout)
    assert answer["commands"] == [shlex.join(["vplan", *words]) for words in others]
    for words in others:
        done = run(words, tmp_path)
        assert not (done.stderr + done.stdout).startswith("\n"), words  # no empty line in front of what it says
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < LIMIT_SECONDS
    lines = (tmp_path / "demo/run/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert len(losses) == 60 and sum(losses[-20:]) < sum(losses[:20])

    from diffusers import WanPipeline

    pipeline = WanPipeline.from_pretrained(tmp_path / "demo/model")
    pipeline.load_lora_weights(tmp_path / "demo/run/final")
    assert pipeline.get_active_adapters()
    # What was recorded first is enough for validation too.
    for method in ("lora", "full"):
        run(["estimate", "demo", "--gpu", "24GB", "--method", method, "--validation-mode", "on"], tmp_path)


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    done = run(["demo", "mine"], tmp_path, code=1)
    assert "mine' is not empty" in done.stderr
    assert "fix: name another, as in vplan demo mine-2" in done.stderr
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
