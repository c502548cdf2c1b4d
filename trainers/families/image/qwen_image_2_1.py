"""Qwen-Image-2.1: flow matching on unpacked latents, with text and image in one sequence (diffusers
QwenImage21Transformer2DModel, pipelines/qwenimage21/pipeline_qwenimage21.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from planner.catalog.profiles import ModelProfile
from trainers.families.common.base import Grid
from trainers.families.common.encoding import Encoder, EncoderTurn, pipeline, pixels, sampled, standardised
from trainers.families.common.sampling import FamilyPipeline
from trainers.families.qwen_image import QwenImage

PIPELINE = "QwenImage21Pipeline"

SLOT = 4
"""Image tokens for one position of the vision-language sequence: 2x2, a cell of the grid."""


class QwenImage21(QwenImage):
    """Single-stream blocks in which text attends causally to text, and the image to everything.

    A mask marks the image's positions in the sequence, and all lengths are computed from its values. Prompts are as in
    Qwen-Image: padded to the longest of a batch, and masked with several samples.
    """

    masks_all_tokens = True
    copies_masks = True
    places_by_mask = True
    idle = ()
    """The last block's queries of the text have no effect, but their gradients are zeros."""

    def __init__(self, profile: ModelProfile) -> None:
        super().__init__(profile)
        image = ("FHW",) * SLOT
        # The table of modulation has a row for each sample, and one for the text of all.
        self.sums = {"S": (0, (*image, "T")), "J": (0, ("FHW", "T")), "M": (1, ("B",))}

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
        """The loss over the image's tokens, which come last; the output for the text is dropped."""
        return super().loss(prediction[:, -target.shape[1] :], target, inputs)

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
    """Stands in for the pipeline's processor of images and prompts: a tokenizer for encoding prompts only, or none if
    prompts are encoded already."""

    def __init__(self, tokenizer: Any = None) -> None:
        self._tokenizer = tokenizer
        self.tokenizer = self

    def encode(self, text: str) -> list[int]:
        """The id of the image placeholder, which no prompt contains."""
        return [-1]

    def apply_chat_template(self, messages: list[Any], **options: Any) -> list[list[int]]:
        """The token ids of one conversation, as a batch of one."""
        return [self._tokenizer.apply_chat_template(messages, **options) if self._tokenizer else []]

    def __call__(self, text: list[str], **options: Any) -> Any:
        return self._tokenizer(text, **options)


def encode_clip(encoder: Encoder, frames: Tensor) -> dict[str, Tensor]:
    """{"latents": (h, w, C)}, sampled from the VAE's posterior for the image with an opaque alpha channel, and
    standardised."""
    image = pixels(encoder, frames)
    opaque = torch.cat([image, torch.ones_like(image[:, :1])], dim=1)
    latents = standardised(sampled(encoder, opaque), encoder.model.config)
    return {"latents": latents[0, :, 0].permute(1, 2, 0).contiguous()}


def encode_prompt(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """{"prompt": Qwen's states of the caption in the pipeline's template}, without its system message and without
    padding."""
    parts = {"text_encoder": encoder.model, "processor": PromptReader(encoder.helper)}
    prompt, _, _ = pipeline(PIPELINE, **parts).encode_prompt(captions, device=encoder.device)
    return {"prompt": prompt[:, : encoder.tokens]}


FAMILY = QwenImage21
