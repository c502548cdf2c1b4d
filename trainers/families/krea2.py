"""Krea 2: flow matching on 2x2-packed latents (diffusers Krea2Transformer2DModel, examples/dreambooth
train_dreambooth_lora_krea2.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainers.families.common.base import Family, Grid
from trainers.families.common.encoding import Encoder, EncoderTurn, packed, pixels, sampled, standardised
from trainers.families.common.sampling import FamilyPipeline


class Krea2(Family):
    """Single-stream blocks over text and image; the text is the states of twelve layers, padded and masked."""

    sums = {"S": (0, ("FHW", "T"))}
    masks_all_tokens = True
    shared = frozenset({"position_ids"})

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        text, tokens = (grid["B"], grid["T"]), grid["H"] * grid["W"]
        layers, width = self.config["num_text_layers"], self.config["text_hidden_dim"]
        return {
            "latents": torch.randn(grid["B"], tokens, self.config["in_channels"], device=device, dtype=dtype),
            "prompt": torch.randn(*text, layers, width, device=device, dtype=dtype),
            "prompt_mask": torch.ones(text, device=device, dtype=torch.bool),
            "position_ids": torch.zeros(grid["T"] + tokens, 3, device=device),
        }

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        noisy, sigmas, target = self.flow_matching(batch["latents"])
        return {
            "hidden_states": noisy,
            "timestep": sigmas,
            "encoder_hidden_states": batch["prompt"],
            "encoder_attention_mask": batch["prompt_mask"],
            "position_ids": batch["position_ids"],
        }, target

    def clip_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("vae", self.profile.vae.class_name, encode_clip),)

    def text_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("text_encoder", "Qwen3VLModel", encode_prompt, "tokenizer"),)

    def sampler(self) -> FamilyPipeline:
        names = {"prompt": "prompt_embeds", "prompt_mask": "prompt_embeds_mask"}
        return FamilyPipeline(pipeline="Krea2Pipeline", prompt=names, unguided=0.0)


def encode_clip(encoder: Encoder, frames: Tensor) -> dict[str, Tensor]:
    """Latents sampled from the posterior, standardised and packed, and all tokens' positions, the text's first."""
    from diffusers import Krea2Pipeline

    latents = standardised(sampled(encoder, pixels(encoder, frames)), encoder.model.config)
    cells = packed(latents[0, :, 0])
    places = Krea2Pipeline.prepare_position_ids(encoder.tokens, cells.shape[0], cells.shape[1], cells.device)
    return {"latents": cells.flatten(0, 1), "position_ids": places}


def encode_prompt(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """The states of twelve layers for the caption in the pipeline's template, padded before the template's end, and
    their mask."""
    pipe = encoder.pipeline("Krea2Pipeline")
    prompt, mask = pipe.encode_prompt(captions, encoder.device, max_sequence_length=encoder.tokens)
    return {"prompt": prompt, "prompt_mask": mask}


FAMILY = Krea2
