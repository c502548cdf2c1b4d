"""Qwen-Image-2.1: flow matching on latents that are not packed, text and image in one sequence (diffusers
QwenImage21Transformer2DModel, pipelines/qwenimage21/pipeline_qwenimage21.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from planner.catalog.profiles import ModelProfile
from trainers.families.common.base import Grid
from trainers.families.common.encoding import Encoder, EncoderTurn, per_channel, pipeline, pixels, sampled
from trainers.families.common.sampling import FamilyPipeline
from trainers.families.qwen_image import QwenImage

PIPELINE = "QwenImage21Pipeline"

SLOT = 4
"""Tokens of the image that one place of the vision-language sequence stands for: 2x2, a cell of the grid."""


class QwenImage21(QwenImage):
    """Single-stream blocks, in which text attends to the text before it, and the image to all.

    A mask says which places of the sequence are the image's, and all lengths follow from its numbers. Prompts are as
    Qwen-Image's: as long as the longest of a batch, masked where there are several.
    """

    masks_all_tokens = True
    copies_masks = True
    places_by_mask = True

    def __init__(self, profile: ModelProfile) -> None:
        super().__init__(profile)
        image = ("FHW",) * SLOT
        self.sums = {"S": (0, (*image, "T")), "J": (0, ("FHW", "T"))}

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        size, text = grid["B"], grid["T"]
        latents = (size, 2 * grid["H"], 2 * grid["W"], self.config["in_channels"])
        tensors = {
            "latents": torch.randn(latents, device=device, dtype=dtype),
            "prompt": torch.randn(size, text, self.config["context_in_dim"], device=device, dtype=dtype),
        }
        if size > 1:
            tensors["prompt_mask"] = torch.ones(size, text, device=device, dtype=torch.bool)
        return tensors

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        size, rows, columns, _ = batch["latents"].shape
        noisy, sigmas, target = self.flow_matching(batch["latents"].flatten(1, 2))
        text = torch.zeros(batch["prompt"].shape[:2], device=noisy.device, dtype=torch.bool)
        return {
            "hidden_states": noisy,
            "timestep": sigmas,
            "encoder_hidden_states": batch["prompt"],
            "encoder_hidden_states_mask": batch.get("prompt_mask"),
            "img_shapes": [[(1, rows, columns)]] * size,
            "img_mask": torch.cat([text, text.new_ones(size, rows * columns // SLOT)], dim=1),
        }, target

    def loss(self, prediction: Tensor, target: Tensor, inputs: dict[str, Any]) -> Tensor:
        """The family's loss over the image's tokens, which come last; what the model says of the text is dropped."""
        return super().loss(prediction[:, -target.shape[1] :], target, inputs)

    def without_gradient(self, name: str, blocks: int) -> bool:
        """Whether a weight never gets a gradient: none; the last block's queries of the text work for nobody, and get
        zeros."""
        return False

    def clip_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("vae", self.profile.vae.class_name, encode_clip),)

    def text_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("text_encoder", "Qwen3VLForConditionalGeneration", encode_prompt, "processor"),)

    def sampler(self) -> FamilyPipeline:
        """What the pipeline keeps of a prompt from the first noise level on saves time and takes memory: not here, so
        that each level takes what is recorded."""
        return FamilyPipeline(
            pipeline=PIPELINE,
            prompt={"prompt": "prompt_embeds"},
            scale="true_cfg_scale",
            init={"processor": PromptReader()},
            call={"use_kv_cache": False},
        )


class PromptReader:
    """A tokenizer where the pipeline has a processor of images and prompts: it is asked for prompts alone, or, where
    those are encoded already, for nothing."""

    def __init__(self, tokenizer: Any = None) -> None:
        self._tokenizer = tokenizer
        self.tokenizer = self

    def encode(self, text: str) -> list[int]:
        """The word that stands for an image: none of a prompt's."""
        return [-1]

    def apply_chat_template(self, messages: list[Any], **options: Any) -> list[list[int]]:
        """The words of one conversation, as of a batch of one."""
        return [self._tokenizer.apply_chat_template(messages, **options) if self._tokenizer else []]

    def __call__(self, text: list[str], **options: Any) -> Any:
        return self._tokenizer(text, **options)


def encode_clip(encoder: Encoder, frames: Tensor) -> dict[str, Tensor]:
    """{"latents": (h, w, C)}, drawn from the VAE's posterior over the opaque image, every channel with mean 0 and
    deviation 1."""
    image = pixels(encoder, frames)
    latents, config = sampled(encoder, torch.cat([image, torch.ones_like(image[:, :1])], dim=1)), encoder.model.config
    latents = (latents - per_channel(config.latents_mean, latents)) / per_channel(config.latents_std, latents)
    return {"latents": latents[0, :, 0].permute(1, 2, 0).contiguous()}


def encode_prompt(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """The states of the caption in the pipeline's template, without those of its system's message; as long as the
    caption, without padding."""
    parts = {"text_encoder": encoder.model, "processor": PromptReader(encoder.helper)}
    prompt, _, _ = pipeline(PIPELINE, **parts).encode_prompt(captions, device=encoder.device)
    return {"prompt": prompt[:, : encoder.tokens]}


FAMILY = QwenImage21
