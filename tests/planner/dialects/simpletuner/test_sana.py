"""SANA in the words of the trainers that have it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner import dialects
from planner.catalog import lookup
from planner.catalog.shapes import grid, job_for
from planner.dialects.base.dialect import Translation, translate
from planner.dialects.base.script import from_file
from planner.errors import VplanError
from planner.layout.adapters import linear_layers
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.spec.configuration import Configuration
from planner.spec.job import Machine, Strategy

EXAMPLE = """accelerate launch train_dreambooth_lora_sana.py --instance_data_dir=dog --output_dir=out \\
  --pretrained_model_name_or_path=Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers --mixed_precision=bf16 \\
  --instance_prompt="a photo of sks dog" --resolution=1024 --train_batch_size=1 --use_8bit_adam"""
"""examples/dreambooth/README_sana.md"""

SIMPLETUNER = {"model_family": "sana", "model_type": "lora", "data_backend_config": "x.json", "mixed_precision": "bf16"}

ONETRAINER = {
    "base_model_name": "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers",
    "model_type": "SANA",
    "resolution": "1024",
    "text_encoder": {"train": False, "weight_dtype": "BFLOAT_16"},
    "training_method": "FINE_TUNE",
    "train_dtype": "BFLOAT_16",
}
"""training_presets/Sana/#sana 1.6b.json"""


def read(folder: Path, name: str, said: str | dict[str, Any]) -> Translation:
    (folder / name).write_text(said if isinstance(said, str) else json.dumps(said))
    dialect, given = dialects.read_script(from_file(folder / name))
    assert not given.unknown
    return translate(dialect, given)


def test_diffusers_script_keeps_its_text_encoder_unless_it_offloads_it(tmp_path: Path) -> None:
    found = read(tmp_path, "train.sh", EXAMPLE)
    assert (found.job["model"], found.job["height"], found.job["text_tokens"]) == ("sana-1.6b", 1024, None)
    strategy = found.strategy
    assert (strategy["vae_dtype"], strategy["vae"], strategy["text_encoder"]) == ("fp32", "resident", "resident")
    offloaded = read(tmp_path, "train.sh", f"{EXAMPLE} --offload --cache_latents").strategy
    assert (offloaded["vae"], offloaded["text_encoder"]) == ("cached", "cached")


def test_its_prompts_are_padded_to_what_the_script_is_told(tmp_path: Path) -> None:
    assert read(tmp_path, "train.sh", f"{EXAMPLE} --max_sequence_length=512").job["text_tokens"] == 512


@pytest.mark.parametrize(
    ("more", "model"),
    [
        ({}, "sana1.5-4.8b"),
        ({"model_flavour": "sana1.5-1.6b-1024"}, "sana1.5-1.6b"),
        ({"model_flavour": "sana1.0-1.6b-1024"}, "sana-1.6b"),
        ({"pretrained_model_name_or_path": "terminusresearch/sana-1.6b-1024px"}, "sana-1.6b"),
    ],
)
def test_simpletuner_s_flavours(more: dict[str, str], model: str, tmp_path: Path) -> None:
    found = read(tmp_path, "config.json", {**SIMPLETUNER, **more})
    assert found.job["model"] == model
    assert found.job["lora_targets"] == lookup.model(model).lora.wide


def test_simpletuner_has_no_2k_model_of_ours(tmp_path: Path) -> None:
    with pytest.raises(VplanError, match=r"sana sana1\.0-1\.6b-2048"):
        read(tmp_path, "config.json", {**SIMPLETUNER, "model_flavour": "sana1.0-1.6b-2048"})


def test_simpletuner_checkpoints_one_block_of_an_interval(tmp_path: Path) -> None:
    more = {"gradient_checkpointing": True, "gradient_checkpointing_interval": 4}
    assert read(tmp_path, "config.json", {**SIMPLETUNER, **more}).strategy["checkpointed_blocks"] == 15


def test_simpletuner_s_clips_of_sana_video_are_8_frames_longer_each(tmp_path: Path) -> None:
    """``adjust_video_frames`` in helpers/models/sanavideo/model.py: the VAE alone would join four."""
    video = {**SIMPLETUNER, "model_family": "sanavideo", "resolution": 512, "validation_num_video_frames": 53}
    found = read(tmp_path, "config.json", video)
    assert (found.job["model"], found.job["frames"], found.job["lora_targets"]) == ("sana-video-2b", 49, None)
    more = {"gradient_checkpointing": True, "gradient_checkpointing_interval": 4, "musubi_blocks_to_swap": 20}
    strategy = read(tmp_path, "config.json", {**video, **more}).strategy
    assert (strategy["checkpointed_blocks"], strategy["swap_blocks"]) == (5, 19)


def test_onetrainer_tells_the_sizes_by_name(tmp_path: Path) -> None:
    found = read(tmp_path, "preset.json", ONETRAINER)
    assert (found.job["model"], found.job["method"], found.strategy["vae_dtype"]) == ("sana-1.6b", "full", "fp32")
    larger = {**ONETRAINER, "base_model_name": "Efficient-Large-Model/SANA1.5_4.8B_1024px_diffusers"}
    assert read(tmp_path, "preset.json", larger).job["model"] == "sana1.5-4.8b"
    with pytest.raises(VplanError, match="SANA"):
        read(tmp_path, "preset.json", {**ONETRAINER, "base_model_name": "mine"})


def test_an_adapter_of_a_depthwise_convolution_reads_all_channels() -> None:
    """OneTrainer modules/module/LoRAModule.py ``create_layer``: ``lora_down`` has no groups."""
    profile = lookup.model("sana-1.6b")
    job = job_for(profile, {"height": 1024, "width": 1024})
    configuration = Configuration.of(job, Strategy(gradient_checkpointing="full"), Machine(gpu="h100"))
    layers = linear_layers(lay_out(configuration, load_facts(configuration), grid(profile, job), "vplan"))
    channels = 2 * int(2.5 * 2240)
    assert layers["transformer_blocks.0.ff.conv_depth"].numbers == channels + 9 * channels
    assert layers["transformer_blocks.0.ff.conv_inverted"].numbers == channels + 2240
