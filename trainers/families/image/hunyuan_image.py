"""HunyuanImage 2.1: flow matching on latents of a 32x VAE (diffusers HunyuanImageTransformer2DModel), trained as in
sd-scripts' hunyuan_image_train_network.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from planner.catalog.profiles import ModelProfile
from trainers.families.common.base import Family, Grid
from trainers.families.common.encoding import Encoder, EncoderTurn, pixels, sampled
from trainers.families.common.sampling import FamilyPipeline


class HunyuanImage(Family):
    """Double-stream, then single-stream blocks over image, prompt and glyphs (ByT5), with a mask of one row.

    diffusers sorts each sample's text tokens by their masks, valid ones first, so the sizes of the parts depend on the
    prompt, but their sum does not. Recordings have a prompt that fills its tokens and no glyphs (zeros, masked out).
    """

    masks_all_tokens = copies_masks = True

    def __init__(self, profile: ModelProfile) -> None:
        super().__init__(profile)
        self.glyph_tokens = profile.inputs["glyph_tokens"]
        # Image, prompt and glyphs; prompt and glyphs, as they are sorted.
        self.sums = {"S": (self.glyph_tokens, ("HW", "T")), "J": (self.glyph_tokens, ("T",))}

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        prompt, glyphs = (grid["B"], grid["T"]), (grid["B"], self.glyph_tokens)
        return {
            "latents": self.video_latents(grid, device, dtype)[:, :, 0],
            "prompt": torch.randn(*prompt, self.config["text_embed_dim"], device=device, dtype=dtype),
            "prompt_mask": torch.ones(prompt, device=device, dtype=torch.long),
            "glyphs": torch.zeros(*glyphs, self.config["text_embed_2_dim"], device=device, dtype=dtype),
            "glyph_mask": torch.zeros(glyphs, device=device, dtype=torch.long),
        }

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        noisy, sigmas, target = self.flow_matching(batch["latents"])
        return {
            "hidden_states": noisy,
            "timestep": (sigmas * 1000).to(noisy.dtype),
            "encoder_hidden_states": batch["prompt"],
            "encoder_attention_mask": batch["prompt_mask"],
            "encoder_hidden_states_2": batch["glyphs"],
            "encoder_attention_mask_2": batch["glyph_mask"],
        }, target

    def clip_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("vae", self.profile.vae.class_name, encode_clip),)

    def text_turns(self) -> tuple[EncoderTurn, ...]:
        glyphs = EncoderTurn("text_encoder_2", "T5EncoderModel", self.encode_glyphs, "tokenizer_2")
        return glyphs, EncoderTurn("text_encoder", "Qwen2_5_VLForConditionalGeneration", encode_prompt, "tokenizer")

    def sampler(self) -> FamilyPipeline:
        """Guidance is a part of the pipeline, not an argument of its call."""
        return FamilyPipeline(
            pipeline="HunyuanImagePipeline",
            prompt={
                "prompt": "prompt_embeds",
                "prompt_mask": "prompt_embeds_mask",
                "glyphs": "prompt_embeds_2",
                "glyph_mask": "prompt_embeds_mask_2",
            },
            scale="guider",
        )

    def encode_glyphs(self, encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
        """ByT5's states and mask of the quoted text in a caption, one token per byte; zeros if there is none."""
        from diffusers.pipelines.hunyuan_image.pipeline_hunyuanimage import extract_glyph_text

        (caption,) = captions
        quoted = extract_glyph_text(caption)
        if quoted is None:
            size, width = (1, self.glyph_tokens), self.config["text_embed_2_dim"]
            glyphs = torch.zeros(*size, width, device=encoder.device, dtype=encoder.model.dtype)
            return {"glyphs": glyphs, "glyph_mask": torch.zeros(size, device=encoder.device, dtype=torch.long)}
        pipe = encoder.pipeline("HunyuanImagePipeline", "_2")
        glyphs, mask = pipe._get_byt5_prompt_embeds(
            encoder.helper, encoder.model, quoted, encoder.device, tokenizer_max_length=self.glyph_tokens
        )
        return {"glyphs": glyphs, "glyph_mask": mask}


def encode_clip(encoder: Encoder, frames: Tensor) -> dict[str, Tensor]:
    """{"latents": (C, h, w)}, sampled from the VAE's posterior and scaled."""
    latents = sampled(encoder, pixels(encoder, frames)[:, :, 0])[0]
    return {"latents": latents * encoder.model.config.scaling_factor}


def encode_prompt(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """Qwen's states two layers before the last for the caption in the pipeline's template, without the template's
    tokens, and their mask."""
    pipe = encoder.pipeline("HunyuanImagePipeline")
    prompt, mask = pipe._get_qwen_prompt_embeds(
        encoder.helper, encoder.model, captions, encoder.device, tokenizer_max_length=encoder.tokens
    )
    return {"prompt": prompt, "prompt_mask": mask}


FAMILY = HunyuanImage
