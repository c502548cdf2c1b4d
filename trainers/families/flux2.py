"""FLUX.2 dev and klein: flow matching on 2x2-packed latents (diffusers Flux2Transformer2DModel, examples/dreambooth
train_dreambooth_lora_flux2.py, train_dreambooth_lora_flux2_klein.py and their img2img siblings)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainers.families.base import Family, Grid, flow_matching


class Flux2(Family):
    """Few double-stream, then many single-stream blocks; the tokens of reference images follow the noisy ones."""

    sums = {"I": (0, ("FHW", "E")), "S": (0, ("FHW", "T", "E"))}
    extra_tokens = True

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        size, tokens, channels = grid["B"], grid["H"] * grid["W"], self.config["in_channels"]
        ids = {"device": device, "dtype": torch.int64}
        return {
            "latents": torch.randn(size, tokens, channels, device=device, dtype=dtype),
            "reference": torch.randn(size, grid["E"], channels, device=device, dtype=dtype),
            "prompt": torch.randn(size, grid["T"], self.config["joint_attention_dim"], device=device, dtype=dtype),
            "image_ids": torch.zeros(size, tokens, 4, **ids),
            "reference_ids": torch.zeros(size, grid["E"], 4, **ids),
            "text_ids": torch.zeros(size, grid["T"], 4, **ids),
        }

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        noisy, sigmas, target = flow_matching(batch["latents"])
        inputs = {
            "hidden_states": torch.cat([noisy, batch["reference"]], dim=1),
            "timestep": sigmas,
            "encoder_hidden_states": batch["prompt"],
            "img_ids": torch.cat([batch["image_ids"], batch["reference_ids"]], dim=1),
            "txt_ids": batch["text_ids"],
        }
        if self.config["guidance_embeds"]:
            inputs["guidance"] = torch.full((1,), 1.0, device=noisy.device).expand(noisy.shape[0])
        return inputs, target

    def loss(self, prediction: Tensor, target: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Of the noisy tokens alone; what comes out for the references is dropped."""
        return super().loss(prediction[:, : target.shape[1]], target, inputs)


FAMILY = Flux2
