"""ltx-trainer's configs: what its keys mean, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from planner import dialects
from planner.catalog import lookup
from planner.dialects.base.dialect import translate
from planner.dialects.base.script import from_file
from planner.errors import VplanError
from planner.layout.trainer_terms.ltx_trainer import VIDEO_ALONE, connector_layers

CONFIG: dict[str, Any] = {
    "model": {"model_path": "ltx-2.3-22b-dev.safetensors", "text_encoder_path": "gemma", "training_mode": "lora"},
    "lora": {"rank": 32, "alpha": 32, "dropout": 0.0, "target_modules": ["to_k", "to_q", "to_v", "to_out.0"]},
    "training_strategy": {
        "name": "flexible",
        "video": {"is_generated": True, "latents_dir": "latents"},
        "audio": {"is_generated": True, "latents_dir": "audio_latents"},
    },
    "optimization": {"batch_size": 1, "optimizer_type": "adamw8bit", "enable_gradient_checkpointing": True},
    "acceleration": {"mixed_precision_mode": "bf16", "quantization": "int8-quanto"},
    "data": {"preprocessed_data_root": "data"},
    "validation": {"interval": None, "samples": [], "video_dims": [576, 576, 49]},
}


def read(folder: Path, command: str = "", **changes: Any) -> Any:
    """The config with some tables changed, as `vplan check` reads it, or as a command does that names it."""
    config = {**CONFIG, **{table: {**CONFIG[table], **keys} for table, keys in changes.items()}}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    if command:
        (folder / "train.sh").write_text(command)
    dialect, given = dialects.read_script(from_file(folder / ("train.sh" if command else "run.yaml")))
    assert dialect.name == "ltx-trainer"
    return translate(dialect, given)


@pytest.mark.parametrize("command", ["", "uv run python scripts/train.py run.yaml"])
def test_a_config_and_the_command_that_names_it(command: str, tmp_path: Path) -> None:
    found = read(tmp_path, command)
    job, strategy = found.job, found.strategy
    assert (job["model"], job["method"], job["lora_rank"], job["batch_size"]) == ("ltx-2.3", "lora", 32, 1)
    assert (job["frames"], job["height"], job["width"]) == (49, 576, 576)
    formats = (strategy["weights_dtype"], strategy["adapter_dtype"], strategy["autocast"])
    assert formats == ("int8", "fp32", "bf16")
    assert (strategy["optimizer"], strategy["gradient_checkpointing"]) == ("adamw-8bit", "full")
    assert strategy["validation_mode"] == "off"


def test_defaults_are_the_trainers_own(tmp_path: Path) -> None:
    found = read(tmp_path)
    (tmp_path / "bare.yaml").write_text(
        yaml.safe_dump({"model": CONFIG["model"], "training_strategy": CONFIG["training_strategy"], "optimization": {}})
    )
    bare = translate(*dialects.read_script(from_file(tmp_path / "bare.yaml")))
    assert (found.job["batch_size"], bare.job["batch_size"], bare.job["lora_rank"]) == (1, 2, 64)
    assert (bare.strategy["optimizer"], bare.strategy["gradient_checkpointing"]) == ("adamw", "none")
    assert bare.strategy["weights_dtype"] == "bf16"


def test_samples_are_made_where_prompts_are_named(tmp_path: Path) -> None:
    samples = [{"prompt": "a cat", "conditions": []}]
    found = read(tmp_path, validation={"interval": 100, "samples": samples})
    assert found.strategy["validation_mode"] == "on"
    assert found.job["validation"]["frames"] == 49 and found.job["validation"]["cfg"] is False
    assert read(tmp_path, validation={"interval": None, "samples": samples}).strategy["validation_mode"] == "off"


@pytest.mark.parametrize(
    ("strategy", "version"),
    [
        (CONFIG["training_strategy"], ""),
        ({"name": "flexible", "video": {"is_generated": True, "latents_dir": "latents"}}, VIDEO_ALONE),
        ({"name": "text_to_video", "with_audio": True}, ""),
        ({"name": "text_to_video"}, VIDEO_ALONE),
    ],
)
def test_a_step_without_sound_is_a_version_of_its_own(strategy: dict[str, Any], version: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**CONFIG, "training_strategy": strategy}))
    dialect, given = dialects.read_script(from_file(tmp_path / "run.yaml"))
    assert dialect.version(given.settings, {}) == version


REFERENCE = {"type": "reference", "latents_dir": "references"}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"model": {"model_path": "ltx-2-19b-dev.safetensors"}}, "LTX-2 19B in ltx-trainer is not recorded"),
        ({"model": {"training_mode": "full"}}, "full training in ltx-trainer is not recorded"),
        ({"acceleration": {"quantization": "int2-quanto"}}, "'int2-quanto' is not priced"),
        ({"lora": {"target_modules": ["to_k", "ff.net.2"]}}, "'ff.net.2' in ltx-trainer are not recorded"),
        ({"training_strategy": {"name": "video_to_video"}}, "reference clips"),
        ({"training_strategy": {"video": {"latents_dir": "x", "conditions": [REFERENCE]}}}, "a reference condition"),
        ({"optimization": {"batch_size": "two"}}, "batch_size 'two' is no int"),
    ],
)
def test_what_is_not_priced_is_refused_by_name(changes: dict[str, Any], fault: str, tmp_path: Path) -> None:
    with pytest.raises(VplanError, match=fault):
        read(tmp_path, **changes)
        dialect, given = dialects.read_script(from_file(tmp_path / "run.yaml"))
        dialect.version(given.settings, {})


def test_a_config_that_does_not_tell_its_model_is_told_the_priced_ones(tmp_path: Path) -> None:
    with pytest.raises(VplanError) as refusal:
        read(tmp_path, model={"model_path": "path/to/ltx-2-model.safetensors"})
    assert refusal.value.message == "cannot tell the model from model.model_path 'path/to/ltx-2-model.safetensors'"
    assert refusal.value.fix == "add --model ltx-2.3 or --model ltx-2.5: no other is priced with this trainer"


def test_fsdp_under_a_lora_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n")
    command = "accelerate launch --config_file fsdp.yaml scripts/train.py run.yaml"
    with pytest.raises(VplanError, match="FSDP is not priced here: it casts the whole model to fp32"):
        read(tmp_path, command)


@pytest.mark.parametrize(("stream", "parameters"), [("video", 1_612_546_304), ("audio", 403_620_096)])
def test_connectors_have_as_many_parameters_as_in_its_own_code(stream: str, parameters: int) -> None:
    assert sum(map(sum, connector_layers(lookup.model("ltx-2.3"), stream))) == parameters
