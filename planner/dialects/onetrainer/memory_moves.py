"""What saves memory in OneTrainer's config, and what a user writes for it, read at 23df3832."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from planner.catalog import lookup
from planner.dialects.base.bindings import Fields, InexpressibleError, Settings, UnsupportedValue
from planner.dialects.base.block_swap import in_parts
from planner.dialects.base.dialect import Move
from planner.dialects.onetrainer.models import largest_encoder, offloads
from planner.dialects.onetrainer.train_config import (
    CHECKPOINTS,
    CONFIG,
    EXCLUSIVE,
    OLD_CHECKPOINTS,
    is_old,
    optimizer_switch,
    trained_part,
    value_of,
)
from planner.layout.trainer_terms.onetrainer import ENCODERS_OFFLOADED
from planner.spec.job import QUANTISED

THREADS = 2
"""The default of ``dataloader_threads``."""

LEAST_LOADED = 2
"""Layers that are on the GPU whatever is asked for (modules/util/LayerOffloadConductor.py ``__get_layers_below``)."""


def _in_part(key: str, value: str) -> Callable[[Settings], list[str]]:
    """The words of a setting of the part that is trained, as `Move.words_for` has them."""
    return lambda settings: [f"{trained_part(settings)}.{key}: {value}"]


def changed_checkpoints(settings: Settings, before: Fields, after: Fields) -> Settings:
    """The settings that say checkpoints of the part that is trained, and whether they wait in host RAM."""
    mode = after["gradient_checkpointing"]
    if is_old(settings):
        swaps = bool(after["swap_blocks"])
        word = "OFF" if mode == "none" else "CPU_OFFLOADED" if swaps or mode == "offload" else "ON"
        away = {} if word != "CPU_OFFLOADED" else {f"{CONFIG}enable_activation_offloading": mode == "offload"}
        return {OLD_CHECKPOINTS: word, **away}
    part = f"{CONFIG}{trained_part(settings)}"
    away = {f"{part}.activation_offloading": mode == "offload"} if "offload" in (mode, before[CHECKPOINTS]) else {}
    return {f"{part}.gradient_checkpointing": mode != "none", **away}


def changed_swap(settings: Settings, before: Fields, after: Fields) -> Settings:
    """The settings that say how much of the layers waits in host RAM. In older configs checkpoints are offloaded by the
    same word."""
    blocks = lookup.model(after["model"]).blocks
    share = round(after["swap_blocks"] / blocks, 3)
    if not is_old(settings):
        return {f"{CONFIG}{trained_part(settings)}.offload_fraction": share}
    same = before[CHECKPOINTS] == after[CHECKPOINTS]
    checkpoints = changed_checkpoints(settings, before, after) if same else {}
    return {f"{CONFIG}layer_offload_fraction": share, **checkpoints}


def _more_swapped(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    """More layers in host RAM than now, at most all but two. Checkpoints are needed for it
    (modules/util/checkpointing_util.py ``enable_checkpointing``)."""
    most = lookup.model(fields["model"]).blocks - LEAST_LOADED
    checkpoints = {CHECKPOINTS: "full"} if fields[CHECKPOINTS] == "none" else {}
    return tuple({"swap_blocks": blocks, **checkpoints} for blocks in in_parts(most, fields["swap_blocks"]))


def _may_swap(fields: Fields) -> bool:
    """Full training offloads layers with an optimizer that steps in backward alone (modules/util/create.py
    ``create_optimizer``)."""
    may_leave = fields["method"] == "lora" or fields["optimizer_step"] == "backward"
    return bool(may_leave and offloads(fields["model"]))


def _with_encoders_offloaded(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    """The version with the text encoders' layers in host RAM, unless it is this one."""
    parts = [part for part in (fields["version"], ENCODERS_OFFLOADED) if part]
    return () if str(fields["version"]).endswith(ENCODERS_OFFLOADED) else ({"version": "-".join(parts)},)


def _encoder_words(settings: Settings) -> list[str]:
    """The setting by which the largest text encoder's layers wait in host RAM, with which one thread alone may cache
    (modules/util/create.py ``create_data_loader``). Raises an InexpressibleError for older configs, which say one
    fraction for all parts."""
    if is_old(settings):
        raise InexpressibleError(
            UnsupportedValue("version", ENCODERS_OFFLOADED, "", "one fraction is that of all parts")
        )
    threads = ["dataloader_threads: 1"] if int(value_of(settings, "dataloader_threads", THREADS)) > 1 else []
    return [f"{largest_encoder(settings)}.offload_fraction: 1.0", *threads]


def _may_step_in_backward(fields: Fields) -> bool:
    return (fields["method"], fields["gradient_accumulation"]) == ("full", 1)


def _fused_backward_words(settings: Settings) -> list[str]:
    """``fused_back_pass``, and without what forbids it: its window's AdamW has ``fused`` on
    (modules/util/optimizer_util.py ``OPTIMIZER_DEFAULT_PARAMETERS``)."""
    return [
        "optimizer.fused_back_pass: true",
        *(f"optimizer.{way}: false" for way in EXCLUSIVE if optimizer_switch(settings, way)),
    ]


def _quantised_base(dtype: str, word: str, what: str) -> Move:
    """Quantising the base of an adapter. ``dtype``: ours; ``word``: its name of it; ``what``: in words."""
    return Move(
        {"weights_dtype": dtype},
        what,
        words_for=_in_part("weight_dtype", word),
        when=lambda fields: fields["method"] == "lora" and fields["weights_dtype"] not in QUANTISED,
    )


MOVES = (
    Move({"expandable_segments": True}, "free"),
    Move({"optimizer": "adamw-8bit"}, "8-bit optimizer states"),
    Move({CHECKPOINTS: "full"}, "one more forward pass", when=lambda fields: fields[CHECKPOINTS] == "none"),
    Move(
        {CHECKPOINTS: "offload"},
        "slower, and host RAM for the checkpoints",
        when=lambda fields: offloads(fields["model"]),
    ),
    Move(
        {"vae": "cached", "text_encoder": "cached"},
        "disk for latents and prompts, which are no longer changed at random",
        words_for=lambda settings: ["latent_caching: true"],
    ),
    Move(
        {"swap_blocks": 1, CHECKPOINTS: "full"},
        "slower, and host RAM for the layers",
        by_fields=_more_swapped,
        when=_may_swap,
    ),
    Move(
        {"version": ENCODERS_OFFLOADED},
        "the text encoder's layers come over PCIe as prompts are encoded",
        words_for=_encoder_words,
        by_fields=_with_encoders_offloaded,
    ),
    Move(
        {"optimizer_step": "backward"},
        "the step runs inside backward",
        words_for=_fused_backward_words,
        when=lambda fields: _may_step_in_backward(fields) and fields["optimizer"] in ("adamw", "adafactor", "came"),
    ),
    Move(
        {"optimizer": "adafactor", "optimizer_step": "backward"},
        "second moments are row and column sums; the step runs inside backward",
        words_for=lambda settings: ["optimizer.optimizer: ADAFACTOR", "optimizer.fused_back_pass: true"],
        when=_may_step_in_backward,
    ),
    _quantised_base("fp8", "FLOAT_8", "the frozen base is rounded to 8 bits"),
    _quantised_base("nf4", "NFLOAT_4", "the frozen base is rounded to 4 bits"),
)
"""The cheapest first."""
