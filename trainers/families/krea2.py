"""Krea 2: flow matching on 2x2-packed latents (diffusers Krea2Transformer2DModel, examples/dreambooth
train_dreambooth_lora_krea2.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainers.families.base import Family, Grid


class Krea2(Family):
    """Single-stream blocks over text and image; the text is a stack of twelve layers' states, padded and masked."""

    sums = {"S": (0, ("FHW", "T"))}
    masks_all_tokens = True

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        text, tokens = (grid["B"], grid["T"]), grid["H"] * grid["W"]
        layers, width = self.config["num_text_layers"], self.config["text_hidden_dim"]
        return {
            "latents": torch.randn(grid["B"], tokens, self.config["in_channels"], device=device, dtype=dtype),
            "prompt": torch.randn(*text, layers, width, device=device, dtype=dtype),
            "prompt_mask": torch.ones(text, device=device, dtype=torch.bool),
            "position_ids": torch.zeros(grid["T"] + tokens, 3, device=device),
        }

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        noisy, sigmas, target = self.flow_matching(batch["latents"])
        return {
            "hidden_states": noisy,
            "timestep": sigmas,
            "encoder_hidden_states": batch["prompt"],
            "encoder_attention_mask": batch["prompt_mask"],
            "position_ids": batch["position_ids"],
        }, target


FAMILY = Krea2
