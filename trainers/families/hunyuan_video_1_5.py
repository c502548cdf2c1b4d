"""HunyuanVideo 1.5: flow matching (arXiv 2511.18870; diffusers HunyuanVideo15Transformer3DModel)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from planner.catalog.profiles import ModelProfile
from trainers.families.common.base import Family, Grid
from trainers.families.common.encoding import Encoder, EncoderTurn, pixels, sampled
from trainers.families.common.sampling import FamilyPipeline


class HunyuanVideo15(Family):
    """HunyuanVideo 1.5: joint attention over video tokens, prompt, glyphs (ByT5) and image, under one full mask.

    diffusers sorts each sample's text tokens by their masks, valid ones first, so the sizes of the parts depend on the
    prompt, but their sum does not. Recordings are of text-to-video: the prompt fills its 1000 tokens, and glyphs and
    image are absent (zeros that are masked out).
    """

    idle = ("attn.to_add_out.", "ff_context.")

    def __init__(self, profile: ModelProfile) -> None:
        super().__init__(profile)
        self.glyph_tokens, self.image_tokens = profile.inputs["glyph_tokens"], profile.inputs["image_tokens"]
        text_tokens = profile.shape.text_tokens
        self.fixed = {"T": text_tokens}
        self.sums = {"S": (text_tokens + self.glyph_tokens + self.image_tokens, ("FHW",))}

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        latents = self.video_latents(grid, device, dtype)
        extra = self.config["in_channels"] - self.profile.vae.latent_channels
        size = grid["B"]
        glyphs, image = (size, self.glyph_tokens), (size, self.image_tokens)
        return {
            "latents": latents,
            "condition": latents.new_zeros((size, extra, *latents.shape[2:])),
            "prompt": torch.randn(size, grid["T"], self.config["text_embed_dim"], device=device, dtype=dtype),
            "prompt_mask": torch.ones(size, grid["T"], device=device, dtype=torch.long),
            "glyphs": torch.zeros(*glyphs, self.config["text_embed_2_dim"], device=device, dtype=dtype),
            "glyph_mask": torch.zeros(glyphs, device=device, dtype=torch.long),
            "image": torch.zeros(*image, self.config["image_embed_dim"], device=device, dtype=dtype),
        }

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        noisy, sigmas, target = self.flow_matching(batch["latents"])
        return {
            "hidden_states": torch.cat([noisy, batch["condition"]], dim=1),
            "timestep": (sigmas * 1000).to(noisy.dtype),
            "encoder_hidden_states": batch["prompt"],
            "encoder_attention_mask": batch["prompt_mask"],
            "encoder_hidden_states_2": batch["glyphs"],
            "encoder_attention_mask_2": batch["glyph_mask"],
            "image_embeds": batch["image"],
        }, target

    def clip_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("vae", self.profile.vae.class_name, self.encode_clip),)

    def text_turns(self) -> tuple[EncoderTurn, ...]:
        glyphs = EncoderTurn("text_encoder_2", "T5EncoderModel", self.encode_glyphs, "tokenizer_2")
        return glyphs, EncoderTurn("text_encoder", "Qwen2_5_VLTextModel", encode_prompt, "tokenizer")

    def sampler(self) -> FamilyPipeline:
        """Guidance is a part of the pipeline, not an argument of its call."""
        return FamilyPipeline(
            pipeline="HunyuanVideo15Pipeline",
            prompt={
                "prompt": "prompt_embeds",
                "prompt_mask": "prompt_embeds_mask",
                "glyphs": "prompt_embeds_2",
                "glyph_mask": "prompt_embeds_mask_2",
            },
            scale="guider",
        )

    def encode_clip(self, encoder: Encoder, frames: Tensor) -> dict[str, Tensor]:
        """`latents` (C, F, h, w), sampled from the VAE's posterior and scaled; `condition` and `image` are zeros,
        because text-to-video has no image (HunyuanVideo15Pipeline)."""
        latents = sampled(encoder, pixels(encoder, frames))[0] * encoder.model.config.scaling_factor
        extra = self.config["in_channels"] - latents.shape[0]
        return {
            "latents": latents,
            "condition": latents.new_zeros(extra, *latents.shape[1:]),
            "image": latents.new_zeros(self.image_tokens, self.config["image_embed_dim"]),
        }

    def encode_glyphs(self, encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
        """ByT5's states and mask of the quoted text in a caption, one token per byte; zeros if there is none."""
        from diffusers import HunyuanVideo15Pipeline

        glyphs, mask = HunyuanVideo15Pipeline._get_byt5_prompt_embeds(
            encoder.helper, encoder.model, captions, encoder.device, self.glyph_tokens
        )
        return {"glyphs": glyphs, "glyph_mask": mask}


def encode_prompt(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """Qwen's states two layers before the last for the caption in the pipeline's template, without the template's
    tokens, and their mask."""
    from diffusers import HunyuanVideo15Pipeline

    prompt, mask = HunyuanVideo15Pipeline._get_mllm_prompt_embeds(
        encoder.model, encoder.helper, captions, encoder.device, tokenizer_max_length=encoder.tokens
    )
    return {"prompt": prompt, "prompt_mask": mask}


FAMILY = HunyuanVideo15
