"""OneTrainer's config: the files that ``scripts/train.py`` reads, and how their keys are looked up, which move from one
``__version`` to the next (modules/util/config/TrainConfig.py at 23df3832)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from planner.dialects.base import flags
from planner.dialects.base.bindings import Settings
from planner.dialects.base.dialect import Invocation
from planner.dialects.base.script import Script
from planner.errors import VplanError
from planner.untrusted import flat

CONFIG = "config:"
SIGNS = frozenset({"training_method", "model_type", "base_model_name"})

PARTS = ("transformer", "unet", "prior")
"""What its kinds of models call the part that is trained."""

CHECKPOINTS = "gradient_checkpointing"
"""Our field, and its key of a part."""

PARTS_SINCE = 11
"""The first ``__version`` that says per part what is checkpointed and offloaded."""

OLD_CHECKPOINTS = f"{CONFIG}gradient_checkpointing"


def read_script(script: Script) -> Invocation | None:
    """A config or preset, alone or as its command names it: by keys of the first level that together only it has."""
    config = script.config
    for program in script.programs:
        if program.script.endswith("scripts/train.py") and "--config-path" in program.arguments[:-1]:
            config = _of_command(script, program.arguments)
    if config is None or not config.keys() >= SIGNS:
        return None
    parsed = flags.script("onetrainer", "config.json").parse_config(config)
    inside = flat(config, script.name)
    settings = {"script": "config.json", **{f"{CONFIG}{name}": value for name, value in inside.items()}}
    return Invocation("onetrainer", settings, parsed.unknown, notes=script.notes)


def _of_command(script: Script, arguments: Sequence[str]) -> dict[str, Any]:
    """What ``scripts/train.py`` reads: ``--preset-path``, over it ``--config-path``, over both each ``--config-value
    KEY=VALUE`` with dots between names."""
    config: dict[str, Any] = {}
    for flag, value in itertools.pairwise(arguments):
        if flag in ("--preset-path", "--config-path"):
            document = script.document(value)
            if document is None:
                raise VplanError(script.missing(value), "run vplan where the command would run, or pass the config")
            config = _over(config, document) if flag == "--config-path" else _over(document, config)
    for flag, value in itertools.pairwise(arguments):
        if flag == "--config-value":
            name, _, text = value.partition("=")
            *parts, key = name.split(".")
            inside: dict[str, Any] = {key: {"true": True, "false": False}.get(text.lower(), text)}
            for part in reversed(parts):
                inside = {part: inside}
            config = _over(config, inside)
    return config


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """One config over another, part by part."""
    both = {
        key: _over(below[key], value)
        for key, value in above.items()
        if isinstance(value, Mapping) and isinstance(below.get(key), Mapping)
    }
    return {**below, **above, **both}


def value_of(settings: Settings, name: str, default: Any = None) -> Any:
    """What a config says of a key, its tables' names and dots before it; the default where it does not."""
    return settings.get(CONFIG + name, default)


def part_value(settings: Settings, key: str, default: Any = None) -> Any:
    """What a config says of a key of the part that is trained."""
    values = (value_of(settings, f"{part}.{key}") for part in PARTS)
    return next((value for value in values if value is not None), default)


def trained_part(settings: Settings) -> str:
    """Its name for the part that is trained."""
    return next((part for part in PARTS if any(key.startswith(f"{CONFIG}{part}.") for key in settings)), PARTS[0])


def is_old(settings: Settings) -> bool:
    """Whether checkpoints and offloading are said for all parts, as before version 11: what parts say of them is
    overwritten then (``TrainConfig.__migration_10``)."""
    return int(value_of(settings, "__version", 0)) < PARTS_SINCE and OLD_CHECKPOINTS in settings


def swapped_share(settings: Settings) -> float:
    """Of the layers of the part that is trained, how much waits in host RAM."""
    if not is_old(settings):
        return float(part_value(settings, "offload_fraction", 0.0) or 0.0)
    offloads = settings[OLD_CHECKPOINTS] == "CPU_OFFLOADED"
    return float(value_of(settings, "layer_offload_fraction", 0.0) or 0.0) if offloads else 0.0


EXCLUSIVE = ("fused", "foreach")
"""Settings of its optimizer that AdamW takes without ``fused_back_pass`` alone."""


def optimizer_switch(settings: Settings, key: str) -> bool:
    """A switch of its optimizer; where it is not said, that of the defaults which the config keeps for it."""
    name = str(value_of(settings, "optimizer.optimizer", "ADAMW"))
    value = value_of(settings, f"optimizer.{key}")
    return bool(value_of(settings, f"optimizer_defaults.{name}.{key}", False) if value is None else value)
