"""Layers that adapters are put on, by the names that a trainer gives them."""

from __future__ import annotations

import re
from collections.abc import Callable

from planner.catalog.profiles import ModelProfile
from planner.layout.adapters import is_named
from planner.layout.recordings import parameters

WAN_LAYERS = {
    "q": "to_q",
    "k": "to_k",
    "v": "to_v",
    "o": "to_out.0",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
}
"""Wan's own name of a layer (wan/modules/model.py) -> diffusers'. DiffSynth-Studio, VideoX-Fun and musubi-tuner keep
it."""

_OF_DIFFUSERS = {
    **{name: own for own, name in WAN_LAYERS.items()},
    "add_k_proj": "k_img",
    "add_v_proj": "v_img",
    "attn1": "self_attn",
    "attn2": "cross_attn",
}
_PARTS = re.compile("|".join(rf"(?<=\.){re.escape(name)}(?=\.|$)" for name in _OF_DIFFUSERS))


def in_wan(layer: str) -> str:
    """Wan's own full name of a layer of its blocks, by diffusers' full name: ``blocks.0.attn1.to_q`` is
    ``blocks.0.self_attn.q``."""
    return _PARTS.sub(lambda part: _OF_DIFFUSERS[part[0]], layer)


_NORM = re.compile(r"(^|[._])(layer)?norm\d*(_[a-z_]+)?$")
_IN_BLOCK = re.compile(r"^\w+\.\d+\.")


def layer_names(profile: ModelProfile) -> list[str]:
    """The full names in diffusers of all layers of a model but norms."""
    table = parameters(profile.name)
    layers = [name.removesuffix(".weight") for name in table.rows if name.endswith(".weight")]
    return [layer for layer in layers if not _NORM.search(layer)]


def chosen_layers(profile: ModelProfile, is_adapted: Callable[[str], bool]) -> tuple[str, ...] | None:
    """`lora_targets` of a trainer that puts adapters on the layers for which `is_adapted`, which is given full names in
    diffusers, holds; None for the model's usual layers, and where it holds for none. Layers of a block are named by
    their place in it, as far as that means no others."""
    layers = layer_names(profile)
    chosen = {layer for layer in layers if is_adapted(layer)}
    recorded = [targets for targets in (profile.lora.targets, profile.lora.wide) if targets]
    for targets in recorded:
        if chosen == {layer for layer in layers if is_named(layer, targets)}:
            return None if targets == profile.lora.targets else targets
    names: dict[str, None] = {}
    for layer in layers:
        if layer in chosen:
            place = _IN_BLOCK.sub("", layer, count=1)
            names[place if all(other in chosen for other in layers if is_named(other, [place])) else layer] = None
    return tuple(names) or None
