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
    """Blocks of linear attention, cross-attention to the prompt under a mask, and convolutions."""

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
        """Those that its class takes: of an image, without frames."""
        return batch["latents"][:, :, 0]

    def clip_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("vae", self.profile.vae.class_name, encode_clip),)

    def text_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("text_encoder", "Gemma2Model", encode_prompt, "tokenizer"),)

    def sampler(self) -> FamilyPipeline:
        """Of the size asked for, where the pipeline would take the nearest of its own and resize the image. Beside
        embeddings it takes no empty caption, which is its default."""
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
    """The last states of Gemma 2 for captions alone, padded, with their mask: the training script and the pipeline put
    no instruction before them unless they are told."""
    pipe = encoder.pipeline("SanaPipeline")
    prompt, mask = pipe._get_gemma_prompt_embeds(
        captions, encoder.device, encoder.model.dtype, max_sequence_length=encoder.tokens
    )
    return {"prompt": prompt, "prompt_mask": mask.bool()}


FAMILY = Sana
