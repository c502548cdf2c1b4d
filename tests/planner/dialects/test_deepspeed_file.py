"""DeepSpeed's JSON that a launch names: what is translated, said and refused of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner import dialects
from planner.dialects.base.dialect import Translation, translate
from planner.dialects.base.flag_effects import effects
from planner.dialects.base.script import from_file
from planner.errors import VplanError
from planner.layout.sharding.zero import DEEPSPEED

EASY = "scripts/train.py --pretrained_model_name_or_path EasyAnimateV5.1-7b-zh-InP --video_sample_n_frames 49"
BF16 = {"bf16": {"enabled": True}}


def read(folder: Path, zero: dict[str, Any], **top: Any) -> Translation:
    (folder / "ds.json").write_text(json.dumps({**BF16, "zero_optimization": zero, **top}), encoding="utf-8")
    return command(folder)


def command(folder: Path) -> Translation:
    launch = "accelerate launch --num_processes 4 --use_deepspeed --deepspeed_config_file ds.json"
    (folder / "train.sh").write_text(f"{launch} {EASY} --use_deepspeed\n", encoding="utf-8")
    dialect, given = dialects.read_script(from_file(folder / "train.sh"))
    return translate(dialect, given)


def said(found: Translation) -> list[str]:
    return [note.partition(" is not estimated")[0] for note in found.notes if " is not estimated (" in note]


USUAL: dict[str, Any] = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "reduce_bucket_size": 5e8,
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "sub_group_size": 1e9,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": "auto",
    "offload_optimizer": {"device": "cpu", "pin_memory": True},
    "offload_param": {"device": "none"},
}


def test_what_is_as_priced_is_passed_over(tmp_path: Path) -> None:
    found = read(tmp_path, USUAL, train_batch_size="auto", gradient_clipping="auto", wall_clock_breakdown=False)
    assert said(found) == [] and not any("is no key" in note for note in found.notes)
    assert (found.strategy["sharding"], found.strategy["offload_optimizer"]) == ("zero-3", "cpu")
    assert found.strategy["offload_params"] == "none"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("overlap_comm", True),
        ("contiguous_gradients", False),
        ("reduce_bucket_size", 2e8),
        ("reduce_scatter", False),
    ],
)
def test_what_stages_1_and_2_do_otherwise_is_said(key: str, value: object, tmp_path: Path) -> None:
    assert said(read(tmp_path, {"stage": 2, key: value})) == [f"zero_optimization.{key}"]


def test_keys_of_stage_3_do_nothing_before_it(tmp_path: Path) -> None:
    assert said(read(tmp_path, {**USUAL, "stage": 2, "overlap_comm": False, "stage3_prefetch_bucket_size": 5e9})) == []


@pytest.mark.parametrize(
    ("zero", "top", "fault"),
    [
        ({"stage": 2, "reduce_bucket_size": 1e9}, {}, "reduce_bucket_size is not priced"),
        ({"stage": 3, "stage3_prefetch_bucket_size": 5e8}, {}, "stage3_prefetch_bucket_size is not priced"),
        ({"stage": 3, "stage3_max_live_parameters": 3e9}, {}, "stage3_max_live_parameters is not priced"),
        ({"stage": 3, "zero_hpz_partition_size": 4}, {}, "zero_hpz_partition_size is not priced"),
        ({"stage": 2}, {"data_types": {"grad_accum_dtype": "fp32"}}, "grad_accum_dtype is not priced"),
        ({"stage": 2}, {"communication_data_type": "fp32"}, "communication_data_type is not priced"),
        ({"stage": 2}, {"bf16": {"enabled": False}}, "it trains in fp32"),
        ({"stage": 2}, {"torch_autocast": {"enabled": True}}, "torch_autocast.enabled is not priced"),
    ],
)
def test_what_takes_more_is_refused(zero: dict[str, Any], top: dict[str, Any], fault: str, tmp_path: Path) -> None:
    with pytest.raises(VplanError, match=fault):
        read(tmp_path, zero, **top)


def test_smaller_sizes_may_need_less(tmp_path: Path) -> None:
    found = read(tmp_path, {"stage": 3, "stage3_prefetch_bucket_size": 1e6, "stage3_max_live_parameters": 1e8})
    notes = [note for note in found.notes if "stage3_" in note]
    assert len(notes) == 2 and all("may need less" in note for note in notes)


def test_older_words_and_mixed_precision_in_fp16(tmp_path: Path) -> None:
    both = {"bf16": {"enabled": False}, "fp16": {"enabled": True, "loss_scale": 0}}
    found = read(tmp_path, {"stage": 2, "cpu_offload": True}, **both)
    assert (found.strategy["sharding"], found.strategy["offload_optimizer"]) == ("zero-2", "cpu")


def test_numbers_of_yaml_and_unknown_keys(tmp_path: Path) -> None:
    text = "bf16: {enabled: true}\nzero_optimization: {stage: 2, reduce_bucket_size: 9e8, overlap_com: true}\n"
    (tmp_path / "ds.json").write_text(json.dumps({**BF16, "zero_optimization": {"stage": 2, "overlap_com": True}}))
    assert any("overlap_com is no key that DeepSpeed is known to have" in note for note in command(tmp_path).notes)
    (tmp_path / "ds.yaml").write_text(text, encoding="utf-8")
    launch = "accelerate launch --num_processes 4 --use_deepspeed --deepspeed_config_file ds.yaml"
    (tmp_path / "train.sh").write_text(f"{launch} {EASY} --use_deepspeed\n", encoding="utf-8")
    with pytest.raises(VplanError, match="reduce_bucket_size is not priced"):
        dialect, given = dialects.read_script(from_file(tmp_path / "train.sh"))
        translate(dialect, given)


def test_a_shipped_config_says_the_same_as_the_file(tmp_path: Path) -> None:
    launch = "accelerate launch --use_deepspeed --deepspeed_config_file config/zero_stage2_config.json"
    (tmp_path / "train.sh").write_text(f"{launch} --num_processes 4 {EASY} --use_deepspeed\n", encoding="utf-8")
    dialect, given = dialects.read_script(from_file(tmp_path / "train.sh"))
    assert said(translate(dialect, given)) == ["zero_optimization.overlap_comm"]


def test_the_sizes_that_are_priced_are_those_of_the_layout() -> None:
    priced = {name: row.priced for row in effects("deepspeed").unpriced for name in row.names if row.priced is not None}
    assert {name.removeprefix("zero_optimization.").removeprefix("stage3_"): size for name, size in priced.items()} == {
        "reduce_bucket_size": DEEPSPEED.reduce_bucket,
        "sub_group_size": DEEPSPEED.sub_group,
        "prefetch_bucket_size": DEEPSPEED.prefetch,
        "param_persistence_threshold": DEEPSPEED.persistent,
        "max_live_parameters": DEEPSPEED.max_live,
        "max_reuse_distance": DEEPSPEED.max_reuse,
    }


def test_every_key_of_zero_is_known() -> None:
    """By DeepSpeed's own record, of the version that is here."""
    config = pytest.importorskip("deepspeed.runtime.zero.config")
    from planner.dialects.base import flags

    known = flags.script("deepspeed", "config.json").flags
    fields = config.DeepSpeedZeroConfig.model_fields
    names = [f"zero_optimization.{field.alias or name}" for name, field in fields.items()]
    assert [name for name in names if name not in known and f"{name}.device" not in known] == []
