"""Stable Diffusion 1.x and SDXL: noise or v-prediction by a convolutional UNet (arXiv 2112.10752, 2307.01952; diffusers
UNet2DConditionModel). `trainers.families.latentsync` extends it.

A cell of the grid has 8 latent pixels per side (4 for SDXL), because the UNet halves them three times (twice), so every
level divides exactly.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DDPMScheduler
from torch import Tensor

from planner.catalog.profiles import ModelProfile
from trainers.families.common import noise_levels, random_draws
from trainers.families.common.base import Family, Grid
from trainers.families.common.encoding import CAPTIONS, Encoder, EncoderTurn, pixels, sampled
from trainers.families.common.sampling import FamilyPipeline


class Unet(Family):
    """A UNet over images, or over the frames of a clip as separate images (LatentSync without motion modules)."""

    def __init__(self, profile: ModelProfile) -> None:
        super().__init__(profile)
        self.fixed = {} if profile.kind == "video" else {"F": 1}
        self.scheduler = DDPMScheduler(**profile.training.scheduler)

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        """Frames are in the batch dimension: (B * F, C, h, w), each with its own condition."""
        size = grid["B"] * grid["F"]
        _, patch_h, patch_w = self.profile.shape.patch
        channels = self.profile.vae.latent_channels
        pixels = (grid["H"] * patch_h, grid["W"] * patch_w)
        text = (size, grid["T"], self.config["cross_attention_dim"])
        tensors = {
            "latents": torch.randn(size, channels, *pixels, device=device, dtype=dtype),
            "prompt": torch.randn(*text, device=device, dtype=dtype),
        }
        if (extra := self.config["in_channels"] - channels) > 0:
            tensors["condition"] = torch.randn(size, extra, *pixels, device=device, dtype=dtype)
        if self.config.get("addition_embed_type") == "text_time":
            pooled, numbers = self.profile.inputs["pooled_dim"], self.profile.inputs["time_ids"]
            tensors["pooled"] = torch.randn(size, pooled, device=device, dtype=dtype)
            tensors["time_ids"] = torch.randn(size, numbers, device=device, dtype=dtype)
        return tensors

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        latents = batch["latents"]
        noise, timesteps = self.drawn(batch)
        noisy = self.scheduler.add_noise(latents, noise, timesteps)
        inputs = {"sample": noisy, "timestep": timesteps, "encoder_hidden_states": batch["prompt"]}
        if "condition" in batch:
            inputs["sample"] = torch.cat([noisy, batch["condition"]], dim=1)
        if "pooled" in batch:
            inputs["added_cond_kwargs"] = {"text_embeds": batch["pooled"], "time_ids": batch["time_ids"]}
        self.loss_weights = noise_levels.min_snr(self.scheduler, timesteps, self.profile.training)
        if self.profile.training.objective == "v":
            return inputs, self.scheduler.get_velocity(latents, noise, timesteps)
        return inputs, noise

    def drawn(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(noise with the shape of the latents, a timestep for each of them)."""
        latents = batch["latents"]
        noise = random_draws.normal_like(latents)
        return noise, random_draws.integers(self.timesteps, latents.shape[0], latents.device)

    @property
    def timesteps(self) -> int:
        """The number of timesteps in training, from the scheduler's config."""
        return int(self.scheduler.config["num_train_timesteps"])

    @property
    def pooled(self) -> bool:
        """Whether it is an SDXL UNet, which also takes a pooled text vector and the image's sizes and crop."""
        return self.config.get("addition_embed_type") == "text_time"

    def clip_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("vae", self.profile.vae.class_name, self.encode_clip),)

    def text_turns(self) -> tuple[EncoderTurn, ...]:
        if not self.pooled:
            return (EncoderTurn("text_encoder", "CLIPTextModel", encode_prompt, "tokenizer", at_once=CAPTIONS),)
        return (
            EncoderTurn("text_encoder", "CLIPTextModel", encode_first, "tokenizer", at_once=CAPTIONS),
            EncoderTurn(
                "text_encoder_2", "CLIPTextModelWithProjection", encode_second, "tokenizer_2", at_once=CAPTIONS
            ),
        )

    def sampler(self) -> FamilyPipeline | None:
        arguments = {"prompt": "prompt_embeds"} | ({"pooled": "pooled_prompt_embeds"} if self.pooled else {})
        return FamilyPipeline(
            pipeline="StableDiffusionXLPipeline" if self.pooled else "StableDiffusionPipeline",
            prompt=arguments,
            scheduler="DDIMScheduler",
            settings={
                **self.profile.training.scheduler,
                "clip_sample": False,
                "set_alpha_to_one": False,
                "steps_offset": 1,
            },
            init={} if self.pooled else {"requires_safety_checker": False},
        )

    def encode_clip(self, encoder: Encoder, frames: Tensor) -> dict[str, Tensor]:
        """{"latents": sampled from the posterior and scaled}, and for SDXL `time_ids`: original size, corner of the
        crop, and target size (diffusers examples/text_to_image train_text_to_image_lora_sdxl.py)."""
        latents = sampled(encoder, pixels(encoder, frames)[:, :, 0])[0]
        tensors = {"latents": latents * encoder.model.config.scaling_factor}
        if self.pooled:
            (height, width), target = encoder.size, frames.shape[1:3]
            scale = max(target[0] / height, target[1] / width)
            corner = (round((height * scale - target[0]) / 2), round((width * scale - target[1]) / 2))
            tensors["time_ids"] = torch.tensor([height, width, *corner, *target], dtype=torch.float32)
        return tensors

    def joined(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """An SDXL sample, with both encoders' states concatenated along their width; other samples unchanged."""
        if "first" not in parts:
            return parts
        return {"prompt": torch.cat([parts["first"], parts["second"]], dim=-1), "pooled": parts["pooled"]}


def encode_prompt(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """{"prompt": CLIP's last states of the caption}, as StableDiffusionPipeline takes them."""
    pipe = encoder.pipeline("StableDiffusionPipeline")
    return {"prompt": pipe.encode_prompt(captions, encoder.device, 1, do_classifier_free_guidance=False)[0]}


def encode_first(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """{"first": the penultimate states of SDXL's smaller encoder}."""
    return {"first": _states(encoder, captions).hidden_states[-2]}


def encode_second(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """The penultimate states of SDXL's larger encoder (`second`), and its projected vector (`pooled`), as
    StableDiffusionXLPipeline.encode_prompt takes them."""
    states = _states(encoder, captions)
    return {"second": states.hidden_states[-2], "pooled": states.text_embeds}


def _states(encoder: Encoder, captions: list[str]) -> Any:
    tokens = encoder.helper(
        captions, padding="max_length", max_length=encoder.tokens, truncation=True, return_tensors="pt"
    )
    return encoder.model(tokens.input_ids.to(encoder.device), output_hidden_states=True)


FAMILY = Unet
