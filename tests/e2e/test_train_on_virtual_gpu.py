"""`vplan train` on virtual cards: a kill and resume with peaks close to the estimate, and running out of memory."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("elftools")
pytest.importorskip("torch")

import vplan
from planner.launch import checkpoints
from planner.launch.supported import supported_plan
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Plan, read_plan, write_plan
from tests.cuda_wheel import CUDA_PYTHON, needs_cuda_wheel
from tests.tools import train_on_virtual_gpu as tool
from tests.trainers import runs

pytestmark = [needs_cuda_wheel, pytest.mark.usefixtures("preloaded_python")]


def test_fsdp_with_all_on_the_host_goes_on_where_it_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and states are in host RAM, so a card holds only one block's weights and its activations, also while
    states are restored from a checkpoint. (They once passed through the card and stayed until the end of the first
    step.)"""
    monkeypatch.setenv("VPLAN_HOME", str(tmp_path / "home"))
    place = tool.make_place(tmp_path / "place")
    course = tool.train(place, tool.CASES["full-fsdp-all-on-host"], tmp_path / "run")
    assert course.resumed >= tool.KILLED_BEHIND and course.losses == tool.STEPS
    assert course.rehearsed["allocated_bytes"] == pytest.approx(course.predicted["allocated_bytes"], rel=0.01)
    assert course.rehearsed["reserved_bytes"] == pytest.approx(course.predicted["reserved_bytes"], rel=0.05)


@pytest.mark.parametrize(("gpus", "sharding", "card"), [(1, "none", "1GiB"), (2, "ddp", "1.5GiB")])
def test_a_run_that_is_out_of_memory_goes_on_with_the_next_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, sharding: str, card: str
) -> None:
    """torch raises its own error on cards that hold a step with checkpointing but not without it; every rank gets it,
    and all continue with the next plan. Nothing is recorded for this model, so no estimate prevents the start. Two
    ranks need more of a card than one."""
    monkeypatch.setenv("VPLAN_HOME", str(tmp_path / "home"))
    place, output = runs.Place(tmp_path, "wide"), tmp_path / "run"
    bucket = runs.SHAPES["wide"][0]
    shape = {"frames": bucket.frames, "height": bucket.height, "width": bucket.width}
    job = Job.read({"model": place.model, **shape, "lora_rank": 4, "batch_size": 400})
    strategy = Strategy.read({**runs.PLAIN, "sharding": sharding})
    plan = supported_plan(Plan(job=job, strategy=strategy, machine=Machine(gpu="24GB", gpus=gpus)), trained=True)
    write_plan(plan, tmp_path / "plan.toml")
    typed = {"--data": place.root / "data", "--output": output, "--weights": place.root / "model", "--device": "cuda"}
    typed |= {"--steps": 4, "--checkpoint-every": 2}
    train = [
        *vplan.command("train", str(tmp_path / "plan.toml"))[1:],
        *(str(w) for pair in typed.items() for w in pair),
    ]
    cards = ["--gpu", card, "--gpus", str(gpus), "--steps", "0", "--json"]
    command = vplan.command("rehearse", *cards, "--", CUDA_PYTHON, "-P", *train)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=tool.PATIENCE_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert any("ran out of memory" in said and "went on" in said for said in json.loads(done.stdout)["assumptions"])
    before, after = (read_plan(output / name).strategy for name in ("plan.before-0.toml", "plan.toml"))
    assert before.gradient_checkpointing == "none" and after.gradient_checkpointing == "full"
    newest, faults = checkpoints.newest(output, checkpoints.run_id(output))
    assert newest is not None and checkpoints.step_of(newest) == 4 and not faults
    assert [line["step"] for line in runs.lines(output)] == [1, 2, 3, 4] and (output / "final").is_dir()
