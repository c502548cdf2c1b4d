"""SimpleTuner's key ``deepspeed_config``: DeepSpeed's own table, its JSON or the path to it, read at bc8e6ab
(helpers/training/trainer.py ``_load_deepspeed_plugin``, helpers/training/deepspeed.py)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from planner.dialects.base.bindings import Fields, Remark, Settings
from planner.dialects.base.engine_files.deepspeed_file import DEEPSPEED, of_deepspeed, unknown_keys
from planner.dialects.base.script import Script
from planner.dialects.base.values import integer
from planner.errors import VplanError, quoted
from planner.untrusted import flat

KEY = "deepspeed_config"
NOTHING = (None, "", "None", False)

USED, STAGE = "launch:--use_deepspeed", "launch:--zero_stage"
PINS = f"{DEEPSPEED}zero_optimization.offload_param.pin_memory"

WORKED_OUT = (
    *("zero_optimization.reduce_bucket_size", "zero_optimization.stage3_prefetch_bucket_size"),
    "zero_optimization.stage3_param_persistence_threshold",
)
"""Keys that "auto" makes a multiple of a width that it guesses from the model (``_infer_model_hidden_size``)."""

ACCUMULATION = f"{DEEPSPEED}gradient_accumulation_steps"

OTHERS = ("adagrad", "lamb", "onebitadam", "onebitlamb", "zerooneadam", "muadam", "muadamw", "musgd", "lion", "muon")
"""Other optimizers that DeepSpeed gets; what is in none of these becomes AdamW (helpers/training/
deepspeed_optimizers.py)."""

WARMUP = "lr_warmup_steps"

OWN_ADAM = f"{DEEPSPEED}optimizer.params.torch_adam"
"""Whether torch's AdamW steps, and not DeepSpeed's (DeepSpeed runtime/engine.py ``TORCH_ADAM_PARAM``)."""


def engine_settings(script: Script, value: Any) -> tuple[Settings, list[str]]:
    """The launcher's settings that the key's value makes, and notes. Raises a VplanError for what ends SimpleTuner, or
    is not priced."""
    if value in NOTHING:
        return {}, []
    keys = flat(_table(script, value), KEY)
    if not any(key.startswith("zero_optimization") for key in keys):
        fault = f"{KEY} without zero_optimization ends before training: accelerate asks for it"
        raise VplanError(fault, 'write {"zero_optimization": {"stage": 2}}')
    for key in WORKED_OUT:
        if keys.get(key) == "auto":
            raise VplanError(f"{KEY}'s {key} auto is guessed from the model, and not priced", "write a number")
    settings: Settings = {STAGE: 0} if "zero_optimization.stage" not in keys else {}
    settings |= {USED: True} | of_deepspeed(keys)
    if "zero_optimization.offload_param.device" in keys:
        settings.setdefault(PINS, True)  # ``prepare_model_for_deepspeed``
    unknown = unknown_keys(keys)
    return settings, [f"{KEY}: {', '.join(unknown[:4])} is no key that DeepSpeed is known to have"] if unknown else []


def _table(script: Script, value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    text = str(value).strip()
    if not text.startswith("{"):
        document = script.document(text)
        if document is None:
            fault = f"{KEY} {quoted(text)} is no JSON, and no file that is here: SimpleTuner ends without it"
            raise VplanError(fault, 'write {"zero_optimization": {"stage": 2}}, or give its file beside the config')
        return dict(document)
    try:
        table = json.loads(text)
    except json.JSONDecodeError as error:
        raise VplanError(f"{KEY} is no JSON: {error}", "write it as a table") from None
    if not isinstance(table, dict):
        raise VplanError(f"{KEY} is no table", "write it as a table")
    return table


def optimizer_of(settings: Settings) -> Fields:
    """The fields `optimizer` and `optimizer_step`: DeepSpeed's own AdamW, which one kernel steps, whatever the config's
    ``optimizer`` says (helpers/training/optimizer_param.py ``determine_optimizer_class_with_config``: ``DummyOptim``).
    Raises a VplanError for an optimizer that is not priced."""
    name = str(settings.get(f"{DEEPSPEED}optimizer.type", settings.get(f"{DEEPSPEED}optimizer.name", "AdamW")))
    if name.lower() in OTHERS:
        raise VplanError(f"{KEY}'s optimizer {quoted(name)} is not priced", "use AdamW")
    by_torch = settings.get(OWN_ADAM) or settings.get("launch:--offload_optimizer_device", "none") != "none"
    return {"optimizer": "adamw", "optimizer_step": "foreach" if by_torch else "fused"}


def stops(settings: Settings, world: int) -> Iterator[Remark]:
    """What DeepSpeed, or SimpleTuner's own check of it, ends a run for."""
    if not settings.get(USED):
        return
    if str(settings.get("config:model_type")) == "lora":
        where = "SimpleTuner's helpers/training/error_handling.py:15"
        yield Remark("model_type", f"refused as lora with DeepSpeed ({where})")
    own_schedule = any(name.startswith(f"{DEEPSPEED}scheduler") for name in settings)
    if not own_schedule and not integer(settings.get(f"config:{WARMUP}") or 0, WARMUP):
        yield Remark(WARMUP, "refused as 0 by DeepSpeed from 0.19.6 (deepspeed/runtime/lr_schedules.py:734)")
    batch, micro, steps = (
        settings.get(f"{DEEPSPEED}{key}")
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    micro = settings.get("config:train_batch_size", 4) if micro is None else micro
    steps = settings.get("config:gradient_accumulation_steps", 1) if steps is None else steps
    if batch is not None and batch != int(micro) * int(steps) * world:
        product = f"train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps {steps} x {world} GPUs"
        yield Remark(
            f"{KEY}'s train_batch_size", f"refused as {batch}: it is not {product} (DeepSpeed runtime/config.py)"
        )
