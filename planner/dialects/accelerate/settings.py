"""Plain accelerate: the config of its launcher and DeepSpeed's JSON, for a training script of the user's own.

It carries what a launcher decides: how work and states are split, where they are offloaded, mixed precision. All else
of a plan is the script's, and stands in the files as what the script has to do. Read at 16cb6eb
(src/accelerate/commands/launch.py, commands/config/config_args.py, utils/dataclasses.py).
"""

from __future__ import annotations

import json
from typing import Any

from planner.catalog import lookup
from planner.dialects.base import config_text
from planner.dialects.base.bindings import Fields, FunctionPair, InexpressibleError, Settings, UnsupportedValue, Value
from planner.dialects.base.dialect import Dialect
from planner.dialects.base.engine_files.fsdp_launch import BY_CLASS
from planner.layout.sharding.zero import DEEPSPEED
from planner.spec.plan import Plan
from planner.spec.rules import DEEPSPEED as FORMATS

AT = "accelerate 16cb6eb"
CLIP = 1.0
"""``gradient_clipping``, as our own trainer clips."""

ENGINE = (
    *("sharding", "fsdp_replicas", "gpus", "nodes"),
    *("offload_optimizer", "offload_gradients", "offload_params", "autocast", "compute_dtype"),
    *("master_weights", "gradient_accumulation", "batch_size"),
)
KINDS = {"none": "NO", "ddp": "MULTI_GPU", "fsdp": "FSDP"}
_KIND, _MIXED = "config:distributed_type", "config:mixed_precision"
_ZERO = "deepspeed:zero_optimization."
_FSDP = "config:fsdp_config.fsdp_"
_MESH = "config:parallelism_config.parallelism_config_dp_"
CARRIES: config_text.FieldsBySetting = {
    _KIND: ("sharding",),
    _MIXED: ("autocast", "compute_dtype"),
    "config:num_processes": ("gpus", "nodes"),
    "config:num_machines": ("nodes",),
    "config:deepspeed_config.deepspeed_config_file": ("sharding",),
    "config:deepspeed_config.zero3_init_flag": ("sharding",),
    f"{_FSDP}version": ("sharding",),
    f"{_FSDP}offload_params": ("offload_params", "offload_optimizer"),
    f"{_MESH}replicate_size": ("fsdp_replicas",),
    f"{_MESH}shard_size": ("fsdp_replicas",),
    f"{_ZERO}stage": ("sharding",),
    f"{_ZERO}offload_optimizer.device": ("offload_optimizer", "offload_gradients"),
    f"{_ZERO}offload_param.device": ("offload_params",),
    "deepspeed:bf16.enabled": ("compute_dtype", "master_weights"),
    "deepspeed:fp16.enabled": ("compute_dtype", "master_weights"),
    "deepspeed:gradient_accumulation_steps": ("gradient_accumulation",),
    "deepspeed:train_micro_batch_size_per_gpu": ("batch_size",),
}
SETTINGS = tuple(CARRIES)


def _of(settings: Settings) -> Fields:
    kind, nodes = settings[_KIND], settings.get("config:num_machines", 1)
    mixed = settings.get(_MIXED, "no")
    fields: Fields = {
        "sharding": next((name for name, word in KINDS.items() if word == kind), "none"),
        "fsdp_replicas": settings.get(f"{_MESH}replicate_size", 1),
        "gpus": settings["config:num_processes"] // nodes,
        "nodes": nodes,
        "autocast": "none" if mixed == "no" else mixed,
        "compute_dtype": "bf16",
        "master_weights": "none",
        "gradient_accumulation": 1,
        "batch_size": 1,
        **dict.fromkeys(("offload_optimizer", "offload_gradients", "offload_params"), "none"),
    }
    if kind == "FSDP":
        where = "cpu" if settings.get(f"{_FSDP}offload_params") else "none"
        compute = "fp32" if mixed == "no" else mixed
        fields |= {"autocast": "none", "compute_dtype": compute, "offload_optimizer": where, "offload_params": where}
    if kind == "DEEPSPEED":
        stage = settings[f"{_ZERO}stage"]
        optimizer = settings.get(f"{_ZERO}offload_optimizer.device", "none")
        fields |= {
            "sharding": f"zero-{stage}",
            "autocast": "none",
            "master_weights": "fp32",
            "compute_dtype": "fp16" if settings.get("deepspeed:fp16.enabled") else "bf16",
            "offload_optimizer": optimizer,
            "offload_gradients": optimizer if stage > 1 else "none",
            "offload_params": settings.get(f"{_ZERO}offload_param.device", "none"),
            "gradient_accumulation": settings["deepspeed:gradient_accumulation_steps"],
            "batch_size": settings["deepspeed:train_micro_batch_size_per_gpu"],
        }
    return fields


