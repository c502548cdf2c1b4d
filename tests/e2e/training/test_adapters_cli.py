"""DoRA and LoKr through the command line: recorded, planned, trained, taken up again, and loaded by diffusers."""

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
from torch import Tensor, nn  # noqa: E402

import vplan  # noqa: E402
from planner.launch.checkpoints import COMFYUI_LORA, DIFFUSERS_LORA  # noqa: E402
from planner.spec.plan import Plan, read_plan  # noqa: E402
from tests.trainers import runs  # noqa: E402
from trainers.train import TrainingRun  # noqa: E402

pytestmark = pytest.mark.usefixtures("preloaded_python")

SHAPE = ("--frames", "5", "--height", "32", "--width", "48")
METHODS = {"dora": ("dora", "dora rank 16"), "lokr": ("lokr16", "lokr factor 16")}
"""Adapter -> what its recordings are called, and what an answer calls it."""
STEPS = 6


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[runs.Place]:
    root = tmp_path_factory.mktemp("adapters")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VPLAN_HOME", str(root / "home"))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield runs.Place(root, "wide")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(vplan.command(*words), capture_output=True, text=True, check=False, timeout=600)


def plan_of(place: runs.Place, adapter: str) -> Plan:
    """A plan that was refused for want of a recording, and given once the command of the refusal had run."""
    file, (method, words) = place.root / f"{adapter}.toml", METHODS[adapter]
    asked = ("estimate", place.model, "--adapter", adapter, "--gpu", "24GB", "-o", str(file), *SHAPE)
    refused = run(*asked)
    assert refused.returncode == 1 and f"no tape step-{method}-half-fp32-autocast-none-one" in refused.stderr
    (fix,) = (line for line in refused.stderr.splitlines() if line.startswith("fix: "))
    recorded = run(*shlex.split(fix.partition(": vplan ")[2]))
    assert recorded.returncode == 0, recorded.stderr
    given = run(*asked)
    assert given.returncode == 0 and words in given.stdout, given.stderr
    made = read_plan(file)
    assert made.job.adapter == adapter and made.estimate is not None and made.estimate.basis == "recorded"
    return made


@pytest.mark.parametrize("adapter", METHODS)
def test_what_it_trained_is_what_diffusers_loads(place: runs.Place, tmp_path: Path, adapter: str) -> None:
    plan, output = plan_of(place, adapter), tmp_path / "run"
    said = ["--data", str(place.root / "data"), "--output", str(output), "--device", "cpu", "--learning-rate", "0.01"]
    for steps in (STEPS // 2, STEPS):
        done = run("train", str(place.root / f"{adapter}.toml"), *said, "--steps", str(steps), "--json")
        assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["resumed_from"] == STEPS // 2

    in_memory = TrainingRun(place.request(tmp_path / "whole", plan, steps=STEPS), runs.ReportInMemory())
    inputs, _ = in_memory.family.inputs_and_target(next(iter(in_memory.loader.batches(0))))
    assert in_memory.train() and runs.losses(output) == runs.losses(tmp_path / "whole")
    trained = in_memory.engine.plain.eval().float()

    folder = place.root / "model" / "transformer"
    plain = diffusers.WanTransformer3DModel.from_pretrained(folder, torch_dtype=torch.bfloat16).float()
    inputs = {name: value.float() if value.is_floating_point() else value for name, value in inputs.items()}
    before = plain(**inputs, return_dict=False)[0]
    file = output / "final" / DIFFUSERS_LORA
    CHECKS[adapter](load_file(file), file.with_name(COMFYUI_LORA), plain)
    plain.load_lora_adapter(file.parent, weight_name=file.name, prefix="transformer")
    with torch.no_grad():
        loaded, wanted = (model(**inputs, return_dict=False)[0] for model in (plain, trained))
    torch.testing.assert_close(loaded, wanted)
    assert not torch.allclose(before, wanted, atol=1e-3)


def check_dora(saved: dict[str, Tensor], comfyui: Path, plain: nn.Module) -> None:
    """Magnitudes by diffusers' name, each trained away from where it began; and no file for ComfyUI."""
    magnitudes = {name: tensor for name, tensor in saved.items() if name.endswith(".lora_magnitude_vector")}
    assert len(magnitudes) * 3 == len(saved) and not comfyui.exists()
    for name, magnitude in magnitudes.items():
        weight = plain.get_parameter(name.removeprefix("transformer.").replace("lora_magnitude_vector", "weight"))
        lengths = torch.linalg.vector_norm(weight.float(), dim=1)
        assert not torch.equal(magnitude, lengths), name
        assert torch.allclose(magnitude, lengths, atol=0.1 * STEPS), name


def check_lokr(saved: dict[str, Tensor], comfyui: Path, plain: nn.Module) -> None:
    """Two whole matrices a layer, whose Kronecker product is the weight's change, and the same by ComfyUI's names."""
    first = {name: tensor for name, tensor in saved.items() if name.endswith(".lokr_w1")}
    assert len(first) * 2 == len(saved) and all(tensor.any() for tensor in first.values())
    for name, left in first.items():
        weight = plain.get_parameter(name.removeprefix("transformer.").replace("lokr_w1", "weight"))
        assert left.shape == (16, 16)
        assert torch.kron(left, saved[name.replace("lokr_w1", "lokr_w2")]).shape == weight.shape
    there = load_file(comfyui)
    assert len(there) == len(saved)
    own = saved["transformer.blocks.0.attn1.to_q.lokr_w2"]
    assert torch.equal(there["lora_unet_blocks_0_self_attn_q.lokr_w2"], own)


CHECKS = {"dora": check_dora, "lokr": check_lokr}
