"""SANA: flow matching with linear attention over tokens of 32x32 pixels (arXiv 2410.10629; diffusers
SanaTransformer2DModel, examples/dreambooth/train_dreambooth_lora_sana.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainers.families.common.base import Family, Grid
from trainers.families.common.encoding import Encoder, EncoderTurn, pixels
from trainers.families.common.sampling import FamilyPipeline


class Sana(Family):
    """Blocks of linear attention, masked cross-attention to the prompt, and convolutions."""

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        text = grid["B"], grid["T"]
        return {
            "latents": self.video_latents(grid, device, dtype),
            "prompt": torch.randn(*text, self.config["caption_channels"], device=device, dtype=dtype),
            "prompt_mask": torch.ones(text, device=device, dtype=torch.bool),
        }

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        noisy, sigmas, target = self.flow_matching(self.latents(batch))
        return {
            "hidden_states": noisy,
            "timestep": sigmas * self.profile.training.num_train_timesteps,
            "encoder_hidden_states": batch["prompt"],
            "encoder_attention_mask": batch["prompt_mask"],
        }, target

    def latents(self, batch: dict[str, Tensor]) -> Tensor:
        """The latents in the layout of the class: those of an image, without a frame dimension."""
        return batch["latents"][:, :, 0]

    def clip_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("vae", self.profile.vae.class_name, encode_clip),)

    def text_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("text_encoder", "Gemma2Model", encode_prompt, "tokenizer"),)

    def sampler(self) -> FamilyPipeline:
        """Samples have the requested size; by default the pipeline generates the nearest of its own sizes and resizes
        the image. The default empty caption is not allowed together with embeddings."""
        return FamilyPipeline(
            pipeline="SanaPipeline",
            prompt={"prompt": "prompt_embeds", "prompt_mask": "prompt_attention_mask"},
            scheduler="DPMSolverMultistepScheduler",  # as scripts/convert_sana_to_diffusers.py makes it
            settings={"use_flow_sigmas": True, "prediction_type": "flow_prediction"},
            call={"use_resolution_binning": False, "negative_prompt": None},
        )


def encode_clip(encoder: Encoder, frames: Tensor) -> dict[str, Tensor]:
    """{"latents": (C, 1, h, w)}, scaled. The autoencoder has no posterior to draw from."""
    latents = encoder.model.encode(pixels(encoder, frames)[:, :, 0]).latent.float()
    return {"latents": latents[0, :, None] * encoder.model.config.scaling_factor}


def encode_prompt(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """Gemma 2's last states of plain captions, padded, and their mask: by default the training script and the pipeline
    add no instruction."""
    pipe = encoder.pipeline("SanaPipeline")
    prompt, mask = pipe._get_gemma_prompt_embeds(
        captions, encoder.device, encoder.model.dtype, max_sequence_length=encoder.tokens
    )
    return {"prompt": prompt, "prompt_mask": mask.bool()}


FAMILY = Sana
