"""DeepSpeed's JSON that a launch names: what of it is a field of ours, and the keys that act at its stage.

Read in DeepSpeed edaa7221 and 0.19.8 (runtime/zero/config.py, stage_1_and_2.py, stage3.py, runtime/config.py). What the
other keys do to memory is in profiles/flag_effects/deepspeed.toml.
"""

from __future__ import annotations

from typing import Any

from planner.dialects.base import flags
from planner.dialects.base.bindings import Settings
from planner.errors import VplanError, quoted
from planner.layout.run_records import ZeroSettings

DEEPSPEED = "deepspeed:"
ZERO = "zero_optimization."
TRANSLATED = {
    "zero_optimization.stage": "launch:--zero_stage",
    "zero_optimization.offload_optimizer.device": "launch:--offload_optimizer_device",
    "zero_optimization.offload_param.device": "launch:--offload_param_device",
}
SIZES = {
    "reduce_bucket_size": "reduce_bucket",
    "sub_group_size": "sub_group",
    "stage3_prefetch_bucket_size": "prefetch",
    "stage3_param_persistence_threshold": "persistent",
    "stage3_max_live_parameters": "max_live",
    "stage3_max_reuse_distance": "max_reuse",
    "overlap_comm": "overlap",
    "offload_param.pin_memory": "pin_params",
    "offload_optimizer.pin_memory": "pin_optimizer",
}
"""Keys of ``zero_optimization`` that an estimate takes as they are -> fields of a ZeroSettings."""

SWITCHES = ("overlap", "pin_params", "pin_optimizer")
"""Those of them that are on or off."""

OLDER = {"zero_optimization.cpu_offload": "optimizer", "zero_optimization.cpu_offload_param": "param"}
"""Switches that said the device before (``DeepSpeedZeroConfig``)."""

OF_STAGE_3 = (
    *("stage3_", "zero_hpz_partition_size", "zero_quantized_", "memory_efficient_linear", "leaf_module"),
    *("sub_group_size", "offload_param."),
)
"""Starts of keys that act in stage 3 alone."""

OF_STAGES_1_AND_2 = ("overlap_comm", "contiguous_gradients", "round_robin_gradients")
"""Stage 3 reduces beside the backward pass unless it is told not to, and always has its bucket."""


def of_deepspeed(document: Settings) -> Settings:
    """The launcher's settings of a file's keys, tables joined with dots. What is "auto" accelerate fills in, from the
    script and from mixed precision."""
    values = {key: _number(value) for key, value in document.items() if value not in ("auto", None)}
    settings: Settings = {name: values[key] for key, name in TRANSLATED.items() if key in values}
    for key, what in OLDER.items():
        if values.get(key):
            settings.setdefault(f"launch:--offload_{what}_device", "cpu")
    halves = [values.get(f"{name}.enabled", document.get(f"{name}.enabled")) for name in ("bf16", "fp16")]
    if not any(halves) and any(half is False for half in halves):
        fault = "bf16 and fp16 of DeepSpeed's config are off: it trains in fp32, which is not priced"
        raise VplanError(fault, "set bf16.enabled to true")
    idle = OF_STAGES_1_AND_2 if values.get("zero_optimization.stage") == 3 else OF_STAGE_3
    kept = {
        f"{DEEPSPEED}{key}": value
        for key, value in values.items()
        if key not in TRANSLATED and not key.removeprefix(ZERO).startswith(idle)
    }
    return settings | kept


def zero_settings(settings: Settings) -> ZeroSettings | None:
    """The sizes that a launch's file sets, else DeepSpeed's; None where it names no file. Raises a VplanError for one
    that is no number."""
    if not any(name.startswith(DEEPSPEED) for name in settings):
        return None
    given = {field: settings.get(f"{DEEPSPEED}{ZERO}{key}") for key, field in SIZES.items()}
    found: dict[str, Any] = {}
    for field, value in given.items():
        if value is None:
            continue
        if field not in SWITCHES and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
            raise VplanError(f"{quoted(value)} is no number of elements", "write 500000000, or 5e8")
        found[field] = bool(value) if field in SWITCHES else int(value)
    return ZeroSettings(**found)


def unknown_keys(document: Settings) -> tuple[str, ...]:
    """The keys that DeepSpeed does not have."""
    known = flags.script("deepspeed", "config.json").flags
    return tuple(key for key in document if not any(_is_of(key, name) for name in known))


def _is_of(key: str, name: str) -> bool:
    return key == name or key.startswith((f"{name}.", f"{name}["))


def _number(value: object) -> object:
    """YAML takes `5e8` for text, which JSON has as a number."""
    if not isinstance(value, str) or not value.replace("e", "", 1).replace(".", "", 1).replace("+", "", 1).isdigit():
        return value
    try:
        return float(value)
    except ValueError:
        raise VplanError(f"{quoted(value)} is no number", "write 500000000, or 5e8") from None