def _write(fields: Fields) -> Settings:
    sharding, world = fields["sharding"], fields["gpus"] * fields["nodes"]
    alone = sharding in ("none", "ddp")
    if alone and (sharding == "ddp") != (world > 1):
        why = f"it wraps a model in DDP on several GPUs, and only there ({AT} Accelerator.prepare_model)"
        raise InexpressibleError(UnsupportedValue("sharding", sharding, "ddp" if world > 1 else "none", why))
    settings: Settings = {_KIND: KINDS.get(sharding, "DEEPSPEED"), "config:num_processes": world}
    if fields["nodes"] > 1:
        settings["config:num_machines"] = fields["nodes"]
    if alone:
        settings[_MIXED] = "no" if fields["autocast"] == "none" else fields["autocast"]
        return settings  # accumulation, batch size and offloading are the script's there
    if sharding == "fsdp":
        settings |= _fsdp(fields)
    else:
        settings |= _deepspeed(fields)
    result = _of(settings)
    carries = set(ENGINE) - ({"gradient_accumulation", "batch_size", "master_weights"} if sharding == "fsdp" else set())
    wrong = [name for name in ENGINE if name in carries and result[name] != fields[name]]
    if wrong:
        why = f"{AT} does it so with {sharding}"
        raise InexpressibleError(*(UnsupportedValue(name, fields[name], result[name], why) for name in wrong))
    return settings


def _fsdp(fields: Fields) -> Settings:
    settings: Settings = {f"{_FSDP}version": 2}
    settings[_MIXED] = {"fp32": "no"}.get(fields["compute_dtype"], fields["compute_dtype"])
    if fields["offload_params"] == "cpu":
        settings[f"{_FSDP}offload_params"] = True
    if (copies := fields["fsdp_replicas"]) > 1:
        settings[f"{_MESH}replicate_size"] = copies
        settings[f"{_MESH}shard_size"] = fields["gpus"] * fields["nodes"] // copies
    return settings


def _deepspeed(fields: Fields) -> Settings:
    stage = int(fields["sharding"][-1])
    settings: Settings = {
        "config:deepspeed_config.deepspeed_config_file": "deepspeed.json",
        "config:deepspeed_config.zero3_init_flag": False,
        f"{_ZERO}stage": stage,
        "deepspeed:bf16.enabled": fields["compute_dtype"] != "fp16",
        "deepspeed:fp16.enabled": fields["compute_dtype"] == "fp16",
        "deepspeed:gradient_accumulation_steps": fields["gradient_accumulation"],
        "deepspeed:train_micro_batch_size_per_gpu": fields["batch_size"],
    }
    if fields["offload_optimizer"] != "none":
        settings[f"{_ZERO}offload_optimizer.device"] = fields["offload_optimizer"]
    if fields["offload_params"] != "none" and stage == 3:  # no other stage splits parameters
        settings[f"{_ZERO}offload_param.device"] = fields["offload_params"]
    return settings


