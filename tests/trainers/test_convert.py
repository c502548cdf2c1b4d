"""A transformer in one file, with the names of Wan's own code, trains as the folder that diffusers wrote does."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import diffusers  # noqa: E402
from diffusers import WanTransformer3DModel  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import vplan  # noqa: E402
from planner.catalog import lookup  # noqa: E402
from planner.errors import VplanError  # noqa: E402
from planner.launch import single_file  # noqa: E402
from planner.spec.plan import write_plan  # noqa: E402
from tests.trainers import runs, tiny  # noqa: E402
from trainers import convert  # noqa: E402

pytestmark = pytest.mark.usefixtures("preloaded_python")

ORIGINAL = (
    ("condition_embedder.time_embedder.linear_1.", "time_embedding.0."),
    ("condition_embedder.time_embedder.linear_2.", "time_embedding.2."),
    ("condition_embedder.text_embedder.linear_1.", "text_embedding.0."),
    ("condition_embedder.text_embedder.linear_2.", "text_embedding.2."),
    ("condition_embedder.time_proj.", "time_projection.1."),
    (".attn1.", ".self_attn."),
    (".attn2.", ".cross_attn."),
    (".to_q.", ".q."),
    (".to_k.", ".k."),
    (".to_v.", ".v."),
    (".to_out.0.", ".o."),
    (".norm2.", ".norm3."),
    (".ffn.net.0.proj.", ".ffn.0."),
    (".ffn.net.2.", ".ffn.2."),
    (".scale_shift_table", ".modulation"),
    ("scale_shift_table", "head.modulation"),
    ("proj_out.", "head.head."),
)
"""Names in diffusers and in Wan-Video/Wan2.1 wan/modules/model.py."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("single")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VPLAN_HOME", str(root / "home"))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield runs.Place(root, "wan")


@pytest.fixture(scope="module")
def file(place: runs.Place) -> Path:
    weights = load_file(place.root / "model" / "transformer" / "diffusion_pytorch_model.safetensors")
    names = {}
    for name in weights:
        names[name] = f".{name}"
        for ours, theirs in ORIGINAL:
            names[name] = names[name].replace(ours, theirs)
        names[name] = "model.diffusion_model." + names[name].removeprefix(".").replace("..", ".")
    # The table of the output stands alone, those of blocks behind their block.
    names["scale_shift_table"] = "model.diffusion_model.head.modulation"
    save_file({names[name]: tensor for name, tensor in weights.items()}, place.root / "wan.safetensors")
    return place.root / "wan.safetensors"


def test_one_file_is_the_model_of_the_folder(place: runs.Place, file: Path, tmp_path: Path) -> None:
    convert.convert(file, lookup.model(place.model), tmp_path / "made" / "model")
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["model"]
    made = WanTransformer3DModel.from_pretrained(tmp_path / "made" / "model").state_dict()
    wanted = WanTransformer3DModel.from_pretrained(place.root / "model" / "transformer").state_dict()
    assert made.keys() == wanted.keys()
    assert all(torch.equal(made[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("name", ["qwen-image", "hidream-i1"])
def test_a_file_in_diffusers_own_names_may_have_a_prefix(name: str, prefix: str, tmp_path: Path) -> None:
    """Qwen-Image for ComfyUI is published with it too, and diffusers finds none of its tensors then."""
    profile = tiny.profile(name)
    kind = getattr(diffusers, profile.diffusers_class)
    wanted = kind.from_config(profile.config).state_dict()
    save_file({prefix + key: tensor.contiguous() for key, tensor in wanted.items()}, tmp_path / "one.safetensors")
    convert.convert(tmp_path / "one.safetensors", profile, tmp_path / "model")
    made = kind.from_pretrained(tmp_path / "model").state_dict()
    assert made.keys() == wanted.keys() and all(torch.equal(made[key], tensor) for key, tensor in wanted.items())


@pytest.mark.parametrize("fault", ["other model", "fp8", "damaged", "lacks one"])
def test_files_that_are_refused_leave_nothing(place: runs.Place, file: Path, tmp_path: Path, fault: str) -> None:
    weights, spoilt = load_file(file), tmp_path / "spoilt.safetensors"
    first = next(iter(weights))
    if fault == "damaged":
        spoilt.write_bytes(file.read_bytes()[:-100])
    elif fault == "fp8":
        save_file({name: tensor.to(torch.float8_e4m3fn) for name, tensor in weights.items()}, spoilt)
    elif fault == "other model":
        save_file({f"x.{name}": tensor[:1].contiguous() for name, tensor in weights.items()}, spoilt)
    else:
        save_file({name: tensor for name, tensor in weights.items() if name != first}, spoilt)
    with pytest.raises(VplanError) as caught:
        convert.convert(spoilt, lookup.model(place.model), tmp_path / "made" / "model")
    assert "\n" not in caught.value.message and "spoilt.safetensors" in caught.value.message
    assert not list((tmp_path / "made").glob("*")) and not list((tmp_path / "made").glob(".*"))


def test_names_of_files_are_checked_first(tmp_path: Path) -> None:
    (tmp_path / "model.ckpt").write_bytes(b"cos\nsystem\n")
    with pytest.raises(VplanError, match=r"no \.safetensors file"):
        single_file.check(str(tmp_path / "model.ckpt"))
    with pytest.raises(VplanError, match="there is no file"):
        single_file.check(str(tmp_path / "none.safetensors"))


def test_one_computer_of_several_converts_a_file(tmp_path: Path) -> None:
    """Where it lies elsewhere, or has another date, each of the others would convert it too, into the same output."""
    (tmp_path / "a.safetensors").write_bytes(b"")
    made = single_file.folder_of(tmp_path / "a.safetensors", "flux.1-dev", tmp_path / "first")
    assert single_file.folder_here(str(made), Path("/mnt/run")) == f"/mnt/run/transformer/{made.name}"
    assert single_file.folder_here(None, Path("/mnt/run")) is None


def test_training_from_one_file_is_training_from_the_folder(place: runs.Place, file: Path, tmp_path: Path) -> None:
    write_plan(place.plan(), tmp_path / "plan.toml")
    losses = []
    for name, more in (("folder", []), ("file", ["--transformer", str(file)]), ("file", ["--transformer", str(file)])):
        steps = "5" if losses and name == "file" and len(losses) == 2 else "3"  # the last one resumes
        words = ["--data", str(place.root / "data"), "--output", str(tmp_path / name), "--device", "cpu"]
        words += ["--weights", str(place.root / "model"), "--steps", steps, "--json", *more]
        command = vplan.command("train", str(tmp_path / "plan.toml"), *words)
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["steps"] == int(steps)
        losses.append(runs.losses(tmp_path / name))
    assert losses[1] == losses[0] == losses[2][:3]
    assert len([path for path in (tmp_path / "file" / "transformer").iterdir() if path.is_dir()]) == 1
