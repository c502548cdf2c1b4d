"""Hollow files where a command looks for weights: as the libraries want them, and gone afterwards."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from planner.catalog import lookup
from planner.errors import VplanError
from planner.rehearsal.hollow.hollow_files import hollow_files
from planner.rehearsal.hollow.hollow_request import parse_request

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
safetensors = pytest.importorskip("safetensors")

pytestmark = pytest.mark.usefixtures("preloaded_python")

TINY = {"num_layers": 1, "num_single_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16}
TINY |= {"in_channels": 4, "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": [4, 4, 8]}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    return tmp_path


def files(*places: Path) -> list[Path]:
    return sorted(path for place in places for path in place.rglob("*") if path.is_file())


def on_disk(*places: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in files(*places))


def test_a_pipeline_in_a_cache(here: Path) -> None:
    """The shapes of the whole FLUX.1 dev, 34 GB, are those of its classes."""
    requests = [parse_request("black-forest-labs/FLUX.1-dev")]
    with hollow_files(requests, sys.executable, here / "run", os.environ) as variables:
        assert variables["HF_HUB_CACHE"] == str(here / "run" / "hub")
        assert variables["HF_HUB_OFFLINE"] == "1"
        (snapshot,) = (here / "run/hub/models--black-forest-labs--FLUX.1-dev/snapshots").iterdir()
        assert sum(path.stat().st_size for path in files(snapshot)) > 30 * 10**9
        assert on_disk(snapshot) < 20 * 2**20
        index = json.loads((snapshot / "model_index.json").read_text())
        assert index["transformer"] == ["diffusers", "FluxTransformer2DModel"]
        config = json.loads((snapshot / "transformer/config.json").read_text())
        with torch.device("meta"):
            model = diffusers.FluxTransformer2DModel.from_config(config)
        wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        path = snapshot / "transformer/diffusion_pytorch_model.safetensors"
        with safetensors.safe_open(str(path), framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        assert shapes == wanted


def test_a_folder_of_configs_is_filled_and_emptied(here: Path) -> None:
    folder = here / "flux" / "transformer"
    folder.mkdir(parents=True)
    config = {"_class_name": "FluxTransformer2DModel", **TINY}
    (folder / "config.json").write_text(json.dumps(config))
    (here / "flux" / "model_index.json").write_text("{}")
    with hollow_files([parse_request("flux")], sys.executable, here / "run", os.environ):
        model = diffusers.FluxTransformer2DModel.from_pretrained(str(folder), torch_dtype=torch.bfloat16)
        assert all(parameter.count_nonzero() == 0 for parameter in model.parameters())
        (here / "flux" / "lora.safetensors").write_bytes(b"trained")
    assert [path.name for path in files(here / "flux")] == ["lora.safetensors", "model_index.json", "config.json"]
    assert json.loads((folder / "config.json").read_text()) == config


def test_shards_as_an_index_names_them(here: Path) -> None:
    config = {"_class_name": "FluxTransformer2DModel", **TINY}
    with torch.device("meta"):
        names = list(diffusers.FluxTransformer2DModel(**TINY).state_dict())
    half = {name: f"diffusion_pytorch_model-{1 + (number > 9)}.safetensors" for number, name in enumerate(names)}
    folder = here / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": half}))
    with hollow_files([parse_request("model")], sys.executable, here / "run", os.environ):
        assert len(files(folder)) == 4
        diffusers.FluxTransformer2DModel.from_pretrained(str(folder))
    index.write_text(json.dumps({"metadata": {}, "weight_map": {**half, "another.weight": "x.safetensors"}}))
    with (
        pytest.raises(VplanError, match="differ in 1 tensors"),
        hollow_files([parse_request("model")], sys.executable, here / "run", os.environ),
    ):
        pass
    assert len(files(folder)) == 2


def test_single_files_of_both_kinds(here: Path) -> None:
    requests = [parse_request("deep/in/Wan2.1_VAE.pth"), parse_request("deep/vae_bf16.safetensors=wan2.1-vae")]
    with hollow_files(requests, sys.executable, here / "run", os.environ):
        assert on_disk(here / "deep") < 2**20
        state = torch.load("deep/in/Wan2.1_VAE.pth", weights_only=True, mmap=True)
        assert state["encoder.conv1.weight"].shape == (96, 3, 3, 3, 3)
        assert state["encoder.conv1.weight"].dtype == torch.float32
        with safetensors.safe_open("deep/vae_bf16.safetensors", framework="pt") as file:
            assert sorted(file.keys()) == sorted(state)
            assert file.get_tensor("conv1.bias").dtype == torch.bfloat16
    assert not (here / "deep").exists()


def test_files_go_when_the_run_fails(here: Path) -> None:
    def run() -> None:
        with hollow_files([parse_request("deep/vae.pth=wan2.1-vae")], sys.executable, here / "run", os.environ):
            assert (here / "deep/vae.pth").exists()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert not (here / "deep").exists()


def test_a_class_that_no_library_has(here: Path) -> None:
    (here / "model").mkdir()
    (here / "model" / "config.json").write_text('{"_class_name": "NoSuchTransformer"}')
    with (
        pytest.raises(VplanError, match="NoSuchTransformer"),
        hollow_files([parse_request("model")], sys.executable, here / "run", os.environ),
    ):
        pass
    assert len(files(here / "model")) == 1


def test_a_folder_with_weights_is_left_alone(here: Path) -> None:
    (here / "model").mkdir()
    (here / "model" / "config.json").write_text('{"_class_name": "FluxTransformer2DModel"}')
    (here / "model" / "diffusion_pytorch_model.safetensors").write_bytes(b"weights")
    with (
        pytest.raises(VplanError, match="no weights are missing"),
        hollow_files([parse_request("model")], sys.executable, here / "run", os.environ),
    ):
        pass
    assert (here / "model" / "diffusion_pytorch_model.safetensors").read_bytes() == b"weights"


def test_a_repository_comes_with_its_config(here: Path) -> None:
    with hollow_files([parse_request("models/Wan=Wan-AI/Wan2.1-T2V-1.3B")], sys.executable, here / "run", os.environ):
        config = json.loads((here / "models/Wan/config.json").read_text())
    profile = lookup.model("wan2.1-t2v-1.3b").config
    assert config["dim"] == profile["num_attention_heads"] * profile["attention_head_dim"]
    assert config["num_layers"] == profile["num_layers"]
    assert config["ffn_dim"] == profile["ffn_dim"]
    assert not (here / "models/Wan/config.json").exists()
