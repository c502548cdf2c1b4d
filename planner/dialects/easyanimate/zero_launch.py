"""DeepSpeed under EasyAnimate's and VideoX-Fun's scripts: what they need to start and to save with it."""

from __future__ import annotations

import json

from planner.dialects.base.bindings import Fields, InexpressibleError, Settings, UnsupportedValue
from planner.dialects.base.launchers import SAVED_WHOLE
from planner.spec.plan import Plan

ADAPTERS_ALONE = "DeepSpeed is given a LoRA's adapters alone (EasyAnimate c2a70d1 scripts/train_lora.py:1464)"
SAVES_SHARES = "its save writes the share of one GPU (EasyAnimate c2a70d1 scripts/train.py:1127 `save_pretrained`)"

ENGINE_FILE = "deepspeed.json"
"""Their data loaders take a sampler of batches, and have no batch size that accelerate could give DeepSpeed:
``prepare`` raises a ValueError unless a file of DeepSpeed's says it (rehearsed with accelerate 1.15)."""


def deepspeed(fields: Fields) -> Settings:
    """What both scripts need beside a stage of ZeRO."""
    settings: Settings = {"--use_deepspeed": True, "launch:--deepspeed_config_file": ENGINE_FILE}
    return settings | ({"launch:--zero3_init_flag": "true", **SAVED_WHOLE} if fields["sharding"] == "zero-3" else {})


def own_deepspeed(fields: Fields) -> Settings:
    """What EasyAnimate's need; an InexpressibleError under stage 3, which splits no LoRA's base and is not saved."""
    if fields["sharding"] == "zero-3":
        why = ADAPTERS_ALONE if fields["method"] == "lora" else SAVES_SHARES
        raise InexpressibleError(UnsupportedValue("sharding", "zero-3", "zero-2", why))
    return deepspeed(fields)


def engine_file(plan: Plan) -> str:
    """The file of DeepSpeed's for a plan, as config/zero_stage*_config.json have it."""
    strategy = plan.strategy
    zero: dict[str, object] = {
        "stage": int(strategy.sharding[-1]),
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 5e8,
        "sub_group_size": 1e9,
    }
    if strategy.sharding == "zero-3":
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    for name, where in (("optimizer", strategy.offload_optimizer), ("param", strategy.offload_params)):
        if where != "none":
            zero[f"offload_{name}"] = {"device": where}
    auto = dict.fromkeys(("train_batch_size", "gradient_accumulation_steps", "gradient_clipping"), "auto")
    micro = {"train_micro_batch_size_per_gpu": plan.job.batch_size}
    return json.dumps({"bf16": {"enabled": True}, **micro, **auto, "zero_optimization": zero}, indent=2) + "\n"


ZERO_2 = "--deepspeed_config_file config/zero_stage2_config.json"
OFFLOADED = '"offload_optimizer": {"device": "cpu"}  # config/zero_stage%s_config.json, in "zero_optimization"'
"""A line of the file that the launcher names."""


def launched_by_deepspeed(stage: str, settings: Settings) -> list[str]:
    """Its own script under a stage of ZeRO, as its pages start it (scripts/README_TRAIN.md)."""
    launcher = f"accelerate launch --use_deepspeed {stage} --deepspeed_multinode_launcher standard"
    return [f"{launcher} {settings['script']} ... --use_deepspeed"]


def offloaded_by_deepspeed(stage: str, number: int, settings: Settings) -> list[str]:
    """The same with the optimizer in host RAM, which its configs have with the weights alone."""
    return ["\n".join([*launched_by_deepspeed(stage, settings), OFFLOADED % number])]
