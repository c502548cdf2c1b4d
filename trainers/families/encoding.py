"""What families encode samples with: an encoder at work, and what most of them do with clips and captions.

Shape letters as in `trainers.families.base`; pixels are frames (F, H, W, 3) in 0..255.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass
class Encoder:
    """One encoder on its device, working on one sample."""

    model: Any
    helper: Any = None
    """its tokenizer or image processor"""
    tokens: int = 0
    """text tokens a caption is padded to (the plan's)"""
    generator: torch.Generator | None = None
    """seeded by what is encoded, so that a sample is the same whoever encodes it, and whenever"""

    @property
    def device(self) -> torch.device:
        """Where the encoder is."""
        return next(self.model.parameters()).device  # type: ignore[no-any-return]


Sample = Any
"""Frames of a clip, a uint8 tensor (F, H, W, 3), or a caption."""


class Turn(NamedTuple):
    """One encoder's turn over all clips, or over all captions."""

    part: str
    """its folder in the model's"""
    class_name: str
    encode: Callable[[Encoder, Sample], Mapping[str, Tensor]]
    """tensors of one sample without the batch dimension, named as in `Family.batch`"""
    helper: str = ""
    """folder of its tokenizer or image processor"""


def pixels(encoder: Encoder, frames: Tensor) -> Tensor:
    """(1, 3, F, H, W) between -1 and 1, as VAEs take clips, in the encoder's dtype."""
    scaled = frames.to(encoder.device).permute(3, 0, 1, 2)[None].float() / 127.5 - 1.0
    return scaled.to(encoder.model.dtype)


def sampled(encoder: Encoder, clip: Tensor) -> Tensor:
    """Latents drawn from the VAE's posterior, in fp32, as most published trainers do it."""
    return encoder.model.encode(clip).latent_dist.sample(encoder.generator).float()  # type: ignore[no-any-return]


def likeliest(encoder: Encoder, clip: Tensor) -> Tensor:
    """The mode of the VAE's posterior, in fp32."""
    return encoder.model.encode(clip).latent_dist.mode().float()  # type: ignore[no-any-return]


def per_channel(values: Any, like: Tensor) -> Tensor:
    """Numbers per channel, to compute with (B, C, ...)."""
    shaped = torch.as_tensor(values, dtype=torch.float32, device=like.device)
    return shaped.view(1, -1, *[1] * (like.ndim - 2))