_WORDS = {
    "sharding": "distributed_type, ZeRO stages 1 to 3, FSDP2",
    "fsdp_replicas": "dp_replicate_size and dp_shard_size of parallelism_config",
    "gpus": "num_processes",
    "nodes": "num_machines",
    "offload_optimizer": "with ZeRO: cpu, nvme; with FSDP: together with params",
    "offload_gradients": "with ZeRO-2 and 3: where the optimizer is",
    "offload_params": "with ZeRO-3: cpu, nvme; with FSDP: cpu",
    "autocast": "mixed_precision without an engine",
    "compute_dtype": "bf16 or fp16 with ZeRO, mixed_precision with FSDP",
    "master_weights": "fp32 with ZeRO",
    "gradient_accumulation": "with ZeRO; else the script's",
    "batch_size": "with ZeRO; else the script's",
}

UNNAMED_BLOCKS = {
    "ErnieImageTransformer2DModel": ("ErnieImageSharedAdaLNBlock",),
    "LTXVideoTransformer3DModel": ("LTXVideoTransformerBlock",),
    "LTX2VideoTransformer3DModel": ("LTX2VideoTransformerBlock",),
    "HunyuanVideoTransformer3DModel": ("HunyuanVideoTransformerBlock", "HunyuanVideoSingleTransformerBlock"),
    "UNet2DConditionModel": ("CrossAttnDownBlock2D", "DownBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
}
"""Classes of diffusers 0.42.1 whose `_no_split_modules` do not say their blocks -> the blocks. It has none; or a UNet's
lie inside them; or accelerate ends because a model has not all (HunyuanVideo's are those of token replacement too)."""

DYNAMO = "config:dynamo_config."


def _compile_of(settings: Settings) -> Fields:
    if settings.get(f"{DYNAMO}dynamo_backend", "NO") == "NO":
        return {"compile": "none"}
    return {"compile": "blocks" if settings.get(f"{DYNAMO}dynamo_use_regional_compilation") else "full"}


def _compile_write(fields: Fields) -> Settings:
    if fields["compile"] == "none":
        return {}
    settings: Settings = {f"{DYNAMO}dynamo_backend": "INDUCTOR"}
    if fields["compile"] == "blocks":
        settings[f"{DYNAMO}dynamo_use_regional_compilation"] = True
    return settings


def files(plan: Plan, settings: Settings) -> dict[str, str]:
    """name -> text of accelerate.yaml, deepspeed.json where DeepSpeed is used, and launch.sh, which starts a script."""
    carries = config_text.fields_by_setting(DIALECT, settings, CARRIES)
    config = config_text.tree(settings, "config:")
    texts: dict[str, str] = {}
    if "deepspeed_config" in config:
        texts["deepspeed.json"] = json.dumps(_json(settings), indent=2) + "\n"
        config["deepspeed_config"]["deepspeed_multinode_launcher"] = "standard"
        config.pop("mixed_precision", None)  # accelerate refuses it beside a file of DeepSpeed's
    if "fsdp_config" in config:
        blocks = UNNAMED_BLOCKS.get(lookup.model(plan.job.model).diffusers_class)
        config["fsdp_config"] |= {
            "fsdp_auto_wrap_policy": BY_CLASS,  # diffusers' own `_no_split_modules` say which blocks, or these:
            **({"fsdp_transformer_layer_cls_to_wrap": ",".join(blocks)} if blocks else {}),
            "fsdp_reshard_after_forward": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": False,
        }
    config = {"compute_environment": "LOCAL_MACHINE", **config, "machine_rank": 0, "main_training_function": "main"}
    head = "accelerate's config. The comment after each line names its plan field."
    texts["accelerate.yaml"] = config_text.yaml(config, config_text.comments(carries, "config:"), head)
    texts["launch.sh"] = _script(plan, carries, settings)
    return texts


def _json(settings: Settings) -> dict[str, Any]:
    """DeepSpeed's JSON with the sizes that the estimate took."""
    config = config_text.tree(settings, "deepspeed:")
    zero = config["zero_optimization"]
    for name in ("offload_optimizer", "offload_param"):
        if name in zero:
            zero[name] |= {"pin_memory": True}
            if zero[name]["device"] == "nvme":
                zero[name]["nvme_path"] = "/local_nvme"
    zero |= {"reduce_bucket_size": DEEPSPEED.reduce_bucket, "sub_group_size": DEEPSPEED.sub_group}
    if zero["stage"] == 3:
        zero |= {
            "stage3_prefetch_bucket_size": DEEPSPEED.prefetch,
            "stage3_max_live_parameters": DEEPSPEED.max_live,
            "stage3_max_reuse_distance": DEEPSPEED.max_reuse,
            "stage3_param_persistence_threshold": DEEPSPEED.persistent,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    config |= {"gradient_clipping": CLIP, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    return config


_ADAPTERS = ("adapter", "lokr_factor", "lora_rank", "lora_targets", "lora_dropout", "adapter_dtype")

_ALWAYS_LISTED = ("text_encoder", "vae")
"""What scripts do differently enough that it is said at its default too. So is `gradient_as_bucket_view` under DDP:
torch's default is a copy (accelerate.DistributedDataParallelKwargs)."""


def left_to_the_script(plan: Plan) -> dict[str, object]:
    """Plan fields, not at their defaults, that no launcher carries: what the training script has to do itself."""
    bound = {field for binding in DIALECT.bindings for field in binding.fields}
    if plan.strategy.sharding in ("none", "ddp", "fsdp"):
        bound -= {"gradient_accumulation", "batch_size", "master_weights"}
    if plan.strategy.sharding in ("none", "ddp"):
        bound -= {"offload_optimizer", "offload_gradients", "offload_params"}
    formats = FORMATS if plan.strategy.sharding.startswith("zero") else {}
    left: dict[str, object] = {}
    for title, record in (("job", plan.job), ("strategy", plan.strategy)):
        for name, info in type(record).model_fields.items():
            value = getattr(record, name)
            usual = formats.get(name, info.get_default() if not info.is_required() else None)
            if name in bound or (plan.job.method == "full" and name in _ADAPTERS):
                continue
            always = name in _ALWAYS_LISTED or (name == "grad_buckets" and plan.strategy.sharding == "ddp")
            if always or value not in (usual, ()):
                left[f"{title}.{name}"] = value
    return left


def _script(plan: Plan, carries: dict[str, tuple[str, ...]], settings: Settings) -> str:
    lines = ["#!/bin/bash", "# Starts your own training script: bash launch.sh train.py --its flags", "set -e"]
    lines += ["# What the script must do itself to match the plan:"]
    lines += [f"#   {name} = {json.dumps(value, default=str)}" for name, value in left_to_the_script(plan).items()]
    if "deepspeed:gradient_accumulation_steps" in settings:
        lines += ["# deepspeed.json takes no comments. It carries:"]
        lines += [
            f"#   {name[10:]}: {', '.join(fields)}" for name, fields in carries.items() if name.startswith("deepspeed:")
        ]
    if plan.strategy.expandable_segments:
        lines += ["export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True  # strategy.expandable_segments"]
    words = "accelerate launch --config_file accelerate.yaml"
    if plan.machine.nodes > 1:
        lines += ['MACHINE_RANK="${MACHINE_RANK:-0}"  # 0 on the first node, 1 on the next, ...']
        lines += ['MAIN_ADDRESS="${MAIN_ADDRESS:-127.0.0.1}"  # of the first node']
        words += ' --machine_rank "$MACHINE_RANK" --main_process_ip "$MAIN_ADDRESS" --main_process_port 29500'
    return "\n".join([*lines, f'{words} "$@"']) + "\n"


DIALECT = Dialect(
    name="accelerate",
    title="accelerate",
    source="https://github.com/huggingface/accelerate at 16cb6eb",
    scripts=(),
    user_loop=True,
    table=(
        FunctionPair(ENGINE, SETTINGS, _of, _write, _WORDS),
        FunctionPair(
            ("compile",),
            (f"{DYNAMO}dynamo_backend", f"{DYNAMO}dynamo_use_regional_compilation"),
            _compile_of,
            _compile_write,
            {"compile": "none, blocks, full"},
        ),
        Value("expandable_segments", "env:expandable_segments", False),
    ),
    files=files,
)
