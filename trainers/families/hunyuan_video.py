"""HunyuanVideo: flow matching with an embedded guidance scale (arXiv 2412.03603; diffusers
HunyuanVideoTransformer3DModel)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainers.families.common.base import Family, Grid
from trainers.families.common.encoding import CAPTIONS, Encoder, EncoderTurn, pixels, sampled
from trainers.families.common.sampling import FamilyPipeline


class HunyuanVideo(Family):
    """HunyuanVideo: double-stream, then single-stream blocks, with masked text."""

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
        noisy, sigmas, target = self.flow_matching(batch["latents"])
        scale = self.profile.training.guidance * 1000  # as the pipeline passes it
        return {
            "hidden_states": noisy,
            "timestep": sigmas * 1000,
            "encoder_hidden_states": batch["prompt"],
            "encoder_attention_mask": batch["prompt_mask"],
            "pooled_projections": batch["pooled"],
            "guidance": torch.full((noisy.shape[0],), scale, device=noisy.device, dtype=noisy.dtype),
        }, target

    def clip_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("vae", self.profile.vae.class_name, encode_clip),)

    def text_turns(self) -> tuple[EncoderTurn, ...]:
        pooled = EncoderTurn("text_encoder_2", "CLIPTextModel", encode_pooled, "tokenizer_2", at_once=CAPTIONS)
        return pooled, EncoderTurn("text_encoder", "LlamaModel", encode_prompt, "tokenizer")

    def sampler(self) -> FamilyPipeline:
        """Guidance is an input of the model and needs no empty caption."""
        names = {"prompt": "prompt_embeds", "prompt_mask": "prompt_attention_mask", "pooled": "pooled_prompt_embeds"}
        return FamilyPipeline(pipeline="HunyuanVideoPipeline", prompt=names, negative=False)


def encode_clip(encoder: Encoder, frames: Tensor) -> dict[str, Tensor]:
    """{"latents": (C, F, h, w)}, sampled from the VAE's posterior and scaled (finetrainers models/hunyuan_video)."""
    return {"latents": (sampled(encoder, pixels(encoder, frames)) * encoder.model.config.scaling_factor)[0]}


def encode_pooled(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """{"pooled": CLIP's pooled vector of the caption}."""
    pipe = encoder.pipeline("HunyuanVideoPipeline", "_2")
    return {"pooled": pipe._get_clip_prompt_embeds(captions, device=encoder.device)}


def encode_prompt(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """Llama's states two layers before the last for the caption in the pipeline's template, without the template's
    tokens, and their mask."""
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE

    pipe = encoder.pipeline("HunyuanVideoPipeline")
    prompt, mask = pipe._get_llama_prompt_embeds(
        captions, DEFAULT_PROMPT_TEMPLATE, device=encoder.device, max_sequence_length=encoder.tokens
    )
    return {"prompt": prompt, "prompt_mask": mask}


FAMILY = HunyuanVideo
