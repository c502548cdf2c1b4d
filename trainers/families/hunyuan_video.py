"""HunyuanVideo.

Flow matching with an embedded guidance scale (arXiv 2412.03603; diffusers HunyuanVideoTransformer3DModel).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainers.families.base import Family, Grid, flow_matching


class HunyuanVideo(Family):
    """HunyuanVideo: double-stream, then single-stream blocks, text masked."""

    sums = {"S": (0, ("FHW", "T"))}
    fixed: dict[str, int] = {}
    masks_all_tokens = True

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        text = (grid["B"], grid["T"])
        return {
            "latents": self.video_latents(grid, device, dtype),
            "prompt": torch.randn(*text, self.config["text_embed_dim"], device=device, dtype=dtype),
            "prompt_mask": torch.ones(text, device=device, dtype=dtype),
            "pooled": torch.randn(grid["B"], self.config["pooled_projection_dim"], device=device, dtype=dtype),
        }

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        noisy, sigmas, target = flow_matching(batch["latents"])
        return {
            "hidden_states": noisy,
            "timestep": sigmas * 1000,
            "encoder_hidden_states": batch["prompt"],
            "encoder_attention_mask": batch["prompt_mask"],
            "pooled_projections": batch["pooled"],
            "guidance": torch.full((noisy.shape[0],), 1000.0, device=noisy.device, dtype=noisy.dtype),
        }, target


FAMILY = HunyuanVideo
