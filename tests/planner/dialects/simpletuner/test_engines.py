"""planner/dialects/simpletuner/engines.py and deepspeed_config.py: what splits SimpleTuner's training, both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner import dialects
from planner.dialects.base.bindings import InexpressibleError
from planner.dialects.base.dialect import Translation, settings_for, translate
from planner.dialects.base.script import from_file
from planner.errors import VplanError
from planner.foreign.case import Case, read_case
from planner.foreign.export import fields_of
from planner.spec.plan import Plan

FULL = {
    "model_family": "flux",
    "model_type": "full",
    "optimizer": "torch-adamw",
    "lr_warmup_steps": 100,
    "train_batch_size": 1,
    "data_backend_config": "data.json",
}
LORA = FULL | {"model_type": "lora", "lora_type": "standard"}
TORCH_S = {"type": "AdamW", "params": {"torch_adam": True}}
LAUNCH = "accelerate launch --num_processes 2 {} simpletuner/train.py\n"


def zero(stage: object, **more: Any) -> dict[str, Any]:
    return {"deepspeed_config": {"zero_optimization": {"stage": stage, **more}}}


def script(folder: Path, config: dict[str, Any], launch: str = "") -> Path:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "train.sh").write_text(LAUNCH.format(launch), encoding="utf-8")
    return folder / "train.sh"


def read(folder: Path, config: dict[str, Any], launch: str = "") -> Translation:
    return translate(*dialects.read_script(from_file(script(folder, config, launch))))


def case(folder: Path, config: dict[str, Any]) -> Case:
    dialect, given = dialects.read_script(from_file(script(folder, config)))
    return read_case(dialect, given, {}, {"gpu": "2x80GB"})


@pytest.mark.parametrize("form", ["table", "text", "file", "launcher"])
def test_deepspeed_may_be_said_in_four_ways(form: str, tmp_path: Path) -> None:
    own = zero(2, offload_optimizer={"device": "cpu"})["deepspeed_config"]
    (tmp_path / "ds.json").write_text(json.dumps(own), encoding="utf-8")
    said = {"table": own, "text": json.dumps(own), "file": "ds.json", "launcher": None}[form]
    launch = "--use_deepspeed --zero_stage 2 --offload_optimizer_device cpu" if form == "launcher" else ""
    found = read(tmp_path, FULL | {"deepspeed_config": said}, launch).strategy
    assert (found["sharding"], found["offload_optimizer"], found["offload_gradients"]) == ("zero-2", "cpu", "cpu")
    assert (found["weights_dtype"], found["master_weights"], found["autocast"]) == ("bf16", "fp32", "none")


def test_deepspeed_s_own_adamw_steps_whatever_the_config_says(tmp_path: Path) -> None:
    found = read(tmp_path, FULL | {"optimizer": "adamw_bf16"} | zero(2)).strategy
    assert (found["optimizer"], found["optimizer_step"]) == ("adamw", "fused")
    torch_s = zero(2)
    torch_s["deepspeed_config"]["optimizer"] = TORCH_S
    assert read(tmp_path, FULL | torch_s).strategy["optimizer_step"] == "foreach"


def test_deepspeed_s_accumulation_wins(tmp_path: Path) -> None:
    own = zero(2)
    own["deepspeed_config"]["gradient_accumulation_steps"] = 4
    assert read(tmp_path, FULL | own | {"gradient_accumulation_steps": 1}).strategy["gradient_accumulation"] == 4


def test_params_wait_in_pinned_memory_unless_it_says_no(tmp_path: Path) -> None:
    for said, pinned in (({}, True), ({"pin_memory": False}, False)):
        path = script(tmp_path, FULL | zero(3, offload_param={"device": "cpu", **said}))
        _, given = dialects.read_script(from_file(path))
        assert given.settings["deepspeed:zero_optimization.offload_param.pin_memory"] is pinned


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"deepspeed_config": "zero2"}, "is no JSON, and no file that is here"),
        ({"deepspeed_config": {"bf16": {"enabled": True}}}, "without zero_optimization ends before training"),
        (zero(0), "splits nothing"),
        ({"deepspeed_config": {"zero_optimization": {"reduce_bucket_size": 5e8}}}, "splits nothing"),
        (zero(2, reduce_bucket_size="auto"), "guessed from the model"),
        (zero(3) | {"use_ema": True}, "use_ema with DeepSpeed is not priced"),
        (zero(2) | {"musubi_blocks_to_swap": 4}, "musubi_blocks_to_swap with DeepSpeed is not priced"),
        (zero(2) | {"mixed_precision": "fp16"}, "mixed_precision fp16 with DeepSpeed is not priced"),
        (zero(2) | {"fsdp_enable": True}, "beside DeepSpeed ends before training"),
        ({"fsdp_enable": True, "fsdp_version": 1}, "fsdp_version 1 is not priced"),
        ({"fsdp_enable": True, "fsdp_reshard_after_forward": False}, "keeps every block gathered"),
        ({"fsdp_enable": True, "fsdp_auto_wrap_policy": "NO_WRAP"}, "whole model is gathered at once"),
        ({"fsdp_enable": True, "fsdp_transformer_layer_cls_to_wrap": "Attention"}, "names Attention beside its blocks"),
        ({"fsdp_enable": True, "optimizer": "adamw_bf16"}, "ends in the first step with FSDP"),
        ({"fsdp_enable": True, "optimizer": "bnb-adamw8bit"}, "gives way to adamw_schedulefree"),
        ({"fsdp_enable": True, "use_ema": True}, "use_ema with FSDP is not priced"),
        ({"fsdp_enable": True, "model_family": "sd3"}, "runs the parts of its blocks"),
        ({"fsdp_enable": True, "model_family": "sdxl"}, "which modules of sdxl are gathered together"),
        ({"fsdp_enable": True, "model_type": "lora", "base_model_precision": "int8-quanto"}, "ends before training"),
        ({"fsdp_enable": True, "model_type": "lora", "base_model_precision": "nf4-bnb"}, "with FSDP is not priced"),
    ],
)
def test_what_is_not_priced_says_why(config: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(VplanError, match=why):
        read(tmp_path, FULL | config)


def test_what_ends_a_run_under_deepspeed_is_said(tmp_path: Path) -> None:
    own = zero(2)
    own["deepspeed_config"]["train_batch_size"] = 8
    said = {remark.flag: remark.why for remark in read(tmp_path, LORA | own | {"lr_warmup_steps": 0}).refused}
    assert "refused as lora with DeepSpeed" in said["model_type"]
    assert "refused as 0 by DeepSpeed" in said["lr_warmup_steps"]
    assert (
        "it is not train_micro_batch_size_per_gpu 1 x gradient_accumulation_steps 1 x 2 GPUs"
        in (said["deepspeed_config's train_batch_size"])
    )
    assert not read(tmp_path, FULL | zero(2)).refused


def test_fsdp_trains_in_fp32_and_its_blocks_recompute_once(tmp_path: Path) -> None:
    fsdp = {"fsdp_enable": True, "fsdp_activation_checkpointing": True, "gradient_checkpointing": False}
    full, lora = (read(tmp_path, config | fsdp).strategy for config in (FULL, LORA))
    assert (full["sharding"], full["weights_dtype"], full["autocast"]) == ("fsdp", "fp32", "none")
    assert (lora["weights_dtype"], lora["adapter_dtype"]) == ("bf16", "fp32")
    assert full["gradient_checkpointing"] == lora["gradient_checkpointing"] == "full"


@pytest.mark.parametrize(("by_one", "version"), [(False, "fsdp-whole"), (True, "")])
def test_who_loads_what_fsdp_splits(by_one: bool, version: str, tmp_path: Path) -> None:
    more = {"fsdp_enable": True, "fsdp_cpu_ram_efficient_loading": by_one}
    assert case(tmp_path, FULL | more).version == version


@pytest.mark.parametrize(
    "config",
    [
        FULL | zero(1),
        FULL | zero(2),
        FULL | zero(2) | {"deepspeed_config": {**zero(2)["deepspeed_config"], "optimizer": TORCH_S}},
        FULL | zero(2, offload_optimizer={"device": "cpu"}),
        FULL | zero(3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"}),
        FULL | {"fsdp_enable": True, "fsdp_cpu_ram_efficient_loading": True},
        LORA | {"fsdp_enable": True, "fsdp_cpu_ram_efficient_loading": True, "fsdp_cpu_offload": True},
    ],
)
def test_what_is_written_is_read_as_it_was(config: dict[str, Any], tmp_path: Path) -> None:
    found = case(tmp_path, config | {"model_flavour": "dev", "lora_rank": 16, "lora_dropout": 0.0})
    plan = Plan(job=found.job, strategy=found.strategy, machine=found.machine, trainer=found.trainer)
    assert found.dialect.files is not None
    for name, text in found.dialect.files(plan, settings_for(found.dialect, fields_of(plan))).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    again = translate(*dialects.read_script(from_file(tmp_path / "train.sh")))
    assert again.strategy == translate(found.dialect, found.given).strategy
    assert not again.refused


def test_ema_and_other_steps_are_not_written_under_an_engine(tmp_path: Path) -> None:
    fields = case(tmp_path, FULL | zero(2)).fields
    with pytest.raises(InexpressibleError, match="DeepSpeed's own AdamW steps"):
        settings_for(dialects.writer("simpletuner", "flux.1-dev"), fields | {"optimizer_step": "loop"})
