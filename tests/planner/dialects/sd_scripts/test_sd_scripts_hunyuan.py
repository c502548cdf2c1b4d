"""planner/dialects/sd_scripts_hunyuan: what sd-scripts' commands for HunyuanImage 2.1 mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planner import dialects
from planner.dialects.base.dialect import Translation, translate
from planner.dialects.base.script import from_file
from planner.errors import VplanError

COMMAND = (
    "accelerate launch --num_processes 1 hunyuan_image_train_network.py --pretrained_model_name_or_path a.safetensors "
    "--text_encoder vl.safetensors --byt5 b.safetensors --vae v.safetensors --network_train_unet_only "
    "--network_module networks.lora_hunyuan_image --mixed_precision bf16 "
)
"""Of docs/hunyuan_image_train_network.md."""


def command(folder: Path, words: str) -> Translation:
    (folder / "train.sh").write_text(COMMAND + words)
    dialect, given = dialects.read_script(from_file(folder / "train.sh"))
    assert dialect.name == "sd-scripts@hunyuan-image"
    return translate(dialect, given)


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("", {"model": "hunyuan-image-2.1", "method": "lora", "lora_rank": 4, "weights_dtype": "bf16"}),
        ("", {"vae_dtype": "fp16", "text_encoder": "resident", "vae": "resident", "text_encoder_dtype": "bf16"}),
        ("--cache_text_encoder_outputs --cache_latents --fp8_vl", {"text_encoder": "cached", "vae": "cached"}),
        ("--fp8_scaled --fp8_vl", {"weights_dtype": "fp8", "adapter_dtype": "fp32", "text_encoder_dtype": "fp8"}),
        ("--fp8_base", {"weights_dtype": "bf16"}),
        ("--full_bf16 --network_dim 16", {"adapter_dtype": "bf16", "lora_rank": 16}),
        ("--gradient_checkpointing --cpu_offload_checkpointing", {"gradient_checkpointing": "offload"}),
        ("--blocks_to_swap 18", {"swap_blocks": 9 + 18}),
        ("--attn_mode flash", {"attention": "flash"}),
        ("--xformers --split_attn", {"attention": "efficient"}),
        ("--resolution 1040,1000", {"height": 992, "width": 1024}),
    ],
)
def test_settings_become_fields(words: str, fields: dict[str, Any], tmp_path: Path) -> None:
    found = command(tmp_path, words)
    together = found.job | found.strategy
    assert {name: together[name] for name in fields} == fields


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("--blocks_to_swap 38", "more than 37"),
        ("--network_module networks.lora", "is not priced"),
        ("--attn_mode sageattn", "it cannot train"),
        ("--network_args network_reg_dims=a=4", "a rank for some layers alone"),
    ],
)
def test_what_the_script_stops_at_or_is_not_priced_is_refused(words: str, fault: str, tmp_path: Path) -> None:
    with pytest.raises(VplanError, match=fault):
        command(tmp_path, words)


def test_its_own_code_and_what_does_nothing_is_said(tmp_path: Path) -> None:
    found = command(tmp_path, "--fp8_base --vae_chunk_size 16")
    assert [remark.flag for remark in found.ineffective] == ["--fp8_base"]
    assert any("its own code of the model is priced as diffusers'" in note for note in found.notes)
    assert any("--vae_chunk_size" in note for note in found.notes)
