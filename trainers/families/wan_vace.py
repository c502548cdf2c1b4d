"""Wan 2.1 VACE: a second, shorter stack of blocks turns a control video into hints (arXiv 2503.07598).

diffusers WanVACETransformer3DModel: the blocks of ``vace_blocks`` run first; the output of each is added behind one of
``blocks``, those that ``vace_layers`` names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainers.families.base import Grid
from trainers.families.encoding import Turn
from trainers.families.sampling import Sampler
from trainers.families.wan import Wan


class WanVace(Wan):
    """Wan text-to-video with a control video, and without reference images (each is one more latent frame)."""

    def clip_turns(self) -> tuple[Turn, ...]:
        """None: a sample has a control video, which a folder of clips does not."""
        return ()

    def sampler(self) -> Sampler | None:  # type: ignore[override]
        """None: what steers it is not in a folder of clips."""
        return None

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        """The control is cached as the pipeline makes it: what stays and what changes (32), and the mask (64)."""
        batch = super().batch(grid, device, dtype)
        size = (grid["B"], self.config["vace_in_channels"], *batch["latents"].shape[2:])
        return {**batch, "control": batch["latents"].new_empty(size).normal_()}

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        inputs, target = super().inputs_and_target(batch)
        return {**inputs, "control_hidden_states": batch["control"]}, target


FAMILY = WanVace
