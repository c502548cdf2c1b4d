"""SimpleTuner's files, complete: config.json, the sets of its data file, and what starts it, as its quickstarts have
them (documentation/quickstart/FLUX.md and WAN.md at bc8e6ab)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from planner.catalog import lookup
from planner.dialects.base import config_text
from planner.dialects.base.bindings import Settings
from planner.dialects.simpletuner import engines
from planner.dialects.simpletuner.aspect_buckets import BUCKETS, DATASET
from planner.dialects.simpletuner.data_file import REFERENCE_SETS
from planner.dialects.simpletuner.models import CONFIG
from planner.spec.plan import Plan

CONFIG_FILE, DATA_FILE = "config/config.json", "config/multidatabackend.json"
IMAGE_TO_VIDEO = "i2v-"
"""The beginning of a ``model_flavour`` whose sets are image-to-video whatever they say (helpers/data_backend/factory.py
``force_i2v``)."""

RATES = {"lora": 1e-4, "full": 1e-5}
"""``learning_rate`` by method."""

OWN_RATE = {"prodigy": 1.0}
"""The same by ``optimizer``, of one that finds its own and takes no warm-up (helpers/training/optimizer_param.py)."""

STEPS = {"max_train_steps": 2000, "num_train_epochs": 0}
"""One of both is 0 (helpers/configuration/cmd_args.py)."""


def files(plan: Plan, settings: Settings, carried: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """name -> text. ``carried``: setting -> the Plan fields that it carries."""
    sets = _sets(settings, lookup.model(plan.job.model).kind)
    return {
        DATA_FILE: _json(sets),
        CONFIG_FILE: _json(_config(plan, config_text.tree(settings, CONFIG) | engines.config_keys(plan))),
        "train.sh": _script(plan, carried),
    }


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _config(plan: Plan, keys: dict[str, Any]) -> dict[str, Any]:
    own_rate = OWN_RATE.get(keys["optimizer"])
    adapter = {"lora_type": "standard", "lora_alpha": plan.job.lora_rank} if plan.job.method == "lora" else {}
    schedule: Settings = {"learning_rate": own_rate or RATES[plan.job.method], "lr_scheduler": "constant"}
    if own_rate is None:
        schedule |= {"lr_scheduler": "constant_with_warmup", "lr_warmup_steps": 100}
    return {
        **{name: keys.pop(name) for name in ("model_family", "model_flavour", "model_type")},
        **{name: keys.pop(name) for name in ("lora_rank", "lora_dropout") if name in keys},
        **adapter,
        "data_backend_config": DATA_FILE,
        "output_dir": "output",
        "seed": 42,
        **keys,
        **schedule,
        **STEPS,
        "checkpoint_step_interval": 250,
        "checkpoints_total_limit": 4,
        "validation_disable": True,
        "report_to": "none",
        "push_to_hub": False,
    }


def _sets(settings: Settings, kind: str) -> list[dict[str, Any]]:
    """The samples, what conditions them, and the cache of their captions."""
    own = config_text.tree(settings, DATASET)
    names = own.pop("conditioning_data", [])
    if kind == "video" and settings[f"{CONFIG}model_flavour"].startswith(IMAGE_TO_VIDEO):
        own["video"]["is_i2v"] = True
    crop: Settings = {"crop": False}
    if BUCKETS in settings:
        crop = {"crop": True, "crop_style": "center", "crop_aspect": "closest"}
    keys = ("resolution", "resolution_type", "crop_aspect_buckets")
    size: Settings = {name: own.pop(name) for name in keys if name in own}
    samples = _set("my-set", kind, {"caption_strategy": "textfile", **crop, **size, **own})
    if REFERENCE_SETS in settings:
        samples["conditioning_data"] = names
    references: Settings = {"conditioning_type": "reference_strict", **crop, **size}
    texts = {"id": "text-embeds", "type": "local", "dataset_type": "text_embeds", "default": True}
    return [
        samples,
        *(_set(name, "conditioning", references) for name in names),
        {**texts, "cache_dir": "cache/text"},
    ]


def _set(name: str, kind: str, more: Mapping[str, Any]) -> dict[str, Any]:
    folders = {"instance_data_dir": f"data/{name.replace('-', '_')}", "cache_dir_vae": f"cache/vae/{name}"}
    return {"id": name, "type": "local", "dataset_type": kind, **folders, **more}


def _script(plan: Plan, carried: Mapping[str, tuple[str, ...]]) -> str:
    """What starts it: JSON has no comments, so that the fields of its keys stand here."""
    lines = ["#!/bin/bash", "set -e"]
    lines += ["# pip install 'simpletuner[cuda]', and put samples, each with a .txt of its caption, into data/my_set."]
    for prefix, name in ((CONFIG, CONFIG_FILE), (DATASET, DATA_FILE)):
        rows = {key.removeprefix(prefix): own for key, own in carried.items() if key.startswith(prefix)}
        lines += [f"# Which key of {name} holds which field of the plan:"]
        lines += [f"#   {key}: {', '.join(own)}" for key, own in rows.items()]
    if plan.strategy.expandable_segments:
        lines += ["export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"]
    if plan.machine.world > 1:
        lines += [f"export TRAINING_NUM_PROCESSES={plan.machine.world}"]
    if plan.machine.nodes > 1:
        lines += [f"export TRAINING_NUM_MACHINES={plan.machine.nodes}"]
    return "\n".join([*lines, "simpletuner train", ""])
