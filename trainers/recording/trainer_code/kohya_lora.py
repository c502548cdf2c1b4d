"""Adapters of kohya-ss's trainers, in the form that recordings expect."""

from __future__ import annotations

from typing import Any

import torch

ADAPTERS = {"lora_down.weight": "lora_A.default.weight", "lora_up.weight": "lora_B.default.weight"}
"""Endings of kohya's adapter names -> peft's."""


def apply_beside(loras: list[Any], dtype: torch.dtype) -> None:
    """Applies each ``LoRAModule`` to its layer, and registers its weights as children of the layer. kohya's network
    holds them outside the model, but a recording needs to know which block a weight belongs to."""
    for lora in loras:
        layer = lora.org_module
        for part in ("lora_down", "lora_up"):
            layer.add_module(part, getattr(lora, part).to(dtype).requires_grad_(True))
        lora.apply_to()


def published_name(name: str, adapted: bool) -> str:
    """peft's name of a weight, of a layer or an adapter. ``adapted``: whether the layer has an adapter."""
    for end, published in ADAPTERS.items():
        name = name.replace(end, published)
    if not adapted or "lora_" in name:
        return name
    layer, _, part = name.rpartition(".")
    return f"{layer}.base_layer.{part}"
