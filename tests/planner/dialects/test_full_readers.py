"""Commands of scripts that train everything: diffusers' train_dreambooth.py, musubi-tuner's, and sdxl_train.py with its
text encoders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from planner import dialects
from planner.commands import cli
from planner.dialects.base.bindings import InexpressibleError
from planner.dialects.base.dialect import Dialect, Translation, translate
from planner.dialects.base.script import from_file
from planner.dialects.diffusers.prompt_length import PROMPT_LENGTH
from planner.dialects.diffusers.settings import DIALECT as DIFFUSERS
from planner.errors import VplanError
from planner.foreign.case import read_case
from planner.foreign.check import Checked, check_case

DREAMBOOTH = "train_dreambooth.py --pretrained_model_name_or_path CompVis/stable-diffusion-v1-4 --resolution 512 "
QWEN = "qwen_image_train.py --dit qwen.safetensors --sdpa --mixed_precision bf16 "


def read(folder: Path, words: str) -> tuple[Dialect, Any]:
    (folder / "train.sh").write_text(f"accelerate launch --num_processes 1 {words}")
    return dialects.read_script(from_file(folder / "train.sh"))


def command(folder: Path, words: str) -> Translation:
    return translate(*read(folder, words))


def checked(folder: Path, words: str) -> Checked:
    dialect, given = read(folder, words)
    return check_case(read_case(dialect, given, {}, {"gpu": "80GB"}), search=False)


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (DREAMBOOTH, {"model": "sd1.5", "method": "full", "weights_dtype": "fp32", "autocast": "none"}),
        (DREAMBOOTH + "--mixed_precision fp16", {"autocast": "fp16", "text_encoder_dtype": "bf16", "batch_size": 4}),
        (DREAMBOOTH + "--train_text_encoder --mixed_precision fp16", {"text_encoder_dtype": "fp32"}),
        (DREAMBOOTH + "--train_batch_size 3 --with_prior_preservation", {"batch_size": 6}),
        (DREAMBOOTH + "--pre_compute_text_embeddings", {"text_encoder": "cached", "vae": "resident"}),
        (QWEN, {"model": "qwen-image", "method": "full", "weights_dtype": "fp32", "lora_targets": None}),
        (QWEN + "--full_bf16 --fused_backward_pass --optimizer_type adafactor", {"optimizer_step": "backward"}),
        (QWEN + "--full_bf16 --blocks_to_swap 45", {"weights_dtype": "bf16", "swap_blocks": 45}),
        ("hv_train.py --dit a.pt --sdpa --mixed_precision fp16 --full_fp16", {"weights_dtype": "fp16"}),
        ("zimage_train.py --dit a.pt --sdpa --full_bf16", {"weights_dtype": "fp32", "vae_dtype": "fp32"}),
    ],
)
def test_settings_become_fields(words: str, fields: dict[str, Any], tmp_path: Path) -> None:
    found = command(tmp_path, words)
    together = found.job | found.strategy
    assert {name: together[name] for name in fields} == fields


def test_a_batch_with_class_images_is_written_as_half_of_its_samples() -> None:
    fields = {"model": "sd1.5", "method": "full", "frames": 1, "height": 512, "width": 512, "version": "prior"}
    job = next(entry for entry in DIFFUSERS.table if "batch_size" in getattr(entry, "fields", ()))
    assert job.to_settings(fields | {"batch_size": 6})["--train_batch_size"] == 3  # type: ignore[union-attr]  # no When
    with pytest.raises(InexpressibleError, match="class image"):
        job.to_settings(fields | {"batch_size": 3})  # type: ignore[union-attr]  # no When


def test_a_text_encoder_that_is_trained_takes_weights_gradients_and_states(tmp_path: Path) -> None:
    """CLIP-L's 123 million parameters in fp32: as much again for gradients, twice for AdamW, and 2 bytes more each for
    the weights than in fp16."""
    words = DREAMBOOTH + "--mixed_precision fp16 --train_batch_size 1 --gradient_checkpointing"
    without, trained = (
        checked(tmp_path, text).outcome.estimate.peak.allocated_bytes
        for text in (words, f"{words} --train_text_encoder")
    )
    assert trained - without == pytest.approx(14 * 123_060_480, rel=0.03)


@pytest.mark.parametrize(
    ("script", "model", "flag", "tokens"),
    [
        ("train_dreambooth_lora_sd3.py", "stabilityai/stable-diffusion-3.5-medium", "", 77 + 77),
        ("train_dreambooth_lora_sd3.py", "stabilityai/stable-diffusion-3.5-medium", "--max_sequence_length 256", None),
        ("train_dreambooth_flux.py", "black-forest-labs/FLUX.1-dev", "", 77),
        ("train_dreambooth_lora_flux.py", "black-forest-labs/FLUX.1-dev", "", None),
        ("train_dreambooth_lora_flux.py", "black-forest-labs/FLUX.1-dev", "--max_sequence_length 128", 128),
        ("train_dreambooth_lora_qwen_image.py", "Qwen/Qwen-Image", "--max_sequence_length 128", None),
    ],
)
def test_prompts_of_t5_are_as_long_as_the_script_pads_them(
    tmp_path: Path, script: str, model: str, flag: str, tokens: int | None
) -> None:
    """CLIP's 77 tokens stand before those of SD3; Qwen-Image's prompts are not padded."""
    read_fields = command(tmp_path, f"{script} --pretrained_model_name_or_path {model} {flag}")
    assert read_fields.job["text_tokens"] == tokens
    told = {"script": script, "model": read_fields.job["model"], "method": read_fields.job["method"]}
    assert PROMPT_LENGTH.to_settings({**told, "text_tokens": tokens}) == (
        {"--max_sequence_length": int(flag.split()[1])} if flag and "Qwen" not in model else {}
    )


NF4 = (
    "accelerate launch --mixed_precision bf16 train_dreambooth_lora_qwen_image.py --gradient_checkpointing"
    " --pretrained_model_name_or_path Qwen/Qwen-Image --instance_data_dir data --instance_prompt sks --cache_latents"
    " --offload --bnb_quantization_config_path bnb.json\n"
)


def nf4(folder: Path, **config: Any) -> Checked:
    (folder / "a.sh").write_text(NF4)
    (folder / "bnb.json").write_text(json.dumps(config))
    dialect, given = dialects.read_script(from_file(folder / "a.sh"))
    return check_case(read_case(dialect, given, {}, {"gpu": "24GB"}), search=False)


def test_a_base_is_quantised_as_the_file_says(tmp_path: Path) -> None:
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    plain, twice = nf4(tmp_path, **four), nf4(tmp_path, **four, bnb_4bit_use_double_quant=True)
    strategy = plain.outcome.estimate.strategy
    assert (strategy.weights_dtype, strategy.adapter_dtype, strategy.autocast) == ("nf4", "fp32", "bf16")
    peaks = [found.outcome.estimate.phases["load"].allocated_bytes for found in (plain, twice)]
    # Of 20.4 billion weights in blocks of 64 a scale in 4 bytes, or in one byte and 4 bytes more for 256 of them; the
    # allocator leaves up to 1 MiB of a large block unsplit.
    assert peaks[0] - peaks[1] == pytest.approx(20.4e9 / 64 * (3 - 4 / 256), rel=0.05)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"load_in_8bit": True}, "load_in_8bit = True"),
        ({"load_in_4bit": True}, "bnb_4bit_quant_type = 'fp4'"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "llm_int8_skip_modules": ["a"]}, "llm_int8_skip_modules"),
        ({"load_in_4bit": "yes"}, "load_in_4bit = 'yes'"),
        ({}, "load_in_4bit = None"),
    ],
)
def test_what_a_quantisation_file_asks_for_and_is_not_priced_is_named(
    config: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(VplanError, match="is not estimated") as caught:
        nf4(tmp_path, **config)
    assert named in caught.value.message


def test_without_the_quantisation_file_there_is_no_verdict(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(NF4.replace("bnb.json", "nowhere-at-all.json"))
    with pytest.raises(VplanError, match=r"'nowhere-at-all\.json' is not here") as caught:
        dialects.read_script(from_file(tmp_path / "a.sh"))
    assert "pass the file" in caught.value.fix


def test_an_option_that_may_need_less_and_is_not_priced_stands_in_the_first_lines(tmp_path: Path) -> None:
    words = NF4.replace("lora_qwen_image", "lora_flux2").replace("Qwen/Qwen-Image", "black-forest-labs/FLUX.2-dev")
    (tmp_path / "a.sh").write_text(words.replace("--bnb_quantization_config_path bnb.json", "--do_fp8_training"))
    done = CliRunner().invoke(cli, ["check", str(tmp_path / "a.sh"), "--gpu", "24GB"])
    assert "that is without --do_fp8_training: not estimated, and may need less" in done.stdout.splitlines()[2]
    assert "no priced option of this trainer makes it fit" in done.stdout
