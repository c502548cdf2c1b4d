"""ERNIE-Image: flow matching on 2x2-packed latents of FLUX.2's VAE (diffusers ErnieImageTransformer2DModel; OneTrainer
modules/modelSetup/BaseErnieSetup.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainers.families.common.base import Family, Grid
from trainers.families.common.encoding import Encoder, EncoderTurn, packed, pixels, sampled
from trainers.families.common.sampling import FamilyPipeline

BATCH_NORM_EPS = 1e-5
"""The epsilon of its latents' normalisation, instead of the one in the VAE's config (diffusers
pipelines/ernie_image/pipeline_ernie_image.py, which says that the config is wrong)."""


class ErnieImage(Family):
    """Single-stream blocks over image and text with a mask of one row; the model takes the length of each prompt."""

    sums = {"S": (0, ("FHW", "T"))}
    masks_all_tokens = True
    ragged = frozenset({"prompt"})

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        size = grid["B"]
        latents = (size, self.config["in_channels"], grid["H"], grid["W"])
        return {
            "latents": torch.randn(latents, device=device, dtype=dtype),
            "prompt": torch.randn(size, grid["T"], self.config["text_in_dim"], device=device, dtype=dtype),
            "prompt_length": torch.full((size,), grid["T"], device=device, dtype=torch.long),
        }

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        noisy, sigmas, target = self.flow_matching(batch["latents"])
        return {
            "hidden_states": noisy,
            "timestep": sigmas * 1000,
            "text_bth": batch["prompt"],
            "text_lens": batch["prompt_length"],
        }, target

    def tokens_of(self, latents: Tensor) -> int:
        """Every position of packed latents (B, C, h, w) is a token."""
        return latents[0, 0].numel()

    def clip_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("vae", self.profile.vae.class_name, encode_clip),)

    def text_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("text_encoder", "Mistral3Model", encode_prompt, "tokenizer"),)

    def sampler(self) -> FamilyPipeline:
        return FamilyPipeline(pipeline="ErnieImagePipeline", prompt={"prompt": "prompt_embeds"}, listed=True)

    def collate(self, samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Prompts are padded to the longest one; their lengths define the mask."""
        longest = max(sample["prompt"].shape[0] for sample in samples)
        filled = [
            {**sample, "prompt": functional.pad(sample["prompt"], (0, 0, 0, longest - sample["prompt"].shape[0]))}
            for sample in samples
        ]
        return super().collate(filled)


def encode_clip(encoder: Encoder, frames: Tensor) -> dict[str, Tensor]:
    """{"latents": (4C, h/2, w/2)}, sampled from the VAE's posterior, packed in cells of 2x2 and normalised by its batch
    norm."""
    cells, norm = packed(sampled(encoder, pixels(encoder, frames)[:, :, 0])[0]), encoder.model.bn
    deviation = torch.sqrt(norm.running_var.float() + BATCH_NORM_EPS)
    return {"latents": ((cells - norm.running_mean.float()) / deviation).permute(2, 0, 1).contiguous()}


def encode_prompt(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """{"prompt": Ministral's penultimate states of the plain caption, without padding, at most the plan's tokens,
    "prompt_length": their number}."""
    pipe = encoder.pipeline("ErnieImagePipeline")
    (prompt,) = pipe.encode_prompt(captions, encoder.device)
    prompt = prompt[: encoder.tokens]
    return {"prompt": prompt[None], "prompt_length": torch.tensor([prompt.shape[0]], device=prompt.device)}


FAMILY = ErnieImage
