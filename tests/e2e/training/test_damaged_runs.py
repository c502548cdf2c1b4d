"""`vplan train` on runs that were damaged or taken up from an earlier checkpoint: what can be made again is made again,
and what a run goes on from is what it was told."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

import vplan  # noqa: E402
from planner.launch import checkpoints  # noqa: E402
from planner.spec.plan import write_plan  # noqa: E402
from tests.trainers import runs  # noqa: E402

pytestmark = pytest.mark.usefixtures("preloaded_python")

PATIENCE = 900
"""Seconds for a process on a busy machine; nobody measures them."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("damaged")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VPLAN_HOME", str(root / "home"))
        patch.setenv("OMP_NUM_THREADS", "1")
        made = runs.Place(root, "wan")
        write_plan(made.plan(), root / "plan.toml")
        assert runs.train(made.request(root / "whole", steps=6, keep_checkpoints=3))["outcome"] == "ok"
        yield made


@pytest.fixture
def output(place: runs.Place, tmp_path: Path) -> Path:
    """A run with the checkpoints 2, 4 and 6."""
    shutil.copytree(place.root / "whole", tmp_path / "run")
    return tmp_path / "run"


def train(place: runs.Place, output: Path, *more: str) -> subprocess.CompletedProcess[str]:
    words = ["--data", str(place.root / "data"), "--output", str(output), "--device", "cpu", "--checkpoint-every", "2"]
    command = vplan.command("train", str(place.root / "plan.toml"), *words, *more, "--json")
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)


def lora(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / checkpoints.DIFFUSERS_LORA)


def same(one: Path, other: Path) -> bool:
    left, right = lora(one), lora(other)
    return all(torch.equal(tensor, right[name]) for name, tensor in left.items())


def test_a_branch_is_what_the_run_goes_on_from(place: runs.Place, output: Path) -> None:
    """From 2 to 4 at another rate, keeping one state; a plain call goes on from there, not from the old 6."""
    folder, whole = output / "checkpoints", place.root / "whole" / "checkpoints"
    branched = ("--learning-rate", "0.5", "--keep-checkpoints", "1")
    done = train(place, output, "--resume", str(folder / "step-00000002"), "--steps", "4", *branched)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert Path(answer["checkpoint"]) == folder / "step-00000004" and Path(answer["checkpoint"]).is_dir()
    run = checkpoints.run_id(output)
    checkpoints.check(folder / "step-00000004", run)
    assert checkpoints.newest(output, run)[0] == folder / "step-00000004"
    assert not same(folder / "step-00000004", whole / "step-00000004")
    aside = output / "checkpoints.before-0"
    assert str(aside) in done.stderr
    for name in ("step-00000004", "step-00000006"):  # whole, and what they were
        checkpoints.check(aside / name, run)
        assert same(aside / name, whole / name)
    on = train(place, output, "--steps", "6", *branched)
    assert json.loads(on.stdout)["resumed_from"] == 4, on.stderr
    assert not same(folder / "step-00000006", whole / "step-00000006")
    # And back: what was set aside is taken up by its folder, and now the other branch is set aside.
    back = train(place, output, "--resume", str(aside / "step-00000004"), "--steps", "6", "--learning-rate", "0.001")
    assert back.returncode == 0, back.stderr
    assert same(folder / "step-00000004", whole / "step-00000004")
    assert sorted(path.name for path in (output / "checkpoints.before-1").iterdir())[-1] == "step-00000006"
    assert (aside / "step-00000004" / "state").is_dir()


DAMAGES = ("torn metrics", "null metrics", "NUL metrics", "no steps in metrics", "empty run.json", "no step")


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_goes_on_whatever_became_of_its_notes(damage: str, place: runs.Place, output: Path) -> None:
    metrics, run = output / "metrics.jsonl", output / "run.json"
    before = checkpoints.run_id(output)
    lines = metrics.read_bytes().splitlines(keepends=True)
    damaged = {
        "torn metrics": lines[0][:20] + b"\n",
        "null metrics": b"null\n[]\n7\n",
        "NUL metrics": b"\0" * 4096 + b"\n",
        "no steps in metrics": b'{"loss": 1}\n{"step": "four", "loss": 1}\n',
    }.get(damage)
    if damaged:
        metrics.write_bytes(b"".join((lines[0], damaged, *lines[2:])))
    elif damage == "empty run.json":
        run.write_bytes(b"")
    else:
        path = output / "checkpoints" / "step-00000006" / "manifest.json"
        path.write_text(json.dumps({key: said for key, said in json.loads(path.read_text()).items() if key != "step"}))
    done = train(place, output, "--steps", "8")
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert answer["resumed_from"] == (4 if damage == "no step" else 6)
    assert ("skipped" in done.stderr) == (damage == "no step")
    assert checkpoints.run_id(output) == before
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == sorted({*steps}) and steps[-1] == 8


def test_a_plan_of_another_run_is_refused_before_anything_is_done(place: runs.Place, output: Path) -> None:
    """All that the checkpoint was written otherwise with, in one message, which no setting that follows from it comes
    before; and the plan that the run is kept by stays."""
    write_plan(place.plan(), output / "plan.toml")
    kept = (output / "plan.toml").read_bytes()
    refused = train(place, output, "--lora-rank", "8", "--adapter", "dora", "--steps", "8")
    error = json.loads(refused.stdout)["error"]
    assert refused.returncode == 1
    assert "written with adapter lora, but the plan has dora; with lora_rank 4, but the plan has 8" in error["message"]
    assert error["fix"] == "pass --adapter lora --lora-rank 4, or start over with --resume no"
    assert (output / "plan.toml").read_bytes() == kept and not (output / "prepare").exists()
    alpha = train(place, output, "--lora-alpha", "8", "--steps", "8")
    assert "was trained with lora_alpha 4" in json.loads(alpha.stdout)["error"]["message"]
    assert (output / "plan.toml").read_bytes() == kept
    full = train(place, output, "--method", "full", "--steps", "8")
    error = json.loads(full.stdout)["error"]
    assert "written with method lora, but the plan has full" in error["message"] and "None" not in error["message"]
    assert "--method lora --lora-rank 4" in error["fix"]
    done = train(place, output, "--steps", "8", "--lora-rank", "4")
    assert done.returncode == 0 and json.loads(done.stdout)["resumed_from"] == 6, done.stderr
