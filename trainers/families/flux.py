"""FLUX.1, FLUX.1 Kontext and Flex.1: flow matching on 2x2-packed latents (diffusers FluxTransformer2DModel,
examples/dreambooth train_dreambooth_lora_flux.py and train_dreambooth_lora_flux_kontext.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainers.families.common.base import Grid
from trainers.families.common.encoding import CAPTIONS, Encoder, EncoderTurn, likeliest, packed, pixels, sampled
from trainers.families.common.reference_tokens import ReferenceTokens
from trainers.families.common.sampling import FamilyPipeline


class Flux(ReferenceTokens):
    """Double-stream, then single-stream blocks over text and image; Kontext's reference follows the noisy tokens."""

    shared = frozenset({"image_ids", "text_ids", "reference_ids"})
    reads_reference = True

    def prepare(self, model: nn.Module) -> None:
        """Disables the guidance embedder in training, but not in sampling, if the profile says so (Flex.1; ai-toolkit
        toolkit/models/flux.py ``bypass_flux_guidance``)."""
        if self.profile.inputs.get("guidance_bypassed"):
            model.get_submodule(GUIDANCE).register_forward_hook(_nothing_in_training)

    def without_gradient(self, name: str, blocks: int) -> bool:
        """Whether a parameter never gets a gradient; also those of a disabled guidance embedder do not."""
        bypassed = bool(self.profile.inputs.get("guidance_bypassed")) and name.startswith(f"{GUIDANCE}.")
        return bypassed or super().without_gradient(name, blocks)

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        channels, tokens = self.config["in_channels"], grid["H"] * grid["W"]
        extra = {}
        if self.extra_tokens:
            extra["reference"] = torch.randn(grid["B"], grid["E"], channels, device=device, dtype=dtype)
            extra["reference_ids"] = torch.zeros(grid["E"], 3, device=device, dtype=dtype)
        return extra | {
            "latents": torch.randn(grid["B"], tokens, channels, device=device, dtype=dtype),
            "prompt": torch.randn(grid["B"], grid["T"], self.config["joint_attention_dim"], device=device, dtype=dtype),
            "pooled": torch.randn(grid["B"], self.config["pooled_projection_dim"], device=device, dtype=dtype),
            "image_ids": torch.zeros(tokens, 3, device=device, dtype=dtype),
            "text_ids": torch.zeros(grid["T"], 3, device=device, dtype=dtype),
        }

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        noisy, sigmas, target = self.flow_matching(batch["latents"])
        image_ids = batch["image_ids"]
        if self.extra_tokens:
            noisy = torch.cat([noisy, batch["reference"]], dim=1)
            image_ids = torch.cat([image_ids, batch["reference_ids"]])
        inputs = {
            "hidden_states": noisy,
            "timestep": sigmas,
            "encoder_hidden_states": batch["prompt"],
            "pooled_projections": batch["pooled"],
            "img_ids": image_ids,
            "txt_ids": batch["text_ids"],
        }
        if self.config.get("guidance_embeds"):
            scale = self.profile.training.guidance
            inputs["guidance"] = torch.full((noisy.shape[0],), scale, device=noisy.device, dtype=noisy.dtype)
        return inputs, target

    def clip_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("vae", self.profile.vae.class_name, encode_clip),)

    def text_turns(self) -> tuple[EncoderTurn, ...]:
        pooled = EncoderTurn("text_encoder", "CLIPTextModel", encode_pooled, "tokenizer", at_once=CAPTIONS)
        return pooled, EncoderTurn("text_encoder_2", "T5EncoderModel", encode_prompt, "tokenizer_2", at_once=CAPTIONS)

    def sampler(self) -> FamilyPipeline:
        """Guidance is an input of the model and needs no empty caption."""
        names = {"prompt": "prompt_embeds", "pooled": "pooled_prompt_embeds"}
        name = "FluxKontextPipeline" if self.extra_tokens else "FluxPipeline"
        return FamilyPipeline(pipeline=name, prompt=names, negative=False, image=self.extra_tokens)

    def sampled_image(self, image: Any, height: int, width: int, frames: int) -> dict[str, Any]:
        """The pipeline's arguments for the image to edit, at the sample's size, without resizing it to one of Kontext's
        preferred sizes."""
        return {"image": image, "max_area": height * width, "_auto_resize": False}


GUIDANCE = "time_text_embed.guidance_embedder"


def _nothing_in_training(embedder: nn.Module, _: Any, embedded: Tensor) -> Tensor:
    return torch.zeros_like(embedded) if embedder.training else embedded


def encode_clip(encoder: Encoder, frames: Tensor) -> dict[str, Tensor]:
    """Latents sampled from the posterior, shifted, scaled and packed, and the row and column of every token. The
    reference uses the mode of the posterior, and has 1 in the first column of its positions
    (FluxKontextPipeline.prepare_latents)."""
    tensors = _tokens(encoder, frames, sampled, 0)
    if encoder.reference is None:
        return tensors
    reference = _tokens(encoder, encoder.reference, likeliest, 1)
    return {**tensors, "reference": reference["latents"], "reference_ids": reference["image_ids"]}


def _tokens(
    encoder: Encoder, frames: Tensor, draw: Callable[[Encoder, Tensor], Tensor], which: int
) -> dict[str, Tensor]:
    latents, config = draw(encoder, pixels(encoder, frames)[:, :, 0])[0], encoder.model.config
    cells = packed((latents - config.shift_factor) * config.scaling_factor)
    rows, columns = torch.meshgrid(torch.arange(cells.shape[0]), torch.arange(cells.shape[1]), indexing="ij")
    places = torch.stack([torch.full_like(rows, which), rows, columns], dim=-1)
    return {"latents": cells.flatten(0, 1), "image_ids": places.flatten(0, 1).float()}


def encode_pooled(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """{"pooled": CLIP's pooled vector of the caption}."""
    pipe = encoder.pipeline("FluxPipeline")
    return {"pooled": pipe._get_clip_prompt_embeds(captions, device=encoder.device)}


def encode_prompt(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """{"prompt": T5's states of the caption, "text_ids": their positions, all 0}, padded and without a mask."""
    pipe = encoder.pipeline("FluxPipeline", "_2")
    prompt = pipe._get_t5_prompt_embeds(
        captions, max_sequence_length=encoder.tokens, device=encoder.device, dtype=encoder.model.dtype
    )
    return {"prompt": prompt, "text_ids": prompt.new_zeros(*prompt.shape[:2], 3)}


FAMILY = Flux
