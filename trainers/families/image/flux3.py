"""FLUX.3: flow matching on 2x2-packed latents (diffusers Flux3Transformer2DModel, modular_pipelines/flux3)."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from trainers.families.common.base import Family, Grid
from trainers.families.common.encoding import Encoder, EncoderTurn, likeliest, packed, pixels

POSITION_SCALE = 0.5
"""Distance of neighbouring rows and columns of the image (``Flux3PrepareLatentsStep``, image_rope_scale)."""

LAYERS = (4, 8, 12, 16, 20, 24, 28, 32)
"""The text encoder's layers whose states are concatenated (``Flux3TextEncoderStep``, text_encoder_out_layers)."""


class Flux3(Family):
    """Separate blocks over text and image, then blocks over both. The blocks over reference images are loaded but not
    called in a step."""

    shared = frozenset({"image_ids", "text_ids"})
    sums = {"S": (0, ("FHW", "T"))}
    sample_needs = "a modular pipeline, which has no common call"

    def complete(self, model: nn.Module) -> None:
        """Gives a shallow model all blocks over reference images; the class makes as many of them as of the others."""
        idle = model.get_submodule("mode_blocks.image_cond")
        assert isinstance(idle, nn.ModuleList)
        for _ in range(self.config["num_layers"] - len(idle)):
            idle.append(copy.deepcopy(idle[0]))

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        tokens, text = grid["H"] * grid["W"], grid["T"]
        return {
            "latents": torch.randn(grid["B"], tokens, self.config["in_channels"], device=device, dtype=dtype),
            "prompt": torch.randn(grid["B"], text, self.config["joint_attention_dim"], device=device, dtype=dtype),
            "image_ids": torch.zeros(tokens, 4, device=device),
            "text_ids": torch.zeros(text, 4, device=device),
        }

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        noisy, sigmas, target = self.flow_matching(batch["latents"])
        return {
            "hidden_states": noisy,
            "timestep": sigmas,
            "encoder_hidden_states": batch["prompt"],
            "img_ids": batch["image_ids"],
            "txt_ids": batch["text_ids"],
        }, target

    def without_gradient(self, name: str, blocks: int) -> bool:
        """Whether a parameter never gets a gradient: those for reference images do not."""
        return "image_cond." in name

    def clip_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("vae", self.profile.vae.class_name, encode_clip),)

    def text_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("text_encoder", "Qwen3VLForConditionalGeneration", encode_prompt, "tokenizer"),)


def encode_clip(encoder: Encoder, frames: Tensor) -> dict[str, Tensor]:
    """The mode of the posterior, packed and normalised by the VAE's batch norm, and the position of every token."""
    latents, vae = likeliest(encoder, pixels(encoder, frames)[:, :, 0])[0], encoder.model
    deviation = torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps)
    cells = (packed(latents) - vae.bn.running_mean.float()) / deviation.float()
    rows, columns = (POSITION_SCALE * torch.arange(cells.shape[axis]) for axis in (0, 1))
    places = torch.cartesian_prod(torch.zeros(1), rows, columns, torch.zeros(1))
    return {"latents": cells.flatten(0, 1), "image_ids": places}


def encode_prompt(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """{"prompt": the states of eight layers for the caption as a chat message, concatenated along the width,
    "text_ids": the positions of its tokens}. Padded to the plan's tokens; the pipeline pads to a multiple of 80."""
    from diffusers.modular_pipelines.flux3.encoders import Flux3TextEncoderStep

    words = encoder.helper  # stands in for the pipeline's processor of images and prompts
    reader = SimpleNamespace(tokenizer=words, apply_chat_template=words.apply_chat_template)
    states = [
        Flux3TextEncoderStep._get_qwen3_vl_prompt_embeds(
            encoder.model, reader, caption, encoder.device, encoder.tokens, encoder.tokens, LAYERS
        )
        for caption in captions
    ]
    places = torch.zeros(encoder.tokens, 4)
    places[:, 3] = torch.arange(encoder.tokens)
    return {"prompt": torch.cat(states), "text_ids": places.expand(len(captions), -1, -1)}


FAMILY = Flux3
