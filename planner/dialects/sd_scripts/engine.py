"""Number formats and engines of sd-scripts' scripts, read at 48d368f (flux_train.py, deepspeed_utils.py)."""

from __future__ import annotations

from collections.abc import Callable

from planner.dialects.base.bindings import Fields, InexpressibleError, Settings, UnsupportedValue
from planner.dialects.base.launchers import half_precision
from planner.spec.job import SPLIT
from planner.spec.rules import DEEPSPEED

AT = "sd-scripts 48d368f"
FULL, LORA = "flux_train.py", "flux_train_network.py"
SAVES_SHARES = f"under stage 3 its file has what one GPU has of the weights, most of them empty ({AT} `state_dict()`)"
"""DeepSpeed leaves those of up to 100,000 numbers whole (``stage3_param_persistence_threshold``)."""


def engine(settings: Settings) -> Fields:
    """Weights are loaded in the mixed precision's format and stay so in full training; adapters are fp32 unless all is
    asked for in 16 bits; --fp8_base is for a frozen base. ZeRO by its own flags."""
    fp8 = settings.get("--fp8_base") or settings.get("--fp8_base_unet")
    lora = str(settings.get("script")).endswith(LORA)
    return formats(settings, "fp8" if fp8 and lora else half_precision(settings))


def is_16_bits(settings: Settings) -> bool:
    """Whether all that is trained is in the mixed precision's 16 bits."""
    return half_precision(settings) != "fp32" and bool(settings.get("--full_bf16") or settings.get("--full_fp16"))


def formats(settings: Settings, weights: str) -> Fields:
    """Number formats and engine: the mixed precision is autocast's, and adapters are fp32 unless all that is trained is
    in 16 bits (train_network.py ``train``). ``weights``: the base's format, which is each script's own."""
    half = half_precision(settings)
    precision = {
        "weights_dtype": weights,
        "adapter_dtype": half if is_16_bits(settings) else "fp32",
        "autocast": half if half != "fp32" else "none",
    }
    return precision | sharded(settings)


def sharded(settings: Settings) -> Fields:
    """DDP on several GPUs, or ZeRO by the scripts' own flags (deepspeed_utils.py); with it comes DeepSpeed's
    precision."""
    fields: Fields = {
        "master_weights": "none",
        "offload_optimizer": "none",
        "offload_gradients": "none",
        "offload_params": "none",
        "sharding": "ddp" if int(settings.get("gpus", 1)) * int(settings.get("nodes", 1)) > 1 else "none",
    }
    stage = int(settings.get("--zero_stage", 2))
    if settings.get("--deepspeed") and stage:
        where = str(settings.get("--offload_optimizer_device", "none"))
        params = str(settings.get("--offload_param_device", "none")) if stage == 3 else "none"
        fields |= {**DEEPSPEED, "sharding": f"zero-{stage}", "offload_optimizer": where, "offload_params": params}
        fields["offload_gradients"] = where
    return fields


def write_engine(fields: Fields, script: str, to_fields: Callable[[Settings], Fields], fp8: str = "") -> Settings:
    """The flags that say them; an InexpressibleError for what they cannot. ``script``: whose flags; ``to_fields``: what
    that script makes of them; ``fp8``: its flag for a base in 8 bits."""
    settings: Settings = {"script": script}
    if fields["sharding"] == "fsdp":
        raise InexpressibleError(UnsupportedValue("sharding", "fsdp", "zero-2", "its engine is DeepSpeed"))
    if fields["sharding"] == "zero-3":
        raise InexpressibleError(UnsupportedValue("sharding", "zero-3", "zero-2", SAVES_SHARES))
    if fields["sharding"] in SPLIT:
        settings |= {"--deepspeed": True, "--zero_stage": str(fields["sharding"])[-1], "--mixed_precision": "bf16"}
        for field, flag in (("offload_optimizer", "optimizer"), ("offload_params", "param")):
            if fields[field] != "none":
                settings[f"--offload_{flag}_device"] = fields[field]
    else:
        weights = fields["weights_dtype"]
        half = weights if fields["autocast"] == "none" and weights in ("bf16", "fp16") else fields["autocast"]
        trained = "weights_dtype" if fields["method"] == "full" else "adapter_dtype"
        if half != "none":
            settings["--mixed_precision"] = half
            settings |= {f"--full_{half}": True} if fields[trained] == half else {}
        if weights == "fp8" and fp8:
            settings[fp8] = True
    result = to_fields(settings | {name: fields[name] for name in ("gpus", "nodes") if name in fields})
    alone = {"adapter_dtype"} if fields["method"] == "full" else set()
    wrong = [name for name in result if result[name] != fields[name] and name not in alone]
    if wrong:
        why = f"its number formats follow --mixed_precision, its engines --deepspeed ({AT})"
        raise InexpressibleError(*(UnsupportedValue(name, fields[name], result[name], why) for name in wrong))
    del settings["script"]
    if "--zero_stage" in settings:
        settings["--zero_stage"] = int(settings["--zero_stage"])
    return settings


SPLIT_MODE_SWAPS = 18
"""What ``--split_mode`` sets, unless ``--blocks_to_swap`` is given (flux_train_network.py:89)."""


def blocks_to_swap(settings: Settings) -> int:
    """What ``--blocks_to_swap`` is: given, or by an older flag of the script. Those of flux_train.py:285 count halves
    of two single blocks."""
    lora = str(settings.get("script")).endswith(LORA)
    older = SPLIT_MODE_SWAPS if lora and settings.get("--split_mode") else 0
    if not lora:
        older = int(settings.get("--double_blocks_to_swap") or 0)
        older += int(settings.get("--single_blocks_to_swap") or 0) // 2
    given = settings.get("--blocks_to_swap")
    return older if given is None else int(given)
