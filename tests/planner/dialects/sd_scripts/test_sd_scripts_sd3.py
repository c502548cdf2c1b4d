"""planner/dialects/sd_scripts_sd3: what sd-scripts' commands for Stable Diffusion 3 mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planner import dialects
from planner.catalog import lookup
from planner.dialects.base.dialect import Translation, translate
from planner.dialects.base.script import from_file
from planner.errors import VplanError
from planner.foreign.case import read_case
from planner.foreign.check import check_case

FILES = (
    "--pretrained_model_name_or_path m/sd3.5_medium.safetensors --clip_l l --clip_g g --t5xxl t --mixed_precision bf16 "
)
LORA = f"sd3_train_network.py {FILES} --network_module networks.lora_sd3 --network_train_unet_only "
FULL = f"sd3_train.py {FILES}"


def read(folder: Path, text: str, name: str = "train.sh") -> Translation:
    (folder / name).write_text(text)
    dialect, given = dialects.read_script(from_file(folder / name))
    assert dialect.name == "sd-scripts@mmdit"
    return translate(dialect, given)


def command(folder: Path, words: str) -> Translation:
    return read(folder, f"accelerate launch --num_processes 1 {words}")


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (LORA, {"model": "sd3.5-medium", "method": "lora", "lora_rank": 4, "weights_dtype": "bf16"}),
        (LORA, {"text_encoder": "resident", "vae": "resident", "vae_dtype": "bf16", "text_tokens": 77 + 256}),
        (LORA + "--t5xxl_max_token_length 512", {"text_tokens": 77 + 512}),
        (LORA + "--cache_text_encoder_outputs --cache_latents", {"text_encoder": "cached", "vae": "cached"}),
        (LORA + "--fp8_base_unet", {"weights_dtype": "fp8", "adapter_dtype": "fp32"}),
        (LORA + "--blocks_to_swap 22 --gradient_checkpointing", {"swap_blocks": 22}),
        (LORA + "--fused_backward_pass", {"optimizer_step": "foreach"}),
        (LORA + "--resolution 1040,1000", {"height": 992, "width": 1024}),
        (LORA.replace("sd3.5_medium", "sd3.5_large"), {"model": "sd3.5-large"}),
        (FULL, {"method": "full", "weights_dtype": "bf16", "autocast": "bf16"}),
        (FULL + "--optimizer_type Adafactor --fused_backward_pass", {"optimizer_step": "backward"}),
    ],
)
def test_settings_become_fields(words: str, fields: dict[str, Any], tmp_path: Path) -> None:
    found = command(tmp_path, words)
    together = found.job | found.strategy
    assert {name: together[name] for name in fields} == fields


def test_a_file_with_a_number_format_behind_its_name_is_the_models(tmp_path: Path) -> None:
    assert command(tmp_path, LORA.replace("3.5_medium", "3.5_large_fp8_scaled")).job["model"] == "sd3.5-large"


def test_text_encoders_are_cast_on_the_cpu_unless_their_files_are_of_the_format(tmp_path: Path) -> None:
    """T5's and CLIP's are in fp16: 10.4 GiB in bf16, mapped in fp16."""
    taken = []
    for words in (LORA, LORA.replace("bf16", "fp16")):
        (tmp_path / "train.sh").write_text(f"accelerate launch --num_processes 1 {words}")
        case = read_case(*dialects.read_script(from_file(tmp_path / "train.sh")), {}, {"gpu": "48GB"})
        taken.append(check_case(case, search=False).outcome.estimate.host_ram_bytes)
    encoders = sum(encoder.parameters for encoder in lookup.model("sd3.5-medium").text_encoders)
    assert taken[0] - taken[1] == pytest.approx(2 * encoders, rel=0.02)


def test_adapters_are_on_every_linear_layer_of_a_block(tmp_path: Path) -> None:
    layers = command(tmp_path, LORA).job["lora_targets"]
    assert {"to_q", "add_k_proj", "net.2", "norm1.linear", "norm1_context.linear"} <= set(layers)


def test_its_config_alone_is_read(tmp_path: Path) -> None:
    text = 'pretrained_model_name_or_path = "sd3_medium.safetensors"\nclip_l = "a"\nclip_g = "b"\nt5xxl = "c"\n'
    assert read(tmp_path, text, "full.toml").job["method"] == "full"
    lora = read(tmp_path, text + 'network_module = "networks.lora_sd3"\n', "lora.toml")
    assert (lora.job["method"], lora.job["model"]) == ("lora", "sd3-medium")


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (LORA + "--blocks_to_swap 23 --gradient_checkpointing", "more than 22"),
        (LORA.replace("networks.lora_sd3", "networks.lora"), "is not priced"),
        (LORA.replace("sd3.5_medium", "model"), "cannot tell the model"),
        (FULL + "--train_text_encoder", "--train_text_encoder is not priced"),
        (FULL + "--cache_text_encoder_outputs --use_t5xxl_cache_only", "--use_t5xxl_cache_only is not priced"),
        (FULL.replace("sd3.5_medium", "flux1-dev"), "no Stable Diffusion 3"),
    ],
)
def test_what_the_scripts_stop_at_or_is_not_priced_is_refused(words: str, fault: str, tmp_path: Path) -> None:
    with pytest.raises(VplanError, match=fault):
        command(tmp_path, words)


def test_what_does_nothing_is_said(tmp_path: Path) -> None:
    found = command(tmp_path, LORA + "--apply_t5_attn_mask --max_token_length 225")
    assert [remark.flag for remark in found.ineffective] == ["--apply_t5_attn_mask", "--max_token_length"]
