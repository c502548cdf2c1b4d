"""Ideogram 4: flow matching on one packed sequence of text and image (diffusers Ideogram4Transformer2DModel,
examples/dreambooth/train_dreambooth_lora_ideogram4.py)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from planner.catalog.profiles import Training
from trainers.families.common.base import Family, Grid
from trainers.families.common.encoding import Encoder, EncoderTurn, likeliest, packed, pixels

BASE_TOKENS = (512 // 16) ** 2
"""Tokens of the base size, at which the schedule's mean is not changed (``_resolution_aware_mu``)."""


class Ideogram4(Family):
    """Single-stream blocks over text and image, with a mask of all pairs. The text features are the concatenated states
    of thirteen layers of the encoder, and zero at the image's positions."""

    sums = {"S": (0, ("T", "FHW"))}
    sample_needs = "a second model for guidance, and captions as text, which its pipeline encodes itself"

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        text, tokens = (grid["B"], grid["T"]), grid["H"] * grid["W"]
        return {
            "latents": torch.randn(grid["B"], tokens, self.config["in_channels"], device=device, dtype=dtype),
            "places": torch.zeros(grid["B"], tokens, 3, device=device, dtype=torch.long),
            "prompt": torch.randn(*text, self.config["llm_features_dim"], device=device, dtype=dtype),
            "prompt_mask": torch.ones(text, device=device, dtype=torch.long),
        }

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        """The model's time runs from noise to image, and it predicts the velocity in that direction."""
        from diffusers.models.transformers.transformer_ideogram4 import LLM_TOKEN_INDICATOR, OUTPUT_IMAGE_INDICATOR

        noisy, sigmas, target = self.flow_matching(batch["latents"], towards_clip=True)
        prompt, mask = batch["prompt"], batch["prompt_mask"]
        image = torch.ones(noisy.shape[:2], device=noisy.device, dtype=torch.long)
        text_places = ((mask.cumsum(1) - 1) * mask)[..., None].expand(-1, -1, 3)
        return {
            "hidden_states": torch.cat([noisy.new_zeros(*mask.shape, noisy.shape[2]), noisy], dim=1),
            "timestep": (1 - sigmas).to(noisy.dtype),
            "encoder_hidden_states": torch.cat([prompt, prompt.new_zeros(*image.shape, prompt.shape[2])], dim=1),
            "position_ids": torch.cat([text_places, batch["places"]], dim=1),
            "segment_ids": torch.cat([2 * mask - 1, image], dim=1),  # -1 for padding
            "indicator": torch.cat([LLM_TOKEN_INDICATOR * mask, OUTPUT_IMAGE_INDICATOR * image], dim=1),
        }, target

    def loss(self, prediction: Tensor, target: Tensor, inputs: dict[str, Any]) -> Tensor:
        """The loss over the image's tokens, which come last; the output for the text is dropped."""
        return super().loss(prediction[:, -target.shape[1] :], target, inputs)

    def law(self, tokens: int) -> Training:
        """Larger images are trained at higher noise: the mean grows by half the logarithm of the number of pixels."""
        law = super().law(tokens)
        assert isinstance(law.training_shift, float)
        return law.replace(training_shift=law.training_shift * math.sqrt(tokens / BASE_TOKENS))

    def clip_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("vae", self.profile.vae.class_name, encode_clip),)

    def text_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("text_encoder", "Qwen3VLModel", encode_prompt, "tokenizer"),)


def encode_clip(encoder: Encoder, frames: Tensor) -> dict[str, Tensor]:
    """The mode of the posterior, packed and normalised by the VAE's batch norm, and the position of every token."""
    from diffusers.models.transformers.transformer_ideogram4 import IMAGE_POSITION_OFFSET

    latents, vae = likeliest(encoder, pixels(encoder, frames)[:, :, 0])[0], encoder.model
    channels = latents.shape[0]
    cells = packed(latents)  # channels are first in a cell; this model has them last
    cells = cells.unflatten(-1, (channels, 4)).transpose(-1, -2).flatten(-2)
    deviation = torch.sqrt(vae.bn.running_var.float() + vae.config.batch_norm_eps)
    cells = (cells - vae.bn.running_mean.float()) / deviation
    rows, columns = torch.arange(cells.shape[0]), torch.arange(cells.shape[1])
    places = torch.cartesian_prod(torch.tensor([0]), rows, columns) + IMAGE_POSITION_OFFSET
    return {"latents": cells.flatten(0, 1), "places": places}


def encode_prompt(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """The states of thirteen layers for the caption as a chat message, padded on the left, and their mask."""
    pipe = encoder.pipeline("Ideogram4Pipeline")
    prompt, _, segments, _ = pipe.encode_prompt(captions, 0, 0, encoder.tokens, encoder.device)
    return {"prompt": prompt, "prompt_mask": (segments > 0).long()}


FAMILY = Ideogram4
