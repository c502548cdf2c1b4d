"""Whose config file it is: by keys that only its trainer has, and refused by name where that trainer is not read."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner import dialects
from planner.dialects.base.script import from_file
from planner.errors import VplanError

FLYMYAI = """pretrained_model_name_or_path: Qwen/Qwen-Image
data_config: {train_batch_size: 1, img_size: 1024, img_dir: ./set}
train_batch_size: 1
learning_rate: 1e-4
rank: 16
"""
SAT = """args: {checkpoint_activations: True, train_iters: 1000}
model: {type: x}
data: {target: data_video.SFTDataset}
optimizer: {type: sat.ops.FusedEmaAdam}
deepspeed: {zero_optimization: {stage: 2}}
"""
MUSUBI = 'dit = "x.safetensors"\nnetwork_module = "networks.lora_wan"\nnetwork_dim = 32\n'


@pytest.mark.parametrize(
    ("name", "text", "whose"),
    [
        ("train.yaml", FLYMYAI, "FlyMyAI"),
        ("sft.yaml", SAT, "CogVideo's SAT"),
        ("wan.toml", MUSUBI, "musubi-tuner"),
    ],
)
def test_a_config_of_a_trainer_that_is_not_read_is_refused_by_its_name(
    name: str, text: str, whose: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(VplanError, match=f"{name} belongs to {whose}"):
        dialects.read_script(from_file(tmp_path / name))


SD3 = 'pretrained_model_name_or_path = "sd3.safetensors"\nclip_l = "a"\nclip_g = "b"\nt5xxl = "c"\n'


@pytest.mark.parametrize("text", [SD3, 'optimizer = {type = "adamw"}\nmodel = {type = "flux"}\n'])
def test_a_config_without_its_signs_is_nobodys(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(VplanError, match="does not belong to a supported trainer"):
        dialects.read_script(from_file(tmp_path / "a.toml"))


def test_a_config_of_flux_scripts_is_read(tmp_path: Path) -> None:
    text = 'pretrained_model_name_or_path = "flux1-dev.safetensors"\nae = "ae.safetensors"\nt5xxl = "t"\n'
    (tmp_path / "a.toml").write_text(f'{text}network_module = "networks.lora_flux"\n')
    dialect, given = dialects.read_script(from_file(tmp_path / "a.toml"))
    assert (dialect.name, given.settings["script"]) == ("sd-scripts", "flux_train_network.py")
