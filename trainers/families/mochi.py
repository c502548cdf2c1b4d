"""Mochi 1: flow matching (genmoai/mochi; diffusers MochiTransformer3DModel)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainers.families.base import Family, Grid, flow_matching


class Mochi(Family):
    """Mochi 1: joint attention over video tokens and those text tokens that its mask lets through, sample by sample.

    diffusers gathers a sample's text tokens by its mask, so what a step takes depends on the prompt. Recorded are
    prompts that fill all 256 tokens, the most a prompt can take.
    """

    fixed = {"T": 256}
    sums = {"S": (256, ("FHW",))}

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        text = (grid["B"], grid["T"])
        return {
            "latents": self.video_latents(grid, device, dtype),
            "prompt": torch.randn(*text, self.config["text_embed_dim"], device=device, dtype=dtype),
            "prompt_mask": torch.ones(text, device=device, dtype=torch.bool),
        }

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        noisy, sigmas, target = flow_matching(batch["latents"])
        return {
            "hidden_states": noisy,
            "encoder_hidden_states": batch["prompt"],
            "timestep": (1 - sigmas) * 1000,  # Mochi counts from noise to clip
            "encoder_attention_mask": batch["prompt_mask"],
        }, target


FAMILY = Mochi
