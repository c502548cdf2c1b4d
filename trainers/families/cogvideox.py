"""CogVideoX: v-prediction on a zero-SNR schedule (arXiv 2408.06072; diffusers examples/cogvideo)."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import CogVideoXDPMScheduler
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from torch import Tensor

from planner.facts import ModelProfile
from trainers import draws
from trainers.families.base import Family, Grid


class CogVideoX(Family):
    """CogVideoX 2B, 5B and 1.5 (patches over two latent frames): text and video tokens in one sequence."""

    def __init__(self, profile: ModelProfile) -> None:
        super().__init__(profile)
        tokens = self.config["max_text_seq_length"]
        self.fixed = {"T": tokens}
        """The table of positions holds as many text tokens as every prompt is padded to."""
        self.sums = {"S": (tokens, ("FHW",))}
        patch = self.config["patch_size"]
        self.rows, self.columns = self.config["sample_height"] // patch, self.config["sample_width"] // patch
        if self.config.get("use_learned_positional_embeddings"):
            self.fixed |= {"H": self.rows, "W": self.columns}
        if self.config.get("patch_size_t"):
            self.longest_side = min(self.rows, self.columns)
        self.scheduler = CogVideoXDPMScheduler(**profile.training.scheduler)

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        """The published trainer keeps latents as (B, F, C, h, w); the image's stand in front of zeros for the rest."""
        latents = self.video_latents(grid, device, dtype).permute(0, 2, 1, 3, 4).contiguous()
        prompt = torch.randn(grid["B"], grid["T"], self.config["text_embed_dim"], device=device, dtype=dtype)
        batch = {"latents": latents, "prompt": prompt}
        if self.config["in_channels"] > latents.shape[2]:
            batch["image"] = torch.zeros_like(latents)
        return batch

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        latents = batch["latents"]
        steps = self.scheduler.config["num_train_timesteps"]
        timesteps = draws.integers(steps, latents.shape[0], latents.device)
        noisy = self.scheduler.add_noise(latents, draws.normal_like(latents), timesteps)
        inputs = {"hidden_states": noisy, "encoder_hidden_states": batch["prompt"], "timestep": timesteps}
        if "image" in batch:
            inputs["hidden_states"] = torch.cat([noisy, batch["image"]], dim=2)
        if self.config["use_rotary_positional_embeddings"]:
            inputs["image_rotary_emb"] = self.rotary_table(latents)
        if self.config.get("ofs_embed_dim"):
            inputs["ofs"] = latents.new_full((latents.shape[0],), 2.0)
        return inputs, latents

    def rotary_table(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """RoPE cosines and sines, each (F*H*W, head size) in fp32; 1.5 cuts them out of a table of its longest side."""
        patch, patch_t = self.config["patch_size"], self.config.get("patch_size_t")
        frames, height, width = latents.shape[1], latents.shape[3] // patch, latents.shape[4] // patch
        kind = {"grid_type": "slice", "max_size": (self.rows, self.columns)} if patch_t else {}
        return get_3d_rotary_pos_embed(  # type: ignore[no-any-return]
            embed_dim=self.config["attention_head_dim"],
            crops_coords=((0, 0), (height, width)),
            grid_size=(height, width),
            temporal_size=frames // (patch_t or 1),
            device=latents.device,
            **kind,
        )

    def loss(self, prediction: Tensor, target: Tensor, inputs: dict[str, Any]) -> Tensor:
        """The v-prediction turned into a clean-sample error weighted by 1 / (1 - alpha_bar)."""
        timesteps = inputs["timestep"]
        noisy = inputs["hidden_states"][:, :, : target.shape[2]]
        predicted = self.scheduler.get_velocity(prediction, noisy, timesteps)
        weights = 1 / (1 - self.scheduler.alphas_cumprod[timesteps])
        weights = weights.view(-1, *[1] * (predicted.ndim - 1))
        error = weights * (predicted - target) ** 2
        return error.reshape(target.shape[0], -1).mean(dim=1).mean()


FAMILY = CogVideoX
