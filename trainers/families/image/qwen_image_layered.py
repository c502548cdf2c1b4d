"""Qwen-Image-Layered: decomposes an image into layers with transparency, which are generated together with the whole
image (diffusers pipelines/qwenimage/pipeline_qwenimage_layered.py; DiffSynth-Studio diffsynth/pipelines/qwen_image.py
at fed7b18)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from planner.catalog.profiles import ModelProfile
from trainers.families.common.base import Grid
from trainers.families.common.sampling import FamilyPipeline
from trainers.families.qwen_image import QwenImage


class QwenImageLayered(QwenImage):
    """Qwen-Image on the noisy tokens of the whole image and its layers, and the clean tokens of the image to
    decompose."""

    sample_needs = "an image to take apart"

    def __init__(self, profile: ModelProfile) -> None:
        super().__init__(profile)
        self.images = profile.inputs["layers"] + 1
        """number of generated images: the whole one and its layers"""
        noisy = ("FHW",) * self.images
        self.sums = {"S": (0, (*noisy, "T", "E")), "I": (0, (*noisy, "E"))}

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        batch = super().batch(grid, device, dtype)
        size = (grid["B"], self.images, grid["H"], grid["W"], self.config["in_channels"])
        return {**batch, "latents": torch.randn(size, device=device, dtype=dtype)}

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        """The class has embeddings for 0 and 1, of which all callers use 0 (``is_rgb`` in the pipeline)."""
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
        """None: its pipeline takes an image, which determines the size."""
        return None


FAMILY = QwenImageLayered
