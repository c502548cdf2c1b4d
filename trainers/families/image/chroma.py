"""Chroma: FLUX.1's blocks over T5's states only, with all scales and shifts from a separate network (diffusers
ChromaTransformer2DModel).

As OneTrainer trains it (23df383, modules/model/ChromaModel.py and modules/modelSetup/BaseChromaSetup.py): prompts, with
their first padding token, are padded to the longest of the batch, and a mask is passed only with several samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainers.families.common.base import Family, Grid
from trainers.families.common.encoding import Encoder, EncoderTurn
from trainers.families.common.sampling import FamilyPipeline
from trainers.families.flux import encode_clip


class Chroma(Family):
    """Double-stream, then single-stream blocks over text and image."""

    masks_all_tokens = copies_masks = True
    ragged = frozenset({"prompt"})
    shared = frozenset({"image_ids"})
    sums = {"S": (0, ("FHW", "T"))}

    def prepare(self, model: nn.Module) -> None:
        """Fixes the class's masks (`_pass_masks`), and gives a shallow model for recording the whole model's table of
        modulations: its length depends on the number of blocks and appears in sizes."""
        _pass_masks(model)
        modulations = 12 * self.config["num_layers"] + 3 * self.config["num_single_layers"] + 2
        embedding = model.get_submodule("time_text_embed")
        table = embedding.get_buffer("mod_proj")
        if table.shape[0] != modulations:
            embedding.register_buffer("mod_proj", table.new_zeros(modulations, table.shape[1]), persistent=False)

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        size, tokens = grid["B"], grid["H"] * grid["W"]
        tensors = {
            "latents": torch.randn(size, tokens, self.config["in_channels"], device=device, dtype=dtype),
            "prompt": torch.randn(size, grid["T"], self.config["joint_attention_dim"], device=device, dtype=dtype),
            "image_ids": torch.zeros(tokens, 3, device=device, dtype=dtype),
        }
        if size > 1:
            tensors["prompt_mask"] = torch.ones(size, grid["T"], device=device, dtype=torch.bool)
        return tensors

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        noisy, sigmas, target = self.flow_matching(batch["latents"])
        prompt, mask = batch["prompt"], batch.get("prompt_mask")
        inputs = {
            "hidden_states": noisy,
            "timestep": sigmas,
            "encoder_hidden_states": prompt,
            "img_ids": batch["image_ids"],
            "txt_ids": prompt.new_zeros(prompt.shape[1], 3),
        }
        if mask is not None:
            inputs["attention_mask"] = torch.cat([mask, mask.new_ones(noisy.shape[:2])], dim=1)
        return inputs, target

    def clip_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("vae", self.profile.vae.class_name, encode_clip),)

    def text_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("text_encoder", "T5EncoderModel", encode_prompt, "tokenizer"),)

    def sampler(self) -> FamilyPipeline:
        """The pipeline requires masks, but with one prompt they are not used."""
        mask = torch.ones(1, 1, dtype=torch.bool)
        masks = {"prompt_attention_mask": mask, "negative_prompt_attention_mask": mask}
        return FamilyPipeline(pipeline="ChromaPipeline", prompt={"prompt": "prompt_embeds"}, call=masks)

    def collate(self, samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        return self.collate_with_mask(samples)


def _pass_masks(model: nn.Module) -> None:
    """Passes the mask to all blocks with several samples, and to none with one sample.

    With checkpointing the class passes it only to the double-stream blocks, but checkpointing must not change results.
    One sample has no padding, and attention without a mask is faster and needs no matrix of all pairs.
    """
    masks: list[Tensor | None] = [None]

    def take_mask(_: nn.Module, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        mask = inputs.get("attention_mask")
        masks[0] = None if mask is None or mask.shape[0] == 1 else mask
        return args, {**inputs, "attention_mask": masks[0]}

    def drop_mask(*_: Any) -> None:
        masks[0] = None

    model.register_forward_pre_hook(take_mask, with_kwargs=True)
    model.register_forward_hook(drop_mask, always_call=True)
    if not model.is_gradient_checkpointing:
        return
    checkpoint: Any = model._gradient_checkpointing_func
    single_stream = frozenset(model.get_submodule("single_transformer_blocks").children())

    def with_mask(block: nn.Module, *inputs: Any) -> Any:
        return checkpoint(block, *inputs, *(masks if block in single_stream else ()))

    model.enable_gradient_checkpointing(with_mask)  # type: ignore[operator]  # diffusers' own method


def encode_prompt(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """{"prompt": T5's states of one caption and its first padding token}, without further padding."""
    prompt, mask = encoder.pipeline("ChromaPipeline")._get_t5_prompt_embeds(
        captions, max_sequence_length=encoder.tokens, device=encoder.device, dtype=encoder.model.dtype
    )
    return {"prompt": prompt[:, : int(mask.sum())]}


FAMILY = Chroma
