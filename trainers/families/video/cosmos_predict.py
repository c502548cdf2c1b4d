"""Cosmos-Predict2 Video2World and Cosmos-Predict2.5: flow matching of a clip behind its first frame (arXiv 2511.00062;
diffusers CosmosTransformer3DModel, examples/cosmos/train_cosmos_predict25_lora.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from planner.catalog.profiles import ModelProfile
from trainers.families.common.base import Family, Grid
from trainers.families.common.encoding import Encoder, EncoderTurn, likeliest, per_channel, pixels
from trainers.families.common.padding_mask import keep_size

GIVEN_TIMESTEP = 0.0001
"""Noise level that the model is told of frames that are given (``--conditional_frame_timestep``; nvidia-cosmos/
cosmos-predict2 cosmos_predict2/configs/base/config_video2world.py, ``sigma_conditional``)."""

T5 = "T5EncoderModel"


class CosmosPredict(Family):
    """Blocks of self-attention and cross-attention to the prompt, with a time for every token: the clip's first latent
    frame is given, and the loss is that of the others. The published scripts give two in half of their steps, which
    takes the same memory. A clip of one frame is an image that is made from text. Cosmos-Predict2.5 projects its prompt
    itself."""

    fixed: dict[str, int] = {}
    sample_needs = "NVIDIA's guardrail, whose own models are not priced"

    def __init__(self, profile: ModelProfile) -> None:
        super().__init__(profile)
        sizes = zip(self.config["max_size"], self.config["patch_size"], strict=True)
        self.longest_side = max(size // patch for size, patch in sizes)  # all axes have one table

    def prepare(self, model: nn.Module) -> None:
        keep_size()

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        projected = self.config.get("use_crossattn_projection")
        width = self.config["crossattn_proj_in_channels" if projected else "text_embed_dim"]
        return {
            "latents": self.video_latents(grid, device, dtype),
            "prompt": torch.randn(grid["B"], grid["T"], width, device=device, dtype=dtype),
        }

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        """No latent is padding: the mask is of zeros, as large as the latents."""
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
        """The mean over all frames, with no error of those that are given (the published script)."""
        mask = inputs["condition_mask"]
        return super().loss(target * mask + prediction * (1 - mask), target, inputs)

    def clip_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("vae", self.profile.vae.class_name, encode_clip),)

    def text_turns(self) -> tuple[EncoderTurn, ...]:
        kind = self.profile.text_encoders[0].class_name
        encode = encode_with_t5 if kind == T5 else encode_with_qwen
        return (EncoderTurn("text_encoder", kind, encode, "tokenizer"),)


def encode_clip(encoder: Encoder, frames: Tensor) -> dict[str, Tensor]:
    """{"latents": (C, F, h, w)} by the mean of the posterior, every channel with mean 0 and deviation 1."""
    latents, config = likeliest(encoder, pixels(encoder, frames)), encoder.model.config
    latents = (latents - per_channel(config.latents_mean, latents)) / per_channel(config.latents_std, latents)
    return {"latents": latents[0]}


def encode_with_qwen(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """{"prompt": the states of all of Qwen's layers for the caption in the pipeline's template, filled up}, each with
    mean 0 and deviation 1, beside each other. The pipeline is made of parts that captions do not need."""
    from diffusers import Cosmos2_5_PredictBasePipeline

    parts: Any = SimpleNamespace(text_encoder=encoder.model, tokenizer=encoder.helper)
    prompt = Cosmos2_5_PredictBasePipeline._get_prompt_embeds(parts, captions, encoder.tokens, encoder.device)
    return {"prompt": prompt}


def encode_with_t5(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """{"prompt": T5's states of the caption}, filled up with zeros."""
    from diffusers import Cosmos2VideoToWorldPipeline

    parts: Any = SimpleNamespace(text_encoder=encoder.model, tokenizer=encoder.helper)
    prompt = Cosmos2VideoToWorldPipeline._get_t5_prompt_embeds(parts, captions, encoder.tokens, encoder.device)
    return {"prompt": prompt}


FAMILY = CosmosPredict
