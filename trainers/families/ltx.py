"""LTX-Video: flow matching on packed latents, patch 1 (arXiv 2501.00103; diffusers LTXVideoTransformer3DModel)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainers.families.common.base import Family, Grid
from trainers.families.common.encoding import CAPTIONS, Encoder, EncoderTurn, per_channel, pixels, prompt_of, sampled
from trainers.families.common.sampling import FamilyPipeline


class Ltx(Family):
    """LTX-Video: few, large tokens; masked cross-attention to the text."""

    fixed: dict[str, int] = {}

    @property
    def seconds_and_pixels(self) -> tuple[float, int, int]:
        """(seconds per latent frame, pixels per row, pixels per column) at the frame rate of the clips (diffusers
        LTXPipeline)."""
        vae = self.profile.vae
        return vae.temporal / self.profile.inputs["frame_rate"], vae.spatial, vae.spatial

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        text = (grid["B"], grid["T"])
        return {
            "latents": self.video_latents(grid, device, dtype),
            "prompt": torch.randn(*text, self.config["caption_channels"], device=device, dtype=dtype),
            "prompt_mask": torch.ones(text, device=device, dtype=torch.bool),
        }

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        frames, height, width = batch["latents"].shape[2:]
        packed = batch["latents"].flatten(2).transpose(1, 2).contiguous()
        noisy, sigmas, target = self.flow_matching(packed)
        return {
            "hidden_states": noisy,
            "encoder_hidden_states": batch["prompt"],
            "timestep": sigmas * 1000,
            "encoder_attention_mask": batch["prompt_mask"],
            "num_frames": frames,
            "height": height,
            "width": width,
            "rope_interpolation_scale": self.seconds_and_pixels,
        }, target

    def clip_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("vae", self.profile.vae.class_name, encode_clip),)

    def text_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("text_encoder", "T5EncoderModel", encode_prompt, "tokenizer", at_once=CAPTIONS),)

    def sampler(self) -> FamilyPipeline:
        """The scheduler is the published one (diffusers scripts/convert_ltx_to_diffusers.py)."""
        return FamilyPipeline(
            pipeline="LTXPipeline",
            prompt={"prompt": "prompt_embeds", "prompt_mask": "prompt_attention_mask"},
            settings={
                "use_dynamic_shifting": True, "base_shift": 0.95, "max_shift": 2.05, "base_image_seq_len": 1024,
                "max_image_seq_len": 4096, "shift_terminal": 0.1,
            },
        )  # fmt: skip


def encode_clip(encoder: Encoder, frames: Tensor) -> dict[str, Tensor]:
    """{"latents": (C, F, h, w)}, sampled from the VAE's posterior and standardised with the means and deviations in the
    VAE's weights (diffusers LTXImageToVideoPipeline._normalize_latents; finetrainers models/ltx_video)."""
    latents, vae = sampled(encoder, pixels(encoder, frames)), encoder.model
    mean, deviation = per_channel(vae.latents_mean, latents), per_channel(vae.latents_std, latents)
    return {"latents": ((latents - mean) * vae.config.scaling_factor / deviation)[0]}


def encode_prompt(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """{"prompt": T5's states of the caption, "prompt_mask": the mask for cross-attention}, padded, as in diffusers'
    pipeline."""
    prompt, mask = prompt_of("LTXPipeline", encoder, captions)
    return {"prompt": prompt, "prompt_mask": mask}


FAMILY = Ltx
