"""OneTrainer's attention, and what of its settings is refused or said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner import dialects
from planner.dialects.base.dialect import Translation, translate
from planner.dialects.base.script import from_file
from planner.errors import VplanError

CONFIG = {
    "training_method": "LORA",
    "model_type": "Z_IMAGE",
    "base_model_name": "Tongyi-MAI/Z-Image",
    "text_encoder": {"train": False},
    "transformer": {"weight_dtype": "INT_W8A8"},
    "train_dtype": "BFLOAT_16",
    "__version": 11,
}


def read(folder: Path, **changes: Any) -> Translation:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return translate(*dialects.read_script(from_file(folder / "config.json")))


@pytest.mark.parametrize(("said", "ours"), [({}, "sdpa"), ("FLASH", "flash"), ("CUDNN", "cudnn"), ("SDP", "sdpa")])
def test_attention_is_its_mechanism(said: Any, ours: str, tmp_path: Path) -> None:
    changes = {"attention_mechanism": said} if said else {}
    assert read(tmp_path, **changes).strategy["attention"] == ours


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"attention_mechanism": "FLEX"}, "attention_mechanism"),
        ({"lora_decompose": True}, "DoRA"),
        ({"peft_type": "LOKR", "lokr_weight_decompose": True}, "lokr_weight_decompose is not priced"),
        ({"peft_type": "LOHA", "model_type": "STABLE_DIFFUSION_15"}, "convolutions adapters too"),
        ({"additional_embeddings": [{"train": False}, {"model_name": "a"}]}, r"additional_embeddings\[1\] trains"),
        ({"temp_device": "cuda"}, "temp_device is not priced"),
    ],
)
def test_other_runs_are_refused(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(VplanError, match=why):
        read(tmp_path, **changes)


def test_what_does_nothing_is_silent(tmp_path: Path) -> None:
    plain = read(tmp_path).notes
    same = {"temp_device": "cpu", "additional_embeddings": [{"train": False}], "dropout_probability": 0.1}
    assert read(tmp_path, **same, quantization={"svd_dtype": "NONE"}).notes == plain
    assert any("svd_dtype" in note for note in read(tmp_path, quantization={"svd_dtype": "BFLOAT_16"}).notes)
    assert any("masked_prior" in note for note in read(tmp_path, masked_prior_preservation_weight=0.5).notes)


@pytest.mark.parametrize(
    ("said", "weights", "encoder"),
    [("NONE", "bf16", "bf16"), ("FLOAT_8", "fp8", "bf16"), ("BFLOAT_16", "bf16", "bf16")],
)
def test_parts_that_say_none_have_the_format_of_all(said: str, weights: str, encoder: str, tmp_path: Path) -> None:
    """Until version 10, and as its presets have it, which say no version."""
    parts = {"transformer": {"weight_dtype": said}, "text_encoder": {"train": False, "weight_dtype": "NONE"}}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **parts, "weight_dtype": "BFLOAT_16", "__version": 9}))
    dialect, given = dialects.read_script(from_file(tmp_path / "config.json"))
    strategy = translate(dialect, given).strategy
    assert not given.unknown
    assert (strategy["weights_dtype"], strategy["text_encoder_dtype"]) == (weights, encoder)


@pytest.mark.parametrize(
    ("changes", "rank", "version"),
    [
        ({"lora_rank": 8}, 8, ""),
        ({"peft_type": "LOHA", "lora_rank": 8}, 16, "loha"),
        ({"peft_type": "LOKR", "lokr_full_matrix": True, "lokr_decompose_factor": 4}, 128, ""),
        (
            {"peft_type": "LOKR", "lokr_full_matrix": True, "lokr_decompose_factor": 8, "layer_filter": "attention"},
            30,
            "",
        ),
        ({"peft_type": "LOKR", "lokr_vec_trick": False}, 1, "whole-lokr"),
    ],
)
def test_adapters_are_priced_as_the_lora_with_as_many_numbers(
    changes: dict[str, Any], rank: int, version: str, tmp_path: Path
) -> None:
    told = read(tmp_path, **changes)
    assert told.job["lora_rank"] == rank
    assert told.version.endswith(version)
    noted = any(f"priced as a LoRA of rank {rank}," in note for note in told.notes)
    assert noted == ("peft_type" in changes)


@pytest.mark.parametrize(
    ("optimizer", "step"),
    [({}, "loop"), ({"fused": True}, "fused"), ({"foreach": True}, "foreach"), ({"optimizer": "ADAFACTOR"}, "foreach")],
)
def test_adamw_steps_as_its_switches_say(optimizer: dict[str, Any], step: str, tmp_path: Path) -> None:
    assert read(tmp_path, optimizer=optimizer).strategy["optimizer_step"] == step


FULL = {"training_method": "FINE_TUNE", "transformer": {"weight_dtype": "BFLOAT_16"}}


@pytest.mark.parametrize("optimizer", [{}, {"fused": True}])
def test_a_step_in_backward_switches_off_what_forbids_it(optimizer: dict[str, Any], tmp_path: Path) -> None:
    """modules/util/create.py: "fused_back_pass" is only allowed when "fused" and "foreach" are disabled."""
    words = words_of(tmp_path, {"optimizer_step": "backward"}, **FULL, optimizer=optimizer)
    assert words == ["optimizer.fused_back_pass: true", *(["optimizer.fused: false"] if optimizer else [])]


@pytest.mark.parametrize(("threads", "more"), [({}, ["dataloader_threads: 1"]), ({"dataloader_threads": 1}, [])])
def test_an_offloaded_text_encoder_has_one_thread(threads: dict[str, Any], more: list[str], tmp_path: Path) -> None:
    """modules/util/create.py ``create_data_loader`` raises where more than one caches; two are the default."""
    words = words_of(tmp_path, {"version": "encoders-offloaded"}, **threads)
    assert words == ["text_encoder.offload_fraction: 1.0", *more]


def words_of(folder: Path, change: dict[str, Any], **changes: Any) -> list[str]:
    """What `check` says to write into a config for a change."""
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    dialect, given = dialects.read_script(from_file(folder / "config.json"))
    (move,) = [move for move in dialect.moves if dict(move.changes) == change]
    assert move.words_for is not None
    return list(move.words_for(given.settings))


def test_a_preset_of_layers_chooses_none_by_itself(tmp_path: Path) -> None:
    chosen = read(tmp_path, layer_filter_preset="attn-mlp", layer_filter="attention")
    assert not any("layer_filter_preset" in note for note in chosen.notes)
    assert any("puts adapters on every layer" in note for note in read(tmp_path, layer_filter_preset="attn-mlp").notes)
