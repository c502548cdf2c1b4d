"""Qwen-Image-Layered: an image is taken apart into layers with transparency, all of them made at once beside it
(diffusers pipelines/qwenimage/pipeline_qwenimage_layered.py; DiffSynth-Studio diffsynth/pipelines/qwen_image.py at
fed7b18)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from planner.catalog.profiles import ModelProfile
from trainers.families.common.base import Grid
from trainers.families.common.sampling import FamilyPipeline
from trainers.families.qwen_image import QwenImage


class QwenImageLayered(QwenImage):
    """Qwen-Image over the tokens of the whole image and of its layers, which are noisy, and of the image to take apart,
    which is not."""

    sample_needs = "an image to take apart"

    def __init__(self, profile: ModelProfile) -> None:
        super().__init__(profile)
        self.images = profile.inputs["layers"] + 1
        """that are made: the whole one and its layers"""
        noisy = ("FHW",) * self.images
        self.sums = {"S": (0, (*noisy, "T", "E")), "I": (0, (*noisy, "E"))}

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        batch = super().batch(grid, device, dtype)
        size = (grid["B"], self.images, grid["H"], grid["W"], self.config["in_channels"])
        return {**batch, "latents": torch.randn(size, device=device, dtype=dtype)}

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        """The class has an embedding of 0 and of 1, of which every caller takes the first (``is_rgb`` in the
        pipeline)."""
        size, images, rows, columns, _ = batch["latents"].shape
        noisy, sigmas, target = self.flow_matching(batch["latents"].flatten(1, 3))
        tokens = batch["reference"].shape[1]
        return {
            "hidden_states": torch.cat([noisy, batch["reference"]], dim=1),
            "timestep": sigmas,
            "encoder_hidden_states": batch["prompt"],
            "encoder_hidden_states_mask": batch.get("prompt_mask"),
            "img_shapes": [[(1, rows, columns)] * images + [(1, 1, tokens)]] * size,
            "additional_t_cond": torch.zeros(size, device=noisy.device, dtype=torch.long),
        }, target

    def sampler(self) -> FamilyPipeline | None:  # type: ignore[override]  # Qwen-Image always has one
        """None: its pipeline takes an image, and finds a size by that."""
        return None


FAMILY = QwenImageLayered
