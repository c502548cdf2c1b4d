"""Mochi 1: flow matching (genmoai/mochi; diffusers MochiTransformer3DModel).

Time and velocity run from noise to clip (cogvideox-factory training/mochi-1/text_to_video_lora.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainers.families.common.base import Family, Grid
from trainers.families.common.encoding import CAPTIONS, Encoder, EncoderTurn, per_channel, pixels, prompt_of, sampled
from trainers.families.common.sampling import FamilyPipeline


class Mochi(Family):
    """Mochi 1: joint attention over video tokens and unmasked text tokens, sample by sample.

    diffusers gathers a sample's text tokens by its mask, so a step's memory depends on the prompt. Recordings have
    prompts that fill all 256 tokens, which takes most memory.
    """

    fixed = {"T": 256}
    sums = {"S": (256, ("FHW",))}

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        text = (grid["B"], grid["T"])
        return {
            "latents": self.video_latents(grid, device, dtype),
            "prompt": torch.randn(*text, self.config["text_embed_dim"], device=device, dtype=dtype),
            "prompt_mask": torch.ones(text, device=device, dtype=torch.bool),
        }

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        noisy, sigmas, target = self.flow_matching(batch["latents"], towards_clip=True)
        return {
            "hidden_states": noisy,
            "encoder_hidden_states": batch["prompt"],
            "timestep": (1 - sigmas) * 1000,  # Mochi counts from noise to clip
            "encoder_attention_mask": batch["prompt_mask"],
        }, target

    def clip_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("vae", self.profile.vae.class_name, encode_clip),)

    def text_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("text_encoder", "T5EncoderModel", encode_prompt, "tokenizer", at_once=CAPTIONS),)

    def sampler(self) -> FamilyPipeline:
        """The scheduler is the published one (diffusers scripts/convert_mochi_to_diffusers.py)."""
        names = {"prompt": "prompt_embeds", "prompt_mask": "prompt_attention_mask"}
        return FamilyPipeline(pipeline="MochiPipeline", prompt=names, settings={"invert_sigmas": True})


def encode_clip(encoder: Encoder, frames: Tensor) -> dict[str, Tensor]:
    """{"latents": (C, F, h, w)}, sampled from the VAE's posterior and standardised (MochiPipeline does the reverse
    before decoding)."""
    latents, config = sampled(encoder, pixels(encoder, frames)), encoder.model.config
    mean, deviation = per_channel(config.latents_mean, latents), per_channel(config.latents_std, latents)
    return {"latents": ((latents - mean) * config.scaling_factor / deviation)[0]}


def encode_prompt(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """{"prompt": T5's states of the caption, "prompt_mask": the mask for attention}, padded, as in the pipeline."""
    prompt, mask = prompt_of("MochiPipeline", encoder, captions)
    return {"prompt": prompt, "prompt_mask": mask}


FAMILY = Mochi
