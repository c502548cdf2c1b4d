"""FLUX.1: flow matching on 2x2-packed latents (diffusers FluxTransformer2DModel, examples/dreambooth Flux LoRA)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainers.families.base import Family, Grid, flow_matching


class Flux(Family):
    """FLUX.1: double-stream, then single-stream blocks over text and image tokens."""

    sums = {"S": (0, ("FHW", "T"))}
    fixed = {"F": 1}

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        tokens = grid["H"] * grid["W"]
        return {
            "latents": torch.randn(grid["B"], tokens, self.config["in_channels"], device=device, dtype=dtype),
            "prompt": torch.randn(grid["B"], grid["T"], self.config["joint_attention_dim"], device=device, dtype=dtype),
            "pooled": torch.randn(grid["B"], self.config["pooled_projection_dim"], device=device, dtype=dtype),
            "image_ids": torch.zeros(tokens, 3, device=device, dtype=dtype),
            "text_ids": torch.zeros(grid["T"], 3, device=device, dtype=dtype),
        }

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        noisy, sigmas, target = flow_matching(batch["latents"])
        inputs = {
            "hidden_states": noisy,
            "timestep": sigmas,
            "encoder_hidden_states": batch["prompt"],
            "pooled_projections": batch["pooled"],
            "img_ids": batch["image_ids"],
            "txt_ids": batch["text_ids"],
        }
        if self.config.get("guidance_embeds"):
            inputs["guidance"] = torch.full((noisy.shape[0],), 1.0, device=noisy.device, dtype=noisy.dtype)
        return inputs, target


FAMILY = Flux
