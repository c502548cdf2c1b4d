"""planner/dialects/simpletuner: what a config leaves out has SimpleTuner's default, what is not found is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner import dialects
from planner.dialects.base.dialect import Translation, translate
from planner.dialects.base.script import from_file, from_words
from planner.errors import VplanError
from planner.foreign.case import read_case

LORA = {
    "model_family": "flux",
    "model_type": "lora",
    "optimizer": "adamw_bf16",
    "data_backend_config": "config/data.json",
}
CLIPS = {**LORA, "model_family": "ltxvideo2", "validation_num_video_frames": 81, "resolution": 480}


def read(config: Path, settings: dict[str, Any]) -> Translation:
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(json.dumps(settings), encoding="utf-8")
    return translate(*dialects.read_script(from_file(config)))


def test_what_is_left_out_has_the_default_of_its_registry(tmp_path: Path) -> None:
    found = read(tmp_path / "config.json", LORA)
    assert (found.strategy["gradient_checkpointing"], found.job["batch_size"]) == ("full", 4)
    assert (found.job["lora_rank"], found.job["lora_dropout"]) == (16, 0.1)
    assert (found.job["height"], found.strategy["autocast"], found.strategy["weights_dtype"]) == (1024, "bf16", "bf16")
    assert "left out of the config, so SimpleTuner's defaults: train_batch_size 4, gradient_checkpointing true" in (
        found.notes
    )
    said = read(tmp_path / "config.json", LORA | {"train_batch_size": 1, "gradient_checkpointing": False})
    assert (said.strategy["gradient_checkpointing"], said.job["batch_size"]) == ("none", 1)
    assert not any("left out of the config" in note for note in said.notes)


@pytest.mark.parametrize(
    ("value", "checkpoints"),
    [(None, "full"), ("", "full"), ("false", "full"), (False, "none"), (0, "none"), ("no", "none"), ("1", "full")],
)
def test_the_word_false_does_not_come_to_its_parser(value: object, checkpoints: str, tmp_path: Path) -> None:
    """helpers/configuration/cli_utils.py leaves out what is null, empty or "false", so that the default stands."""
    found = read(tmp_path / "config.json", LORA | {"gradient_checkpointing": value, "use_ema": value})
    assert found.strategy["gradient_checkpointing"] == checkpoints
    assert found.strategy["ema"] == ("cpu" if value == "1" else "none")


def test_a_word_that_is_typed_comes_to_its_parser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    read(tmp_path / "config.json", LORA)
    typed = from_words(["simpletuner", "train", "--gradient_checkpointing=false"])
    assert translate(*dialects.read_script(typed)).strategy["gradient_checkpointing"] == "none"


def test_what_it_does_not_start_without_is_said(tmp_path: Path) -> None:
    found = read(tmp_path / "config.json", {**LORA, "optimizer": ""})
    note = "left out of the config, which SimpleTuner does not start without: optimizer adamw_bf16 assumed"
    assert note in found.notes and found.strategy["optimizer_step"] == "loop"


@pytest.mark.parametrize(
    ("config", "data"),
    [
        ("simpletuner/examples/ltx/config.json", "simpletuner/examples/clips.json"),
        ("theirs/ltx/config.json", "theirs/clips.json"),
        ("config/config.json", "config/examples/clips.json"),
    ],
)
def test_its_packaged_examples_are_found_beside_the_config(config: str, data: str, tmp_path: Path) -> None:
    file = tmp_path / data
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps([{"dataset_type": "video", "resolution": 480, "video": {"num_frames": 48}}]))
    found = read(tmp_path / config, CLIPS | {"data_backend_config": "config/examples/clips.json"})
    assert found.job["frames"] == 41  # 48 cut to 8 * n + 1; its validation has 81


def test_a_data_file_that_is_not_here_is_said_with_what_is_assumed(tmp_path: Path) -> None:
    found = read(tmp_path / "config.json", CLIPS)
    assert found.job["frames"] == 81 and not found.ineffective
    note = next(note for note in found.notes if note.startswith("data_backend_config 'config/data.json' is not here"))
    assert note.endswith("the config's resolution is assumed, and validation_num_video_frames 81")
    image = read(tmp_path / "config.json", LORA)
    assert any(note.endswith("is assumed") and "data.json" in note for note in image.notes)


@pytest.mark.parametrize(
    ("own", "frames"),
    [({"dataset_type": "video"}, 121), ({"dataset_type": "video", "video": {}}, 121), ({"dataset_type": "image"}, 1)],
)
def test_a_set_that_says_no_frames_has_five_seconds(own: dict[str, Any], frames: int, tmp_path: Path) -> None:
    """Of 25 frames (helpers/data_backend/factory.py), whatever its validation has; an image has one."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config/data.json").write_text(json.dumps([{"resolution": 480, **own}]))
    assert read(tmp_path / "config.json", CLIPS).job["frames"] == frames


