"""Wan 2.1 VACE: a second, shorter stack of blocks turns a control video into hints (arXiv 2503.07598).

diffusers WanVACETransformer3DModel: the blocks of ``vace_blocks`` run first; the output of each is added behind one of
``blocks``, those that ``vace_layers`` names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainers.families.common.base import Grid
from trainers.families.common.encoding import Encoder, pixels
from trainers.families.common.sampling import FamilyPipeline
from trainers.families.wan import Wan


class WanVace(Wan):
    """Wan text-to-video with a control video, and without reference images (each is one more latent frame)."""

    def sampler(self) -> FamilyPipeline:
        """Wan's pipeline for VACE, steered by the control video of one of the dataset's samples."""
        return replace(super().sampler(), pipeline="WanVACEPipeline", init={}, clip=True)

    def sampled_image(self, image: Any, height: int, width: int, frames: int) -> dict[str, Any]:
        return {"video": image}

    def encode_clip(self, encoder: Encoder, frames: Tensor) -> dict[str, Tensor]:
        """The control as diffusers' WanVACEPipeline prepares it without a mask: nothing stays (a clip in the middle of
        black and white), all of it steers, and the mask is 1."""
        tensors = super().encode_clip(encoder, frames)
        assert encoder.control is not None
        steers = pixels(encoder, encoder.control)
        parts = [self.normalised(encoder, clip)[0] for clip in (torch.zeros_like(steers), steers)]
        mask = parts[0].new_ones(self.config["vace_in_channels"] - 2 * parts[0].shape[0], *parts[0].shape[1:])
        return {**tensors, "control": torch.cat([*parts, mask])}

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        """The control is cached as the pipeline makes it: what stays and what changes (32), and the mask (64)."""
        batch = super().batch(grid, device, dtype)
        size = (grid["B"], self.config["vace_in_channels"], *batch["latents"].shape[2:])
        return {**batch, "control": batch["latents"].new_empty(size).normal_()}

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        inputs, target = super().inputs_and_target(batch)
        return {**inputs, "control_hidden_states": batch["control"]}, target


FAMILY = WanVace
