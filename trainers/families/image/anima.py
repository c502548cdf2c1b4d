"""Anima: flow matching with Cosmos-Predict2's transformer and a text conditioner (diffusers CosmosTransformer3DModel,
AnimaTextConditioner, modular_pipelines/anima; sd-scripts anima_train_network.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainers.families.common.base import Grid
from trainers.families.common.cosmos import CosmosTransformer
from trainers.families.common.encoding import Encoder, EncoderTurn, pixels, sampled, standardised

STATES = "states"
"""Qwen3's output for the conditioner, which is cached only until the conditioner has run."""


class Anima(CosmosTransformer):
    """Blocks of self-attention and cross-attention to the prompt. The conditioner is frozen, so its output is cached;
    trainers that keep it in the model run it in every step."""

    sample_needs = "a modular pipeline, which has no common call"

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        text = grid["B"], grid["T"], self.config["text_embed_dim"]
        return {
            "latents": self.video_latents(grid, device, dtype),
            "prompt": torch.randn(*text, device=device, dtype=dtype),
        }

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        """The padding mask has the latents' size and is all zeros, because no latent is padding."""
        noisy, sigmas, target = self.flow_matching(batch["latents"])
        return {
            "hidden_states": noisy,
            "timestep": sigmas.to(noisy.dtype),
            "encoder_hidden_states": batch["prompt"],
            "padding_mask": noisy.new_zeros(1, 1, *noisy.shape[-2:]),
        }, target

    def clip_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("vae", self.profile.vae.class_name, encode_clip),)

    def text_turns(self) -> tuple[EncoderTurn, ...]:
        return (
            EncoderTurn("text_encoder", "Qwen3Model", encode_caption, "tokenizer"),
            EncoderTurn("text_conditioner", "AnimaTextConditioner", condition, "t5_tokenizer", reads_earlier=True),
        )

    def joined(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """A sample, without Qwen3's states."""
        return {name: tensor for name, tensor in parts.items() if name != STATES}


def encode_clip(encoder: Encoder, frames: Tensor) -> dict[str, Tensor]:
    """{"latents": (C, 1, h, w)}, sampled from the VAE's posterior and standardised."""
    return {"latents": standardised(sampled(encoder, pixels(encoder, frames)), encoder.model.config)[0]}


def encode_caption(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """{"states": Qwen3's last states of the caption}, without padding; one token of zeros for an empty caption
    (modular_pipelines/anima/encoders.py)."""
    ids = encoder.helper(captions, max_length=encoder.tokens, truncation=True, return_tensors="pt").input_ids
    ids = ids.long().to(encoder.device)
    if not ids.shape[1]:
        return {STATES: encoder.model.embed_tokens.weight.new_zeros(len(captions), 1, encoder.model.config.hidden_size)}
    return {STATES: encoder.model(input_ids=ids).last_hidden_state}


def condition(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """{"prompt": the conditioner's output for Qwen3's states and the caption's T5 tokens}, padded."""
    tokens = encoder.helper(captions, max_length=encoder.tokens, truncation=True, return_tensors="pt")
    states = encoder.earlier[STATES][None].to(encoder.device)
    prompt = encoder.model(
        source_hidden_states=states.to(encoder.model.dtype),
        target_input_ids=tokens.input_ids.to(encoder.device),
        target_attention_mask=tokens.attention_mask.to(encoder.device),
        source_attention_mask=torch.ones(states.shape[:2], dtype=torch.long, device=encoder.device),
    )
    return {"prompt": prompt}


FAMILY = Anima
