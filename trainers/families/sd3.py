"""Stable Diffusion 3 and 3.5: flow matching (arXiv 2403.03206; diffusers SD3Transformer2DModel)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from planner.facts import ModelProfile
from trainers.families.base import Family, Grid, flow_matching


class Sd3(Family):
    """SD3 and SD3.5: joint text and image attention."""

    sums = {"S": (0, ("FHW", "T"))}
    fixed = {"F": 1}

    def __init__(self, profile: ModelProfile) -> None:
        super().__init__(profile)
        self.short_sides = profile.config["pos_embed_max_size"] < 384

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        return {
            "latents": self.video_latents(grid, device, dtype).squeeze(2),
            "prompt": torch.randn(grid["B"], grid["T"], self.config["joint_attention_dim"], device=device, dtype=dtype),
            "pooled": torch.randn(grid["B"], self.config["pooled_projection_dim"], device=device, dtype=dtype),
        }

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        noisy, sigmas, target = flow_matching(batch["latents"])
        return {
            "hidden_states": noisy,
            "timestep": sigmas * 1000,
            "encoder_hidden_states": batch["prompt"],
            "pooled_projections": batch["pooled"],
        }, target


FAMILY = Sd3
