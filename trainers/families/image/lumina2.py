"""Lumina Image 2.0: flow matching over text and image in one sequence (arXiv 2503.21758; diffusers
Lumina2Transformer2DModel, examples/dreambooth/train_dreambooth_lora_lumina2.py).

The model reads the length of each prompt from the mask and joins text and image sample by sample, so the number of
operators depends on the batch. Recordings have prompts that fill their length; if prompts of a batch differ in length,
attention takes a mask of one row per sample, which is not recorded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from planner.catalog.profiles import ModelProfile
from trainers.families.common.base import Family, Grid
from trainers.families.common.encoding import Encoder, EncoderTurn, pixels, sampled
from trainers.families.common.sampling import FamilyPipeline


class Lumina2(Family):
    """Refiner blocks over text and over image, then single-stream blocks over both."""

    adds_masks_up = True
    fixed = {"F": 1, "B": 2}
    sums = {"S": (0, ("FHW", "T"))}

    def __init__(self, profile: ModelProfile) -> None:
        super().__init__(profile)
        self.longest_side = min(self.config["axes_lens"][1:])

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        text = grid["B"], grid["T"]
        return {
            "latents": self.video_latents(grid, device, dtype),
            "prompt": torch.randn(*text, self.config["cap_feat_dim"], device=device, dtype=dtype),
            "prompt_mask": torch.ones(text, device=device, dtype=torch.bool),
        }

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        """The model's time runs from noise to image, and it predicts the velocity in that direction."""
        noisy, sigmas, target = self.flow_matching(batch["latents"][:, :, 0], towards_clip=True)
        return {
            "hidden_states": noisy,
            "timestep": 1 - sigmas,
            "encoder_hidden_states": batch["prompt"],
            "encoder_attention_mask": batch["prompt_mask"],
        }, target

    def clip_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("vae", self.profile.vae.class_name, encode_clip),)

    def text_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("text_encoder", "Gemma2Model", encode_prompt, "tokenizer"),)

    def sampler(self) -> FamilyPipeline:
        names = {"prompt": "prompt_embeds", "prompt_mask": "prompt_attention_mask"}
        return FamilyPipeline(pipeline="Lumina2Pipeline", prompt=names)


def encode_clip(encoder: Encoder, frames: Tensor) -> dict[str, Tensor]:
    """{"latents": (C, 1, h, w)}, sampled from the VAE's posterior, shifted and scaled as in diffusers' example."""
    latents, config = sampled(encoder, pixels(encoder, frames)[:, :, 0])[0], encoder.model.config
    return {"latents": ((latents - config.shift_factor) * config.scaling_factor)[:, None]}


def encode_prompt(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """Gemma 2's penultimate states of captions after the pipeline's system prompt, padded, and their mask. The empty
    caption, for guidance, gets no system prompt, as in the pipeline."""
    pipe = encoder.pipeline("Lumina2Pipeline")
    texts = [f"{pipe.system_prompt} <Prompt Start> {caption}" if caption else "" for caption in captions]
    prompt, mask = pipe._get_gemma_prompt_embeds(texts, encoder.device, encoder.tokens)
    return {"prompt": prompt, "prompt_mask": mask.bool()}


FAMILY = Lumina2
