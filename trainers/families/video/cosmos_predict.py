"""Cosmos-Predict2 Video2World and Cosmos-Predict2.5: flow matching of a clip given its first frame (arXiv 2511.00062;
diffusers CosmosTransformer3DModel, examples/cosmos/train_cosmos_predict25_lora.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from trainers.families.common.base import Grid
from trainers.families.common.cosmos import CosmosTransformer
from trainers.families.common.encoding import Encoder, EncoderTurn, likeliest, pixels, standardised

GIVEN_TIMESTEP = 0.0001
"""Noise level passed to the model for given frames (``--conditional_frame_timestep``; nvidia-cosmos/cosmos-predict2
cosmos_predict2/configs/base/config_video2world.py, ``sigma_conditional``)."""

T5 = "T5EncoderModel"


class CosmosPredict(CosmosTransformer):
    """Blocks of self-attention and cross-attention to the prompt, with a timestep for every token. The clip's first
    latent frame is given, and the loss is over the others; the published scripts give two frames in half of the steps,
    which takes the same memory. A clip of one frame is an image generated from text. In Cosmos-Predict2.5 the model
    projects the prompt."""

    fixed: dict[str, int] = {}
    sample_needs = "NVIDIA's guardrail, whose own models are not priced"

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        projected = self.config.get("use_crossattn_projection")
        width = self.config["crossattn_proj_in_channels" if projected else "text_embed_dim"]
        return {
            "latents": self.video_latents(grid, device, dtype),
            "prompt": torch.randn(grid["B"], grid["T"], width, device=device, dtype=dtype),
        }

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        """The padding mask has the latents' size and is all zeros, because no latent is padding."""
        noisy, sigmas, target = self.flow_matching(batch["latents"])
        frames, rows, columns = noisy.shape[2:]
        given = torch.zeros((noisy.shape[0], 1, frames, 1, 1), device=noisy.device)
        given[:, :, : int(frames > 1)] = 1.0
        mask = given.to(noisy.dtype).expand(-1, -1, -1, rows, columns)
        return {
            "hidden_states": batch["latents"] * mask + noisy * (1 - mask),
            "condition_mask": mask,
            "timestep": given * GIVEN_TIMESTEP + (1 - given) * sigmas.view(-1, 1, 1, 1, 1),
            "encoder_hidden_states": batch["prompt"],
            "padding_mask": noisy.new_zeros(1, 1, rows, columns),
        }, target

    def loss(self, prediction: Tensor, target: Tensor, inputs: dict[str, Any]) -> Tensor:
        """The mean over all frames, with an error of 0 for given ones, as in the published script."""
        mask = inputs["condition_mask"]
        return super().loss(target * mask + prediction * (1 - mask), target, inputs)

    def clip_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("vae", self.profile.vae.class_name, encode_clip),)

    def text_turns(self) -> tuple[EncoderTurn, ...]:
        kind = self.profile.text_encoders[0].class_name
        encode = encode_with_t5 if kind == T5 else encode_with_qwen
        return (EncoderTurn("text_encoder", kind, encode, "tokenizer"),)


def encode_clip(encoder: Encoder, frames: Tensor) -> dict[str, Tensor]:
    """{"latents": (C, F, h, w)}, the mean of the VAE's posterior, standardised."""
    return {"latents": standardised(likeliest(encoder, pixels(encoder, frames)), encoder.model.config)[0]}


def encode_with_qwen(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """{"prompt": the states of all of Qwen's layers for the caption in the pipeline's template}, padded, each layer
    normalised to mean 0 and deviation 1, concatenated. Calls the pipeline's method without making the pipeline, which
    would need other parts."""
    from diffusers import Cosmos2_5_PredictBasePipeline

    parts: Any = SimpleNamespace(text_encoder=encoder.model, tokenizer=encoder.helper)
    prompt = Cosmos2_5_PredictBasePipeline._get_prompt_embeds(parts, captions, encoder.tokens, encoder.device)
    return {"prompt": prompt}


def encode_with_t5(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """{"prompt": T5's states of the caption}, padded with zeros."""
    from diffusers import Cosmos2VideoToWorldPipeline

    parts: Any = SimpleNamespace(text_encoder=encoder.model, tokenizer=encoder.helper)
    prompt = Cosmos2VideoToWorldPipeline._get_t5_prompt_embeds(parts, captions, encoder.tokens, encoder.device)
    return {"prompt": prompt}


FAMILY = CosmosPredict
