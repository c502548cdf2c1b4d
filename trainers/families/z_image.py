"""Z-Image: flow matching, with a separate tensor for each sample (arXiv 2511.22699; diffusers ZImageTransformer2DModel,
examples/dreambooth/train_dreambooth_lora_z_image.py).

The model pads image and text of every sample to multiples of 32 tokens, which tapes count in units of 32. Before and
after its blocks it processes samples one by one, so the number of operators depends on the batch: the tape for several
samples is recorded at a batch of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainers.families.common.base import Family, Grid
from trainers.families.common.encoding import Encoder, EncoderTurn, likeliest, pixels
from trainers.families.common.sampling import FamilyPipeline


class ZImage(Family):
    """Refiner blocks over image and over text, then single-stream blocks over both."""

    fixed = {"F": 1, "B": 2}
    ragged = frozenset({"prompt"})
    rounded = {"C": ("T", 32), "P": ("HW", 32)}
    sums = {"S": (0, ("C", "P"))}

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        return {
            "latents": self.video_latents(grid, device, dtype),
            "prompt": torch.randn(grid["B"], grid["T"], self.config["cap_feat_dim"], device=device, dtype=dtype),
        }

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        """The model's time runs from noise to image, and it predicts the opposite velocity."""
        noisy, sigmas, target = self.flow_matching(batch["latents"])
        return {
            "x": list(noisy.unbind()),
            "t": 1 - sigmas,
            "cap_feats": list(batch["prompt"].unbind()),
        }, target

    def loss(self, prediction: Any, target: Tensor, inputs: dict[str, Any]) -> Tensor:
        """The loss of the stacked prediction: the model returns a list with one tensor per sample, of the opposite
        sign."""
        return super().loss(-torch.stack(prediction), target, inputs)

    def clip_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("vae", self.profile.vae.class_name, encode_clip),)

    def text_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("text_encoder", "Qwen3Model", encode_prompt, "tokenizer"),)

    def sampler(self) -> FamilyPipeline:
        return FamilyPipeline(pipeline="ZImagePipeline", prompt={"prompt": "prompt_embeds"}, listed=True, unguided=0.0)

    def collate(self, samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Prompts of different lengths become a nested tensor: the model takes them one by one and pads them itself."""
        prompts = [sample["prompt"] for sample in samples]
        # Prompts of equal length are stacked, as in `batch`.
        if len({prompt.shape for prompt in prompts}) == 1:
            return super().collate(samples)
        without_prompts = [{name: tensor for name, tensor in sample.items() if name != "prompt"} for sample in samples]
        return {**super().collate(without_prompts), "prompt": torch.nested.as_nested_tensor(prompts)}


def encode_clip(encoder: Encoder, frames: Tensor) -> dict[str, Tensor]:
    """{"latents": (C, 1, h, w)}, the mode of the VAE's posterior, shifted and scaled as in diffusers' example."""
    latents, config = likeliest(encoder, pixels(encoder, frames)[:, :, 0])[0], encoder.model.config
    return {"latents": ((latents - config.shift_factor) * config.scaling_factor)[:, None]}


def encode_prompt(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """{"prompt": Qwen3's penultimate states of the caption as a chat message}, without padding."""
    pipe = encoder.pipeline("ZImagePipeline")
    embeddings = pipe.encode_prompt(
        captions, encoder.device, do_classifier_free_guidance=False, max_sequence_length=encoder.tokens
    )
    return {"prompt": torch.stack(embeddings[0])}


FAMILY = ZImage
