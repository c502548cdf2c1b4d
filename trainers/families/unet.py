"""Stable Diffusion 1.x, SDXL and LatentSync: epsilon prediction with a conv UNet (arXiv 2112.10752, 2307.01952,
2412.09262; diffusers UNet2DConditionModel).

Their grids count latent pixels in eights (three halvings; SDXL has two: fours), so that every level divides exactly.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DDPMScheduler
from torch import Tensor

from planner.facts import ModelProfile
from trainers import draws
from trainers.families.base import Family, Grid


class Unet(Family):
    """A UNet over images, or over the frames of a clip as images of their own (LatentSync without motion modules)."""

    def __init__(self, profile: ModelProfile) -> None:
        super().__init__(profile)
        self.fixed = {} if profile.kind == "video" else {"F": 1}
        self.scheduler = DDPMScheduler(**profile.training.scheduler)

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        """Frames lie in the batch: (B * F, C, h, w), each with its own condition."""
        size = grid["B"] * grid["F"]
        _, patch_h, patch_w = self.profile.shape.patch
        channels = self.profile.vae.latent_channels
        pixels = (grid["H"] * patch_h, grid["W"] * patch_w)
        text = (size, grid["T"], self.config["cross_attention_dim"])
        made = {
            "latents": torch.randn(size, channels, *pixels, device=device, dtype=dtype),
            "prompt": torch.randn(*text, device=device, dtype=dtype),
        }
        if (extra := self.config["in_channels"] - channels) > 0:
            made["condition"] = torch.randn(size, extra, *pixels, device=device, dtype=dtype)
        if self.config.get("addition_embed_type") == "text_time":
            pooled, numbers = self.profile.inputs["pooled_dim"], self.profile.inputs["time_ids"]
            made["pooled"] = torch.randn(size, pooled, device=device, dtype=dtype)
            made["time_ids"] = torch.randn(size, numbers, device=device, dtype=dtype)
        return made

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        latents = batch["latents"]
        noise = draws.normal_like(latents)
        steps = self.scheduler.config["num_train_timesteps"]
        timesteps = draws.integers(steps, latents.shape[0], latents.device)
        noisy = self.scheduler.add_noise(latents, noise, timesteps)
        inputs = {"sample": noisy, "timestep": timesteps, "encoder_hidden_states": batch["prompt"]}
        if "condition" in batch:
            inputs["sample"] = torch.cat([noisy, batch["condition"]], dim=1)
        if "pooled" in batch:
            inputs["added_cond_kwargs"] = {"text_embeds": batch["pooled"], "time_ids": batch["time_ids"]}
        return inputs, noise


FAMILY = Unet
