"""FramePack: flow matching of a section of a clip given its packed history (arXiv 2504.12626; diffusers
HunyuanVideoFramepackTransformer3DModel; musubi-tuner fpack_cache_latents.py and fpack_train_network.py at 30c658c)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from planner.catalog.profiles import ModelProfile
from trainers.families.common.base import Family, Grid

SECTION = 9
"""Latent frames of a section (``latent_window_size``)."""

CLEAN, HALVED, QUARTERED = 2, 2, 16
"""Latent frames of the history: uncompressed (the clip's first and the last before the section), with 2x2x2 patches as
tokens, and with 4x4x4."""

CELL = 16
"""Tokens of an uncompressed frame in a cell of the grid. A cell is 8x8 latents, so that it holds whole tokens of the
history."""

HISTORY = CELL * CLEAN + (CELL // 4) * (HALVED // 2) + (CELL // 16) * (QUARTERED // 4)
"""Tokens of the history in a cell."""


class FramePack(Family):
    """HunyuanVideo's blocks over the tokens of history, section, prompt and first image."""

    fixed = {"F": SECTION}
    adds_masks_up = True
    masks_all_tokens = True
    sample_needs = "its sections one after another, each with those before it, which is not priced"

    def __init__(self, profile: ModelProfile) -> None:
        super().__init__(profile)
        self.image_tokens = profile.inputs["image_tokens"]
        clip = ("HW",) * (CELL * SECTION + HISTORY)
        self.sums = {"J": (self.image_tokens, ("T",)), "S": (self.image_tokens, (*clip, "T"))}

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        size, text = grid["B"], (grid["B"], grid["T"])
        image = (size, self.image_tokens, self.config["image_proj_dim"])
        return {
            "latents": self.video_latents(grid, device, dtype),
            "prompt": torch.randn(*text, self.config["text_embed_dim"], device=device, dtype=dtype),
            "prompt_mask": torch.ones(text, device=device, dtype=dtype),
            "pooled": torch.randn(size, self.config["pooled_projection_dim"], device=device, dtype=dtype),
            "image": torch.randn(*image, device=device, dtype=dtype),
            "clean": self.video_latents({**grid, "F": CLEAN}, device, dtype),
            "halved": self.video_latents({**grid, "F": HALVED}, device, dtype),
            "quartered": self.video_latents({**grid, "F": QUARTERED}, device, dtype),
        }

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        """The section follows the clip's first frame and the history (``vanilla_sampling``). If sections are generated
        in reverse order, only the frame indices differ."""
        noisy, sigmas, target = self.flow_matching(batch["latents"])
        places = torch.arange(1 + QUARTERED + HALVED + 1 + SECTION, device=noisy.device)
        first, quartered, halved, last, section = places.split([1, QUARTERED, HALVED, 1, SECTION])
        scale = self.profile.training.guidance * 1000
        return {
            "hidden_states": noisy,
            "timestep": sigmas * 1000,
            "encoder_hidden_states": batch["prompt"],
            "encoder_attention_mask": batch["prompt_mask"],
            "pooled_projections": batch["pooled"],
            "image_embeds": batch["image"],
            "guidance": torch.full((noisy.shape[0],), scale, device=noisy.device, dtype=noisy.dtype),
            "indices_latents": section,
            "latents_clean": batch["clean"],
            "indices_latents_clean": torch.cat([first, last]),
            "latents_history_2x": batch["halved"],
            "indices_latents_history_2x": halved,
            "latents_history_4x": batch["quartered"],
            "indices_latents_history_4x": quartered,
        }, target


FAMILY = FramePack
