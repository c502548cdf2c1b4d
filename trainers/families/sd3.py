"""Stable Diffusion 3 and 3.5: flow matching (arXiv 2403.03206; diffusers SD3Transformer2DModel)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from planner.catalog.profiles import ModelProfile
from trainers.families.common.base import Family, Grid
from trainers.families.common.encoding import CAPTIONS, Encoder, EncoderTurn, pixels, sampled
from trainers.families.common.sampling import FamilyPipeline


class Sd3(Family):
    """SD3 and SD3.5: transformers with joint attention over text and image."""

    sums = {"S": (0, ("FHW", "T"))}
    fixed = {"F": 1}

    def __init__(self, profile: ModelProfile) -> None:
        super().__init__(profile)
        self.short_sides = profile.config["pos_embed_max_size"] < 384

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        return {
            "latents": self.video_latents(grid, device, dtype).squeeze(2),
            "prompt": torch.randn(grid["B"], grid["T"], self.config["joint_attention_dim"], device=device, dtype=dtype),
            "pooled": torch.randn(grid["B"], self.config["pooled_projection_dim"], device=device, dtype=dtype),
        }

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        noisy, sigmas, target = self.flow_matching(batch["latents"])
        return {
            "hidden_states": noisy,
            "timestep": sigmas * 1000,
            "encoder_hidden_states": batch["prompt"],
            "pooled_projections": batch["pooled"],
        }, target

    def clip_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("vae", self.profile.vae.class_name, encode_clip),)

    def text_turns(self) -> tuple[EncoderTurn, ...]:
        return (
            *clip_pair(encode_by_clip, ("1", "2")),
            EncoderTurn("text_encoder_3", "T5EncoderModel", encode_by_t5, "tokenizer_3", at_once=CAPTIONS),
        )

    def sampler(self) -> FamilyPipeline:
        names = {"prompt": "prompt_embeds", "pooled": "pooled_prompt_embeds"}
        return FamilyPipeline(pipeline="StableDiffusion3Pipeline", prompt=names)

    def joined(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """A sample's `prompt`: both CLIPs' states concatenated along their width and padded with zeros to T5's width,
        followed by T5's tokens; and `pooled`: both CLIPs' vectors."""
        if "t5" not in parts:
            return parts
        clips = torch.cat([parts["prompt 1"], parts["prompt 2"]], dim=-1)
        wide = functional.pad(clips, (0, parts["t5"].shape[-1] - clips.shape[-1]))
        pooled = torch.cat([parts["pooled 1"], parts["pooled 2"]])
        return {"prompt": torch.cat([wide.to(parts["t5"]), parts["t5"]]), "pooled": pooled}


CLIP_TOKENS = 77


def encode_clip(encoder: Encoder, frames: Tensor) -> dict[str, Tensor]:
    """{"latents": (C, h, w)}, sampled from the VAE's posterior, shifted and scaled (diffusers examples/dreambooth
    train_dreambooth_lora_sd3.py)."""
    latents, config = sampled(encoder, pixels(encoder, frames)[:, :, 0])[0], encoder.model.config
    return {"latents": (latents - config.shift_factor) * config.scaling_factor}


def clip_pair(
    encode: Callable[[Encoder, list[str], str], dict[str, Tensor]], names: tuple[str, str]
) -> tuple[EncoderTurn, EncoderTurn]:
    """The turns of a pipeline's two CLIPs. ``names``: what `encode` gets, besides encoder and captions, to tell them
    apart."""
    kind = "CLIPTextModelWithProjection"

    def turn(name: str, suffix: str) -> EncoderTurn:
        def encode_captions(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
            return encode(encoder, captions, name)

        return EncoderTurn(f"text_encoder{suffix}", kind, encode_captions, f"tokenizer{suffix}", at_once=CAPTIONS)

    return turn(names[0], ""), turn(names[1], "_2")


def encode_by_clip(encoder: Encoder, captions: list[str], which: str) -> dict[str, Tensor]:
    """One CLIP's penultimate states (`prompt N`) and projected vector (`pooled N`) of the caption. ``which``: "1" or
    "2"."""
    pipe = encoder.pipeline("StableDiffusion3Pipeline")
    prompt, pooled = pipe._get_clip_prompt_embeds(captions, device=encoder.device)
    return {f"prompt {which}": prompt, f"pooled {which}": pooled}


def encode_by_t5(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """{"t5": T5's states of the caption}, padded."""
    pipe = encoder.pipeline("StableDiffusion3Pipeline", "_3")
    # The plan's number of text tokens includes CLIP's 77, which precede T5's.
    tokens = encoder.tokens - CLIP_TOKENS
    prompt = pipe._get_t5_prompt_embeds(
        captions, max_sequence_length=tokens, device=encoder.device, dtype=encoder.model.dtype
    )
    return {"t5": prompt}


FAMILY = Sd3
