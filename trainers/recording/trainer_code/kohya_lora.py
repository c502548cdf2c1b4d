"""Adapters as kohya-ss's trainers have them, where a recording looks for them."""

from __future__ import annotations

from typing import Any

import torch

ADAPTERS = {"lora_down.weight": "lora_A.default.weight", "lora_up.weight": "lora_B.default.weight"}
"""The ends of an adapter's names -> peft's."""


def apply_beside(loras: list[Any], dtype: torch.dtype) -> None:
    """Applies each ``LoRAModule`` to its layer, and registers its weights below that: kohya's network keeps them by
    itself, and a recording asks which block a weight belongs to."""
    for lora in loras:
        layer = lora.org_module
        for part in ("lora_down", "lora_up"):
            layer.add_module(part, getattr(lora, part).to(dtype).requires_grad_(True))
        lora.apply_to()


def published_name(name: str, adapted: bool) -> str:
    """The name that peft gives to a weight of a layer, and to its adapter's."""
    for end, published in ADAPTERS.items():
        name = name.replace(end, published)
    if not adapted or "lora_" in name:
        return name
    layer, _, part = name.rpartition(".")
    return f"{layer}.base_layer.{part}"
