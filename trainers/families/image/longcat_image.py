"""LongCat-Image: flow matching on 2x2-packed latents (LongCatImageTransformer2DModel;
meituan-longcat/LongCat-Image train_examples/lora/train_lora.py at af39f67)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainers.families.common.base import Family, Grid
from trainers.families.common.encoding import Encoder, EncoderTurn
from trainers.families.flux import encode_clip

PROMPT_PLACES = 512
"""The image's rows and columns begin after the positions of the longest prompt (LongCatImagePipeline.prepare_latents).
"""


class LongCatImage(Family):
    """FLUX.1's blocks over a language model's states, without a pooled vector. Positions are fp32, because bf16 cannot
    represent 513."""

    shared = frozenset({"image_ids", "text_ids"})
    sums = {"S": (0, ("FHW", "T"))}
    sample_needs = "a prompt in words, which its pipeline encodes itself"

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        tokens, text = grid["H"] * grid["W"], grid["T"]
        return {
            "latents": torch.randn(grid["B"], tokens, self.config["in_channels"], device=device, dtype=dtype),
            "prompt": torch.randn(grid["B"], text, self.config["joint_attention_dim"], device=device, dtype=dtype),
            "image_ids": torch.zeros(tokens, 3, device=device),
            "text_ids": torch.zeros(text, 3, device=device),
        }

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        noisy, sigmas, target = self.flow_matching(batch["latents"])
        return {
            "hidden_states": noisy,
            "timestep": sigmas,
            "encoder_hidden_states": batch["prompt"],
            "img_ids": batch["image_ids"],
            "txt_ids": batch["text_ids"],
        }, target

    def clip_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("vae", self.profile.vae.class_name, encode_image),)

    def text_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("text_encoder", "Qwen2_5_VLForConditionalGeneration", encode_prompt, "tokenizer"),)


def encode_image(encoder: Encoder, frames: Tensor) -> dict[str, Tensor]:
    """Latents as for FLUX.1, but with positions after the prompt's."""
    tensors = encode_clip(encoder, frames)
    return {**tensors, "image_ids": tensors["image_ids"] + torch.tensor([1, PROMPT_PLACES, PROMPT_PLACES])}


def encode_prompt(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """{"prompt": the last layer's states of the caption in the pipeline's template, without the template's tokens,
    "text_ids": their positions}, padded."""
    pipe = encoder.pipeline("LongCatImagePipeline")
    pipe.tokenizer_max_length = encoder.tokens
    prompt, places = pipe.encode_prompt(captions)
    return {"prompt": prompt, "text_ids": places.float().expand(len(captions), -1, -1)}


FAMILY = LongCatImage
