"""A fix that `vplan check` gives does what is said of it, in configs of SimpleTuner and OneTrainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner import dialects
from planner.dialects.base.script import from_file
from planner.errors import VplanError
from planner.foreign.case import read_case
from planner.foreign.check import Checked, check_case
from planner.units import GIB

QWEN: dict[str, Any] = {
    "model_type": "lora",
    "model_family": "qwen_image",
    "pretrained_model_name_or_path": "Qwen/Qwen-Image",
    "train_batch_size": 1,
    "resolution": 1024,
    "resolution_type": "pixel",
    "mixed_precision": "bf16",
    "optimizer": "adamw_bf16",
    "lora_rank": 16,
}
PART = {"train": True, "weight_dtype": "BFLOAT_16"}
ONETRAINER: dict[str, Any] = {
    "training_method": "LORA",
    "model_type": "QWEN",
    "base_model_name": "Qwen/Qwen-Image",
    "__version": 11,
    "train_dtype": "BFLOAT_16",
    "resolution": "1024",
    "batch_size": 1,
    "optimizer": {"optimizer": "ADAMW"},
    "transformer": {**PART, "gradient_checkpointing": True},
    "text_encoder": {"train": False, "weight_dtype": "BFLOAT_16"},
    "vae": {"weight_dtype": "BFLOAT_16"},
}
OLD = {**ONETRAINER, "__version": 8, "gradient_checkpointing": "ON", "transformer": PART}
OFF = {**ONETRAINER, "transformer": {**PART, "gradient_checkpointing": False}}
FULL = {**ONETRAINER, "training_method": "FINE_TUNE"}


def check(folder: Path, config: dict[str, Any], gpu: str, host_ram: int) -> Checked:
    (folder / "config.json").write_text(json.dumps(config))
    dialect, given = dialects.read_script(from_file(folder / "config.json"))
    return check_case(read_case(dialect, given, {}, {"gpu": gpu, "host_ram": host_ram * GIB}), True)


def changed(config: dict[str, Any], change: tuple[str, ...]) -> dict[str, Any]:
    """The config with each `part.key: value` of a fix."""
    other = json.loads(json.dumps(config))
    for line in "\n".join(change).splitlines():
        name, _, text = line.partition(": ")
        *parts, key = name.split(".")
        inside = other
        for part in parts:
            inside = inside.setdefault(part, {})
        try:
            inside[key] = json.loads(text)
        except json.JSONDecodeError:
            inside[key] = text
    return other


@pytest.mark.parametrize(
    ("config", "gpu", "host_ram", "words"),
    [
        (QWEN, "24GB", 64, "musubi_blocks_to_swap"),
        (QWEN, "24GB", 16, "base_model_precision: nf4-bnb"),
        (QWEN, "2x24GB", 128, "musubi_blocks_to_swap"),
        (ONETRAINER, "24GB", 64, "transformer.offload_fraction"),
        (ONETRAINER, "16GB", 64, "text_encoder.offload_fraction: 1.0"),
        (ONETRAINER, "24GB", 32, "transformer.weight_dtype: NFLOAT_4"),
        (OLD, "24GB", 64, "layer_offload_fraction"),
        (OFF, "24GB", 64, "transformer.gradient_checkpointing: true"),
        (FULL, "80GB", 64, "optimizer.fused_back_pass: true"),
    ],
)
def test_a_change_does_what_is_said_of_it(
    config: dict[str, Any], gpu: str, host_ram: int, words: str, tmp_path: Path
) -> None:
    """These said that no option of the trainer makes it fit."""
    found = check(tmp_path, config, gpu, host_ram)
    assert found.outcome.estimate.verdict == "no"
    assert words in "\n".join(found.fixes[0].change)
    for fix in found.fixes:
        if any("PYTORCH" in line for line in fix.change):  # which a config does not say
            continue
        then = check(tmp_path, changed(config, fix.change), gpu, host_ram).outcome.estimate
        assert then.verdict == fix.outcome.estimate.verdict == "fits"
        said = fix.outcome.estimate.peak.device_bytes
        assert then.peak.device_bytes <= said and then.peak.device_bytes > 0.9 * said


def test_layers_of_a_unet_stay_on_the_gpu(tmp_path: Path) -> None:
    """modules/modelSetup/BaseStableDiffusionXLSetup.py at 23df383: `supports_offloading=False`."""
    unet = {**PART, "offload_fraction": 0.5, "activation_offloading": True}
    encoders = {f"text_encoder{suffix}": {"train": False, "weight_dtype": "BFLOAT_16"} for suffix in ("", "_2")}
    config = {**ONETRAINER, "model_type": "STABLE_DIFFUSION_XL_10_BASE", "unet": unet, **encoders}
    config.pop("transformer")
    found = check(tmp_path, config, "24GB", 64).case.strategy
    assert (found.swap_blocks, found.gradient_checkpointing) == (0, "full")


def test_only_a_text_encoder_with_a_share_of_its_own_is_offloaded(tmp_path: Path) -> None:
    shared = {**OLD, "gradient_checkpointing": "CPU_OFFLOADED", "layer_offload_fraction": 0.6}
    alone = {**ONETRAINER, "transformer": {**PART, "offload_fraction": 0.6}}
    both = {**alone, "text_encoder": {**alone["text_encoder"], "offload_fraction": 0.6}}
    encode = [
        check(tmp_path, each, "16GB", 64).outcome.estimate.phases["encode"].allocated_bytes
        for each in (shared, alone, both)
    ]
    assert encode[0] == encode[2] < encode[1] / 3


def test_a_prompt_s_length_may_be_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    dialect, given = dialects.read_script(from_file(tmp_path / "config.json"))
    usual, long = (read_case(dialect, given, {"text_tokens": tokens}, {"gpu": "48GB"}) for tokens in (None, 1024))
    assert (usual.job.text_tokens, long.job.text_tokens) == (None, 1024)
    padded = "prompts are padded to 1024 tokens"
    assert any(padded in note for note in usual.notes)
    with pytest.raises(VplanError, match="text_tokens"):
        read_case(dialect, given, {"text_tokens": 10**9}, {"gpu": "48GB"})
