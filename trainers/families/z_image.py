"""Z-Image: flow matching, each sample a tensor of its own (arXiv 2511.22699; diffusers ZImageTransformer2DModel,
examples/dreambooth/train_dreambooth_lora_z_image.py).

The model pads image and text of every sample to multiples of 32 tokens, which tapes count in 32s. It also treats
samples one by one before and behind its blocks, so how many operators there are depends on the batch: a tape of several
samples holds for two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainers.families.base import Family, Grid, flow_matching


class ZImage(Family):
    """Refiner blocks over image and over text, then single-stream blocks over both."""

    fixed = {"F": 1, "B": 2}
    rounded = {"C": ("T", 32), "P": ("HW", 32)}
    sums = {"S": (0, ("C", "P"))}

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        return {
            "latents": self.video_latents(grid, device, dtype),
            "prompt": torch.randn(grid["B"], grid["T"], self.config["cap_feat_dim"], device=device, dtype=dtype),
        }

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        """The model's time runs from noise to image, and it predicts the opposite velocity."""
        noisy, sigmas, target = flow_matching(batch["latents"])
        return {
            "x": list(noisy.unbind()),
            "t": 1 - sigmas,
            "cap_feats": list(batch["prompt"].unbind()),
        }, target

    def loss(self, prediction: Any, target: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Of the samples stacked again."""
        return super().loss(-torch.stack(prediction), target, inputs)


FAMILY = ZImage
