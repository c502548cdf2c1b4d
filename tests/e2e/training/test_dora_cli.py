"""DoRA through the command line: recorded, planned, trained, taken up again, and loaded by diffusers."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import diffusers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import vplan  # noqa: E402
from planner.launch.checkpoints import COMFYUI_LORA, DIFFUSERS_LORA  # noqa: E402
from planner.spec.plan import Plan, read_plan  # noqa: E402
from tests.trainers import runs  # noqa: E402
from trainers.step.weights import MAGNITUDE  # noqa: E402
from trainers.train import TrainingRun  # noqa: E402

SHAPE = ("--frames", "5", "--height", "32", "--width", "48", "--lora-rank", "4")
STEPS = 6


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[runs.Place]:
    root = tmp_path_factory.mktemp("dora")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VPLAN_HOME", str(root / "home"))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield runs.Place(root, "wide")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(vplan.command(*words), capture_output=True, text=True, check=False, timeout=600)


@pytest.fixture(scope="module")
def plan(place: runs.Place) -> Plan:
    """A plan that was refused for want of a recording, and given once the command of the refusal had run."""
    file = place.root / "plan.toml"
    asked = ("estimate", place.model, "--adapter", "dora", "--gpu", "24GB", "-o", str(file), *SHAPE)
    refused = run(*asked)
    assert refused.returncode == 1 and "no tape step-dora-half-fp32-autocast-none-one" in refused.stderr
    (fix,) = (line.partition("fix: ")[2] for line in refused.stderr.splitlines() if line.startswith("fix: "))
    recorded = run(*shlex.split(fix.partition(": vplan ")[2]))
    assert recorded.returncode == 0, recorded.stderr
    given = run(*asked)
    assert given.returncode == 0 and "dora rank 4" in given.stdout, given.stderr
    made = read_plan(file)
    assert made.job.adapter == "dora" and made.estimate is not None and made.estimate.basis == "recorded"
    return made


def test_what_it_trained_is_what_diffusers_loads(place: runs.Place, plan: Plan, tmp_path: Path) -> None:
    output = tmp_path / "run"
    said = ["--data", str(place.root / "data"), "--output", str(output), "--device", "cpu", "--learning-rate", "0.01"]
    for steps in (STEPS // 2, STEPS):
        done = run("train", str(place.root / "plan.toml"), *said, "--steps", str(steps), "--json")
        assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["resumed_from"] == STEPS // 2

    in_memory = TrainingRun(place.request(tmp_path / "whole", plan, steps=STEPS), runs.ReportInMemory())
    inputs, _ = in_memory.kind.inputs_and_target(next(iter(in_memory.loader.batches(0))))
    assert in_memory.train()
    assert runs.losses(output) == runs.losses(tmp_path / "whole")
    trained = in_memory.engine.plain.eval().float()

    file = output / "final" / DIFFUSERS_LORA
    assert not (output / "final" / COMFYUI_LORA).exists()
    saved = load_file(file)
    magnitudes = {name: tensor for name, tensor in saved.items() if name.endswith(".lora_magnitude_vector")}
    assert len(magnitudes) * 3 == len(saved)

    folder = place.root / "model" / "transformer"
    plain = diffusers.WanTransformer3DModel.from_pretrained(folder, torch_dtype=torch.bfloat16).float()
    for name, magnitude in magnitudes.items():
        weight = plain.get_parameter(name.removeprefix("transformer.").replace("lora_magnitude_vector", "weight"))
        assert not torch.equal(magnitude, torch.linalg.vector_norm(weight.float(), dim=1)), name
    inputs = {name: value.float() if value.is_floating_point() else value for name, value in inputs.items()}
    before = plain(**inputs, return_dict=False)[0]
    plain.load_lora_adapter(file.parent, weight_name=file.name, prefix="transformer")
    assert sum(MAGNITUDE in name for name, _ in plain.named_parameters()) == len(magnitudes)
    with torch.no_grad():
        loaded, wanted = (model(**inputs, return_dict=False)[0] for model in (plain, trained))
    torch.testing.assert_close(loaded, wanted)
    assert not torch.allclose(before, wanted, atol=1e-3)
