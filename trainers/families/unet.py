"""Stable Diffusion 1.x: epsilon prediction with a conv UNet (arXiv 2112.10752; diffusers UNet2DConditionModel).

Its grid counts latent pixels in eights (three halvings), so that every level divides exactly.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DDPMScheduler
from torch import Tensor

from planner.facts import ModelProfile
from trainers.families.base import Family, Grid


class Unet(Family):
    """The UNet of Stable Diffusion 1.x."""

    fixed = {"F": 1}

    def __init__(self, profile: ModelProfile) -> None:
        super().__init__(profile)
        self.scheduler = DDPMScheduler(**profile.training.scheduler)

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        text = (grid["B"], grid["T"], self.config["cross_attention_dim"])
        return {
            "latents": self.video_latents(grid, device, dtype).squeeze(2),
            "prompt": torch.randn(*text, device=device, dtype=dtype),
        }

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        latents = batch["latents"]
        noise = torch.randn_like(latents)
        steps = self.scheduler.config["num_train_timesteps"]
        timesteps = torch.randint(0, steps, (latents.shape[0],), device=latents.device)
        noisy = self.scheduler.add_noise(latents, noise, timesteps)
        return {"sample": noisy, "timestep": timesteps, "encoder_hidden_states": batch["prompt"]}, noise


FAMILY = Unet
