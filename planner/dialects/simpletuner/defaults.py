"""What SimpleTuner takes where a config leaves a key out: the defaults of its field registry, which its parser has
(helpers/configuration/cmd_args.py ``_add_argument_from_field``), read at bc8e6ab. A key that is null, empty or the word
"false" is left out too: the parser is not given it (helpers/configuration/cli_utils.py ``mapping_to_cli_args``)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

SECTIONS: dict[str, dict[str, Any]] = {
    "training": {
        "ema_device": "cpu",
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": True,
        "gradient_checkpointing_backend": "torch",
        "num_train_epochs": 1,
        "optimizer": "adamw_bf16",
        "ramtorch_text_encoder_percent": 100,
        "ramtorch_transformer_percent": 100,
        "train_batch_size": 4,
    },
    "model": {"base_model_precision": "no_change", "model_type": "full", "quantize_via": "accelerator"},
    "data": {
        "conditioning_multidataset_sampling": "random",
        "resolution": 1024,
        "resolution_type": "pixel_area",
        "vae_batch_size": 4,
    },
    "lora": {
        "lora_dropout": 0.1,
        "lora_rank": 16,
        "lora_type": "standard",
        "lycoris_config": "config/lycoris_config.json",
    },
    "advanced": {"aspect_bucket_alignment": 64, "dynamo_backend": "no", "mixed_precision": "bf16"},
    "flux": {"flux_lora_target": "all"},
}
"""File of simpletuner_sdk/server/services/field_registry/sections, and helpers/models/field_registry/flux.py -> key ->
its default. Keys that the reader has beside these are off there, or have none."""

DEFAULTS: dict[str, Any] = {key: value for keys in SECTIONS.values() for key, value in keys.items()}

REQUIRED = ("model_type", "optimizer")
"""Keys with a default that the parser asks for all the same (``ValidationRuleType.REQUIRED`` in sections/model.py and
training.py)."""

SAID = ("train_batch_size", "gradient_checkpointing")
"""Keys whose defaults are said: they change what a card needs most, and other trainers have others."""

TRUE = ("1", "true", "yes", "y", "on")
"""Words for a switch that is on (cmd_args.py BOOL_TRUE_STRINGS)."""


HANDLED = ("vae_cache_preprocess",)
"""Keys that the word "false" acts with (cli_utils.py ``_handle_legacy_vae_cache_preprocess``)."""


def is_left_out(name: str, value: Any) -> bool:
    """Whether a key of a config doesn't come to the parser."""
    return value is None or (isinstance(value, str) and value.strip().lower() in ("", "false") and name not in HANDLED)


def typed(value: str) -> str | bool:
    """A value that was typed behind the command, where the word "false" comes to the parser."""
    return {"true": True, "false": False}.get(value.lower(), value)


def is_true(value: Any) -> bool:
    """Whether the value of a switch has it on."""
    return str(value).strip().lower() in TRUE


def notes(given: Collection[str]) -> Iterator[str]:
    """What is assumed of keys that a config leaves out. ``given``: those that it has, or all of its data sets."""
    missing = [name for name in REQUIRED if name not in given]
    if missing:
        assumed = ", ".join(f"{name} {DEFAULTS[name]}" for name in missing)
        yield f"left out of the config, which SimpleTuner does not start without: {assumed} assumed"
    said = [f"{name} {_word(DEFAULTS[name])}" for name in SAID if name not in given]
    if said:
        yield f"left out of the config, so SimpleTuner's defaults: {', '.join(said)}"


def encoding_notes(given: Collection[str]) -> Iterator[str]:
    """What is not priced of images that are cached; of clips one is encoded at once unless their set says otherwise
    (helpers/data_backend/factory.py:4189)."""
    if "vae_batch_size" not in given:
        many = DEFAULTS["vae_batch_size"]
        yield f"vae_batch_size is left out: {many} images are encoded at once, not one as estimated, and take more"


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
