"""Qwen-Image and Qwen-Image-Edit: flow matching on 2x2-packed latents (arXiv 2508.02324; QwenImageTransformer2DModel).

diffusers examples/dreambooth/train_dreambooth_lora_qwen_image.py: prompts are padded to the longest of the batch, and a
mask is passed only with several samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainers.families.common.base import Grid
from trainers.families.common.encoding import Encoder, EncoderTurn, packed, pixels, sampled, standardised
from trainers.families.common.reference_tokens import ReferenceTokens
from trainers.families.common.sampling import FamilyPipeline


class QwenImage(ReferenceTokens):
    """Double-stream blocks over text and image; the edit models append the reference's tokens to the noisy ones."""

    masks_all_tokens = True
    ragged = frozenset({"prompt"})
    idle: tuple[str, ...] = ("attn.to_add_out.", "txt_mlp.")

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        """Packed latents keep their rows and columns, from which the model computes its table of positions."""
        size, channels = grid["B"], self.config["in_channels"]
        tensors = {
            "latents": torch.randn(size, grid["H"], grid["W"], channels, device=device, dtype=dtype),
            "prompt": torch.randn(size, grid["T"], self.config["joint_attention_dim"], device=device, dtype=dtype),
        }
        if self.extra_tokens:
            tensors["reference"] = torch.randn(size, grid["E"], channels, device=device, dtype=dtype)
        if size > 1:
            tensors["prompt_mask"] = torch.ones(size, grid["T"], device=device, dtype=torch.bool)
        return tensors

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        size, rows, columns, _ = batch["latents"].shape
        images = [(1, rows, columns)]
        if self.extra_tokens:
            images.append((1, 1, batch["reference"].shape[1]))
        noisy, sigmas, target = self.flow_matching(batch["latents"].flatten(1, 2))
        return {
            "hidden_states": torch.cat([noisy, batch["reference"]], dim=1) if self.extra_tokens else noisy,
            "timestep": sigmas,
            "encoder_hidden_states": batch["prompt"],
            "encoder_hidden_states_mask": batch.get("prompt_mask"),
            "img_shapes": [images] * size,
        }, target

    def clip_turns(self) -> tuple[EncoderTurn, ...]:
        """The VAE; empty for the edit models, whose samples are pairs of images."""
        return () if self.extra_tokens else (EncoderTurn("vae", self.profile.vae.class_name, encode_clip),)

    def text_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("text_encoder", "Qwen2_5_VLForConditionalGeneration", encode_prompt, "tokenizer"),)

    def sampler(self) -> FamilyPipeline:
        return FamilyPipeline(pipeline="QwenImagePipeline", prompt={"prompt": "prompt_embeds"}, scale="true_cfg_scale")

    def collate(self, samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        return self.collate_with_mask(samples)


def encode_clip(encoder: Encoder, frames: Tensor) -> dict[str, Tensor]:
    """{"latents": (h/2, w/2, 4C)}, sampled from the VAE's posterior, standardised and packed in cells of 2x2."""
    latents = standardised(sampled(encoder, pixels(encoder, frames)), encoder.model.config)
    return {"latents": packed(latents[0, :, 0])}


def encode_prompt(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """{"prompt": Qwen's states of the caption in the pipeline's template}, without the template's tokens and without
    padding."""
    pipe = encoder.pipeline("QwenImagePipeline")
    prompt, _ = pipe.encode_prompt(captions, encoder.device, max_sequence_length=encoder.tokens)
    return {"prompt": prompt}


FAMILY = QwenImage