@pytest.mark.parametrize(
    "changes",
    [
        {"ltx2_intrinsic_conditioning": [{"type": "first_frame", "probability": 0.5}, {"type": "prefix"}]},
        {"ltx2_prefix_conditioning_probability": 0.3, "ltx2_prefix_conditioning_frames": 2},
    ],
)
def test_conditions_within_clips_are_said(changes: dict[str, Any], tmp_path: Path) -> None:
    found = read(tmp_path / "config.json", CLIPS | changes)
    acts = next(iter(changes))
    assert f"{acts} is not estimated (clips that condition each sample), and takes more than this" in found.notes
    off = read(tmp_path / "config.json", CLIPS | dict.fromkeys(changes, 0) | {"ltx2_intrinsic_conditioning": []})
    assert not any("condition each sample" in note for note in off.notes)


def test_every_key_of_its_registry_is_known(tmp_path: Path) -> None:
    more = {"ltx2_reference_spatial_scale_factor": 2, "ltx2_intrinsic_conditioning": [{"type": "prefix"}]}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CLIPS | more | {"sdnq_use_svd": False, "no_such_key": 1}))
    _, given = dialects.read_script(from_file(config))
    assert given.unknown == ("no_such_key",)


def test_what_may_need_less_makes_a_verdict_that_is_not_firm(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CLIPS | {"offload_during_startup": True, "train_batch_size": 1}))
    dialect, given = dialects.read_script(from_file(config))
    assert read_case(dialect, given, {}, {"gpu": "24GB"}).unpriced == ("offload_during_startup",)


def test_images_that_are_encoded_at_once_are_said_unless_the_config_says_one(tmp_path: Path) -> None:
    def said(settings: dict[str, Any]) -> list[str]:
        return [note for note in read(tmp_path / "config.json", settings).notes if "vae_batch_size" in note]

    (note,) = said(LORA)
    assert note == "vae_batch_size is left out: 4 images are encoded at once, not one as estimated, and take more"
    assert said(LORA | {"vae_batch_size": 1}) == said(CLIPS) == said(LORA | {"vae_cache_disable": True}) == []


@pytest.mark.parametrize(
    ("changes", "ema"),
    [({}, "cpu"), ({"ema_device": "accelerator"}, "gpu"), ({"ema_device": "accelerator", "ema_cpu_only": True}, "cpu")],
)
def test_where_its_average_lies(changes: dict[str, Any], ema: str, tmp_path: Path) -> None:
    assert read(tmp_path / "config.json", LORA | {"use_ema": True} | changes).strategy["ema"] == ema


def test_the_flavour_that_its_sd_1_5_has_unasked_is_known(tmp_path: Path) -> None:
    for flavour in ("", "dreamshaper", "1.4"):
        found = read(tmp_path / "config.json", LORA | {"model_family": "sd1x", "model_flavour": flavour})
        assert found.job["model"] == "sd1.5"


def test_fsdp_of_a_launch_is_refused(tmp_path: Path) -> None:
    """It was passed over, and the run priced as DDP."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps(LORA | {"model_type": "full"}), encoding="utf-8")
    (tmp_path / "train.sh").write_text("accelerate launch --num_processes 2 --use_fsdp simpletuner/train.py\n")
    with pytest.raises(VplanError, match="FSDP by accelerate's launch is not priced"):
        translate(*dialects.read_script(from_file(tmp_path / "train.sh")))
