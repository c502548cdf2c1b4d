"""SkyReels V2: trained as Wan 2.1, but with a separate class (arXiv 2504.13074; SkyReelsV2Transformer3DModel), and its
models for diffusion forcing, in which every latent frame has its own noise level (arXiv 2407.01392)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from planner.catalog.profiles import ModelProfile
from trainers.families.common import random_draws
from trainers.families.common.sampling import FamilyPipeline
from trainers.families.wan import Wan

FAST = 1
"""The class's value of ``fps`` for clips of 24 frames per second; 0 is for 16 (SkyReelsV2DiffusionForcingPipeline)."""


class SkyReelsV2(Wan):
    """Wan's blocks; with diffusion forcing the modulation has a value for each frame."""

    def __init__(self, profile: ModelProfile) -> None:
        super().__init__(profile)
        self.forces_frames = bool(profile.inputs.get("diffusion_forcing"))
        if self.forces_frames:
            # SkyReelsV2DiffusionForcingPipeline of diffusers 0.42.1 updates its latents in place, of which UniPC keeps
            # a view as `last_sample`, so that its corrector gives wrong results.
            self.sample_needs = "a pipeline that does not write over what its solver keeps"
        if self.config.get("inject_sample_info"):
            self.fixed = {**self.fixed, "B": 1}

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        if not self.forces_frames:
            return super().inputs_and_target(batch)
        latents = batch["latents"]
        size = latents.shape[0]
        drawn = random_draws.normal_like(latents)
        sigmas = self.levels(latents).view(size, -1).expand(size, latents.shape[2])
        spread = sigmas[:, None, :, None, None].to(latents.dtype)
        return {
            "hidden_states": (1.0 - spread) * latents + spread * drawn,
            "timestep": sigmas * 1000,
            "encoder_hidden_states": batch["prompt"],
            "enable_diffusion_forcing": True,
            "fps": [FAST] * size,
        }, drawn - latents

    def levels(self, latents: Tensor) -> Tensor:
        """With diffusion forcing an independent noise level for each latent frame of each sample, (B, F)."""
        if not self.forces_frames:
            return super().levels(latents)
        self.loss_weights = None
        return torch.sigmoid(random_draws.normal_like(latents[:, 0, :, 0, 0].float()))

    def sampler(self) -> FamilyPipeline | None:  # type: ignore[override]  # Wan always has one
        if self.forces_frames:
            return None
        wan = super().sampler()
        return replace(wan, pipeline="SkyReelsV2ImageToVideoPipeline" if wan.image else "SkyReelsV2Pipeline", init={})


FAMILY = SkyReelsV2
