"""Weights that a folder has in one variant alone (fp16), as many downloads of SD 1.5 and SDXL leave them."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import diffusers  # noqa: E402

from planner.errors import VplanError  # noqa: E402
from planner.launch import weight_files  # noqa: E402
from tests.trainers import tiny  # noqa: E402
from trainers.data import parts  # noqa: E402

VAE = {**tiny.VAES["AutoencoderKL"], "down_block_types": ["DownEncoderBlock2D"] * 4}
VAE |= {"up_block_types": ["UpDecoderBlock2D"] * 4}
PARTS = {"vae": "AutoencoderKL", "text_encoder": "CLIPTextModel"}


@pytest.mark.parametrize("shard", ["10GB", "10KB"])
@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_is_there_in_one_variant_is_read(part: str, shard: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    kind = PARTS[part]
    model = diffusers.AutoencoderKL(**VAE) if part == "vae" else tiny.text_encoder(kind, 8)
    model.save_pretrained(tmp_path / part, variant="fp16", max_shard_size=shard)
    files = list(weight_files.part_files(tmp_path, part))
    assert len(files) == 1 or shard == "10KB"
    assert all(".fp16" in path.name for path in files) and parts.check(tmp_path, part, kind)
    loaded = parts.load(tmp_path, part, kind, torch.float32).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("shard", ["10GB", "10KB"])
def test_a_denoiser_too(shard: str, tmp_path: Path) -> None:
    profile = tiny.profile("sd1.5")
    model = diffusers.UNet2DConditionModel.from_config(profile.config)
    model.save_pretrained(tmp_path, variant="fp16", max_shard_size=shard)
    names = weight_files.file_names(tmp_path)
    assert sorted(names) == sorted(path.name for path in tmp_path.glob("*.safetensors"))
    model.save_pretrained(tmp_path)
    assert weight_files.file_names(tmp_path) == ["diffusion_pytorch_model.safetensors"]


def test_of_two_variants_none_is_chosen(tmp_path: Path) -> None:
    for variant in ("fp16", "bf16"):
        tiny.text_encoder("CLIPTextModel", 8).save_pretrained(tmp_path / "text_encoder", variant=variant)
    with pytest.raises(VplanError, match="has no weights"):
        list(weight_files.part_files(tmp_path, "text_encoder"))
