"""planner/dialects/simpletuner/own_checks.py: what SimpleTuner's own code ends a run for is said, and not offered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner import dialects
from planner.dialects.base.script import from_file
from planner.foreign.case import Case, read_case
from planner.foreign.check import check_case
from planner.units import GIB

LORA: dict[str, Any] = {
    "model_type": "lora",
    "model_family": "qwen_image",
    "resolution": 1024,
    "resolution_type": "pixel",
    "optimizer": "adamw_bf16",
    "train_batch_size": 1,
}
FLUX = {"model_family": "flux"}
SCHNELL = {"model_family": "flux", "model_flavour": "schnell"}
SD3 = {"model_family": "sd3", "model_flavour": "large", "resolution": 512}
HIDREAM = {"model_family": "hidream"}
LTX = {"model_family": "ltxvideo2", "resolution": 480}
WAN = {"model_family": "wan", "base_model_precision": "fp8-quanto"}
ENCODER, LLAMA = "text_encoder_1_precision", "text_encoder_4_precision"
INTERVAL, STRIDE = "gradient_checkpointing_interval", "gradient_checkpointing_segment_stride"
OFFLOADED = {"gradient_checkpointing_offload_attention": True}
INT8, INT8_TORCHAO, NF4 = ({"base_model_precision": word} for word in ("int8-quanto", "int8-torchao", "nf4-bnb"))
SAGE = {"attention_mechanism": "sageattention"}


def case_of(folder: Path, changes: dict[str, Any], gpu: str = "80GB", host_ram: int = 128) -> Case:
    (folder / "config.json").write_text(json.dumps(LORA | changes))
    dialect, given = dialects.read_script(from_file(folder / "config.json"))
    return read_case(dialect, given, {}, {"gpu": gpu, "host_ram": host_ram * GIB})


@pytest.mark.parametrize(
    ("changes", "flag", "words"),
    [
        ({"max_train_steps": 100}, "num_train_epochs", "1 where it is left out"),
        ({"max_train_steps": 100, "num_train_epochs": 2}, "num_train_epochs", "beside max_train_steps"),
        ({"num_train_epochs": 0}, "max_train_steps", "missing"),
        (FLUX | {"ramtorch": True, "musubi_blocks_to_swap": 4}, "musubi_blocks_to_swap", "with ramtorch"),
        (NF4 | SAGE, "attention_mechanism", "over base_model_precision nf4-bnb"),
        (OFFLOADED, "gradient_checkpointing_offload_attention", "with model_family qwen_image"),
        ({INTERVAL: 0}, INTERVAL, "refused as 0"),
        ({STRIDE: "0"}, STRIDE, "refused as 0"),
        (WAN, "base_model_precision", "with model_family wan"),
        (WAN | {"model_family": "sd2x"}, "base_model_precision", "helpers/models/sd1x/model.py"),
        (SCHNELL, "model_flavour", "without flux_fast_schedule"),
        (INT8_TORCHAO | {ENCODER: "int8-quanto"}, ENCODER, "together"),
        (INT8 | {ENCODER: "int8-torchao"}, ENCODER, "together"),
        ({ENCODER: "int8-quanto", "text_encoder_2_precision": "int4-torchao"}, "text_encoder_2_precision", "together"),
        (INT8 | {ENCODER: "int8-sdnq"}, ENCODER, "with base_model_precision int8-quanto"),
        ({ENCODER: "fp8-native", "quantize_via": "pipeline"}, ENCODER, "with quantize_via pipeline"),
        (LTX | {"validation_num_video_frames": 80}, "validation_num_video_frames", "a multiple of 8, and one more"),
        (HIDREAM | NF4 | {LLAMA: "int8-quanto"}, LLAMA, "helpers/models/hidream"),
    ],
)
def test_what_its_code_ends_for_is_said(changes: dict[str, Any], flag: str, words: str, tmp_path: Path) -> None:
    (refused,) = case_of(tmp_path, changes).refused
    assert refused.flag == flag
    assert words in refused.why


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_train_steps": 100, "num_train_epochs": 0},
        {"max_train_steps": 0, "num_train_epochs": 3},
        FLUX | {"ramtorch": True, "musubi_blocks_to_swap": 0},
        FLUX | {"musubi_blocks_to_swap": 4},
        INT8 | SAGE,
        FLUX | OFFLOADED,
        {"gradient_checkpointing_offload_attention": False},
        {INTERVAL: 2, STRIDE: 3},
        {"model_family": "sdxl", INTERVAL: 0},  # this family has none, and takes any
        FLUX | {"base_model_precision": "fp8-quanto"},
        WAN | {"num_processes": 2},  # int8-quanto, before the family is asked
        WAN | {"base_model_precision": "fp8-torchao"},
        SCHNELL | {"flux_fast_schedule": True},
        SCHNELL | {"i_know_what_i_am_doing": True},
        INT8 | {ENCODER: "int4-quanto"},
        NF4 | {ENCODER: "int8-quanto"},
        INT8_TORCHAO | {ENCODER: "int8-quanto", "quantize_via": "pipeline"},
        {ENCODER: "int8-sdnq"},
        LTX | {"validation_num_video_frames": 81},
        LTX | {"validation_num_video_frames": 80, "validation_audio_only": True},
        HIDREAM | INT8_TORCHAO | {LLAMA: "int4-quanto"},  # taken back by itself
    ],
)
def test_what_it_takes_is_not(changes: dict[str, Any], tmp_path: Path) -> None:
    gpu = "2x80GB" if "num_processes" in changes else "80GB"
    assert case_of(tmp_path, changes, gpu).refused == ()


@pytest.mark.parametrize(
    ("left_out", "more"), [("multiplier", {}), ("linear_alpha", {}), ("linear_dim", {}), ("", {"full_matrix": True})]
)
def test_the_keys_of_a_lycoris_file(left_out: str, more: dict[str, Any], tmp_path: Path) -> None:
    whole = {"algo": "lora", "multiplier": 1.0, "linear_dim": 16, "linear_alpha": 16, **more}
    whole["apply_preset"] = {"target_module": ["Attention"]}
    (tmp_path / "lycoris.json").write_text(json.dumps({key: whole[key] for key in whole if key != left_out}))
    refused = case_of(tmp_path, FLUX | {"lora_type": "lycoris", "lycoris_config": "lycoris.json"}).refused
    assert [each.flag for each in refused] == ([f"lycoris_config's {left_out}"] if left_out else [])


@pytest.mark.parametrize(
    ("changes", "gpu", "host_ram", "base", "beside"),
    [
        ({ENCODER: "int8-quanto"}, "32GB", 64, "int8-torchao", f"{ENCODER}: no_change"),
        (SD3 | INT8 | {ENCODER: "int8-quanto"}, "12GB", 64, "int8-torchao", f"{ENCODER}: no_change"),
        ({ENCODER: "int8-sdnq"}, "24GB", 16, "nf4-bnb", f"{ENCODER}: no_change"),
        (SAGE, "24GB", 16, "nf4-bnb", "attention_mechanism: diffusers"),
    ],
)
def test_a_fix_takes_back_what_its_base_does_not_go_with(
    changes: dict[str, Any], gpu: str, host_ram: int, base: str, beside: str, tmp_path: Path
) -> None:
    found = check_case(case_of(tmp_path, changes, gpu, host_ram), True)
    lines = ["\n".join(fix.change).splitlines() for fix in (*found.fixes, *found.helps)]
    quantising = [each for each in lines if f"base_model_precision: {base}" in each]
    assert quantising and all(beside in each for each in quantising)
    for each in quantising:
        changed = dict(line.split(": ") for line in each if ": " in line)
        assert case_of(tmp_path, changes | changed, gpu, host_ram).refused == ()
