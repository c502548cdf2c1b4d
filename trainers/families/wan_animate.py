"""Wan 2.2 Animate: a character image animated by a pose video and a face video (arXiv 2509.14055).

diffusers WanAnimateTransformer3DModel: the image is a latent frame in front of the clip, the pose is added to the
clip's tokens, and the face, in pixels, goes through a motion encoder to an adapter after every fifth block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainers.families.common.base import Grid
from trainers.families.common.encoding import EncoderTurn
from trainers.families.common.sampling import FamilyPipeline
from trainers.families.wan import Wan


class WanAnimate(Wan):
    """Wan image-to-video with a pose and a face. F counts the clip's latent frames; the model sees F + 1."""

    sums = {
        "G": (1, ("F",)),  # latent frames including the image's
        "P": (-3, ("F", "F", "F", "F")),  # frames of the face
        "P2": (-1, ("F", "F", "F", "F")),  # the same, padded for a convolution of three frames
        "Q": (-1, ("F", "F")),  # half of them
        "Q2": (1, ("F", "F")),
    }

    def clip_turns(self) -> tuple[EncoderTurn, ...]:
        """None: a sample needs a pose and a face video, which a folder of clips does not have."""
        return ()

    def sampler(self) -> FamilyPipeline | None:  # type: ignore[override]  # Wan always has one
        """None, because a folder of clips has no pose and face videos."""
        return None

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        batch = super().batch({**grid, "F": grid["F"] + 1}, device, dtype)
        side = self.config["motion_encoder_size"]
        face = (grid["B"], 3, self.profile.vae.temporal * (grid["F"] - 1) + 1, side, side)
        return {
            **batch,
            "pose": self.video_latents(grid, device, dtype),
            "face": torch.randn(face, device=device, dtype=dtype),
        }

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        """As Wan's, with all frames of the face encoded at once by the motion encoder (diffusers' default is eight at a
        time)."""
        inputs, target = super().inputs_and_target(batch)
        face = batch["face"]
        return {
            **inputs,
            "pose_hidden_states": batch["pose"],
            "face_pixel_values": face,
            "motion_encode_batch_size": face.shape[0] * face.shape[2],
        }, target


FAMILY = WanAnimate
