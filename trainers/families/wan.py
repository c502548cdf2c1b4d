"""Wan 2.1, text-to-video and image-to-video: flow matching (arXiv 2503.20314; diffusers WanTransformer3DModel)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainers.families.base import Family, Grid, flow_matching


class Wan(Family):
    """Wan 2.1: self-attention over video tokens, cross-attention to text and, for I2V, image tokens."""

    fixed = {"T": 512}
    """diffusers' Wan attention splits image from text tokens at 512; the pipelines pad every prompt to 512."""

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        batch = {
            "latents": self.video_latents(grid, device, dtype),
            "prompt": torch.randn(grid["B"], grid["T"], self.config["text_dim"], device=device, dtype=dtype),
        }
        image_dim = self.config.get("image_dim")
        if self.image_to_video:
            extra = self.config["in_channels"] - self.profile.vae.latent_channels
            batch["condition"] = batch["latents"].new_empty((grid["B"], extra, *batch["latents"].shape[2:])).normal_()
        if image_dim:
            tokens = self.profile.inputs["image_tokens"]
            batch["image"] = torch.randn(grid["B"], tokens, image_dim, device=device, dtype=dtype)
        return batch

    @property
    def image_to_video(self) -> bool:
        """Whether a mask and the first frame's latents are stacked onto the noisy latents (20 more channels)."""
        return bool(self.config["in_channels"] > self.profile.vae.latent_channels)

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        noisy, sigmas, target = flow_matching(batch["latents"])
        inputs = {"hidden_states": noisy, "timestep": sigmas * 1000, "encoder_hidden_states": batch["prompt"]}
        if "condition" in batch:
            inputs["hidden_states"] = torch.cat([noisy, batch["condition"]], dim=1)
        if "image" in batch:
            inputs["encoder_hidden_states_image"] = batch["image"]
        return inputs, target


FAMILY = Wan
