"""planner/dialects/sd_scripts_unet: what sd-scripts' commands for SDXL and SD 1.5 mean, and kohya_ss's settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner import dialects
from planner.dialects.base.dialect import Translation, translate
from planner.dialects.base.script import from_file
from planner.errors import VplanError
from planner.foreign.case import read_case
from planner.foreign.check import check_case

LAUNCH = "accelerate launch --num_processes 1 "
SDXL = "sdxl_train_network.py --pretrained_model_name_or_path a.safetensors --network_module networks.lora "


def read(folder: Path, text: str, name: str = "train.sh") -> tuple[str, Translation]:
    (folder / name).write_text(text)
    dialect, given = dialects.read_script(from_file(folder / name))
    return dialect.name, translate(dialect, given)


def command(folder: Path, words: str) -> Translation:
    return read(folder, LAUNCH + words)[1]


def test_lora_of_sdxl_trains_its_text_encoders_unless_told_otherwise(tmp_path: Path) -> None:
    plain = command(tmp_path, SDXL + "--mixed_precision bf16 --network_dim 32 --resolution 1024,1024")
    assert plain.job["model"] == "sdxl" and plain.job["lora_rank"] == 32
    assert "proj_in" in plain.job["lora_targets"] and "ff.net.2" in plain.job["lora_targets"]
    assert (plain.version, plain.strategy["text_encoder"], plain.strategy["vae"]) == ("te", "resident", "resident")
    cached = "--network_train_unet_only --cache_text_encoder_outputs --cache_latents --fp8_base"
    alone = command(tmp_path, f"{SDXL} --mixed_precision fp16 {cached}")
    assert (alone.version, alone.strategy["text_encoder"], alone.strategy["vae"]) == ("fp8", "cached", "cached")
    assert (alone.strategy["weights_dtype"], alone.strategy["adapter_dtype"]) == ("fp16", "fp32")


def test_a_checkpoint_is_read_in_fp32(tmp_path: Path) -> None:
    """On the CPU: SDXL's does not go into 12 GB of RAM. With --lowram on the GPU, in fp32 too; with
    --full_bf16 the U-Net in 16 bits."""
    plain = f"{SDXL}--mixed_precision bf16 --network_train_unet_only --cache_latents --gradient_checkpointing --sdpa"
    answers = []
    for flags in ("", " --full_bf16", " --lowram"):
        (tmp_path / "train.sh").write_text(LAUNCH + plain + flags)
        dialect, given = dialects.read_script(from_file(tmp_path / "train.sh"))
        case = read_case(dialect, given, {}, {"gpu": "24GB", "host_ram": "12GB"})
        answers.append(check_case(case, search=False).outcome)
    assert [answer.estimate.verdict for answer in answers] == ["no", "fits", "fits"]
    ram = [answer.estimate.host_ram_bytes / 2**30 for answer in answers]
    assert ram == pytest.approx([15.9, 11.1, 3.1], abs=0.1)


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("train_network.py --mixed_precision bf16", {"model": "sd1.5", "method": "lora"}),
        (
            "train_network.py --v2 --v_parameterization",
            {"model": "sd2.1", "method": "lora", "text_encoder": "resident"},
        ),
        ("sdxl_train.py --mixed_precision bf16", {"method": "full", "weights_dtype": "fp32", "autocast": "bf16"}),
        ("sdxl_train.py --mixed_precision bf16 --full_bf16", {"weights_dtype": "bf16", "autocast": "bf16"}),
        ("sdxl_train.py --mixed_precision no", {"weights_dtype": "fp32", "autocast": "none"}),
        ("sdxl_train.py --mixed_precision fp16 --train_text_encoder", {"text_encoder_dtype": "fp32"}),
        (SDXL + "--max_token_length 225", {"text_tokens": 227}),
        (SDXL + "--no_half_vae --train_batch_size 4", {"vae_dtype": "fp32", "vae_slicing": True, "batch_size": 4}),
        ("train_network.py --resolution 512,650", {"height": 640, "width": 512}),
    ],
)
def test_settings_become_fields(words: str, fields: dict[str, Any], tmp_path: Path) -> None:
    found = command(tmp_path, words)
    together = found.job | found.strategy
    assert {name: together[name] for name in fields} == fields


def test_sd_2_without_the_velocity_is_a_base_of_512_pixels(tmp_path: Path) -> None:
    words = "train_network.py --v2 --mixed_precision fp16 --sdpa"
    assert any("predicts the noise" in note for note in command(tmp_path, words).notes)
    assert not any("predicts the noise" in note for note in command(tmp_path, f"{words} --v_parameterization").notes)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (SDXL + "--network_args conv_dim=4", "conv_dim is not priced"),
        (SDXL.replace("networks.lora", "lycoris.kohya"), "LyCORIS without --mixed_precision is not priced"),
        (SDXL + "--network_train_text_encoder_only", "text_encoder_only is not priced"),
        (SDXL + "--cpu_offload_checkpointing", "stops sdxl_train_network.py"),
        (SDXL + "--cache_text_encoder_outputs", "while the text encoders are trained"),
        ("sdxl_train.py --train_text_encoder --learning_rate_te2 0", "one of SDXL's text encoders is not priced"),
        (SDXL + "--cache_latents --vae_batch_size 8", "--vae_batch_size is not priced with --cache_latents"),
        ("sdxl_train.py --xformers --diffusers_xformers", "holds the scores of all heads"),
        ("anima_train.py", "anima_train.py of sd-scripts is not supported"),
    ],
)
def test_what_is_not_priced_is_refused_by_name(words: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(VplanError, match=why):
        command(tmp_path, words)


GUI = {
    "LoRA_type": "Standard",
    "sdxl": True,
    "optimizer": "AdamW8bit",
    "max_resolution": "1024,1024",
    "max_token_length": "75",
    "mixed_precision": "bf16",
    "network_dim": 32,
    "train_batch_size": "4",
    "text_encoder_lr": 0,
    "unet_lr": "1e-4",
    "sdxl_cache_text_encoder_outputs": True,
    "additional_parameters": "--gradient_accumulation_steps 2",
    "xformers": "xformers",
}


def test_settings_of_kohya_ss_are_those_of_the_command_that_it_starts(tmp_path: Path) -> None:
    name, found = read(tmp_path, json.dumps(GUI), "gui.json")
    assert (name, found.version, found.strategy["text_encoder"]) == ("sd-scripts@unet", "", "cached")
    assert (found.job["batch_size"], found.strategy["optimizer"], found.job["text_tokens"]) == (4, "adamw-8bit", None)
    assert found.strategy["gradient_accumulation"] == 2
    flux = {"LoRA_type": "Flux1", "flux1_checkbox": True, "fp8_base": True, "network_dim": 16, "ae": "ae.sft"}
    name, found = read(tmp_path, json.dumps(GUI | flux | {"sdxl": False}), "gui.json")
    assert (name, found.strategy["weights_dtype"]) == ("sd-scripts", "fp8")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"LoRA_type": "LyCORIS/GLoRA"}, "LyCORIS' algo 'glora' is not priced"),
        ({"LoRA_type": "LyCORIS/LoKr", "use_tucker": True}, "use_tucker of LyCORIS is not priced"),
        ({"LoRA_type": "Kohya LoCon", "conv_dim": 8}, "conv_dim is not priced"),
        ({"sdxl": False, "flux1_checkbox": True, "LoRA_type": "Flux1", "train_t5xxl": True}, "T5-XXL is trained"),
        ({"sdxl": False, "flux1_checkbox": True, "LoRA_type": "Flux1 OFT"}, "'networks.oft_flux' is not priced"),
        ({"sdxl": False, "anima_checkbox": True}, "for anima_train_network.py of sd-scripts, whose settings"),
        ({"network_dim": "x"}, "network_dim 'x' is no number"),
    ],
)
def test_unpriced_settings_of_kohya_ss_are_refused(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(VplanError, match=why):
        read(tmp_path, json.dumps(GUI | changes), "gui.json")


def test_a_config_alone_is_read_by_the_model_that_it_names(tmp_path: Path) -> None:
    lines = 'network_module = "networks.lora"\nmixed_precision = "bf16"\npretrained_model_name_or_path = '
    assert read(tmp_path, f'{lines}"sd_xl_base_1.0.safetensors"\n', "a.toml")[1].job["model"] == "sdxl"
    assert read(tmp_path, f'{lines}"v1-5-pruned.safetensors"\n', "a.toml")[1].job["model"] == "sd1.5"


@pytest.mark.parametrize(("size", "batch"), [(1024, 1), (1024, 4), (512, 1), (512, 2), (768, 2)])
def test_every_rank_of_sdxl_is_priced_and_a_higher_one_takes_more(tmp_path: Path, size: int, batch: int) -> None:
    """At some an adapter's gradient is as large as an activation."""
    taken = []
    for rank in (16, 32, 64, 128, 256):
        flags = f"--mixed_precision bf16 --gradient_checkpointing --cache_latents --train_batch_size {batch}"
        (tmp_path / "train.sh").write_text(f"{LAUNCH}{SDXL}{flags} --resolution {size},{size} --network_dim {rank}")
        dialect, given = dialects.read_script(from_file(tmp_path / "train.sh"))
        outcome = check_case(read_case(dialect, given, {}, {"gpu": "80GB"}), search=False).outcome
        taken.append(outcome.estimate.peak.allocated_bytes)
    assert taken == sorted(taken)
