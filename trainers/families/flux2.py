"""FLUX.2 dev and klein: flow matching on 2x2-packed latents (diffusers Flux2Transformer2DModel, examples/dreambooth
train_dreambooth_lora_flux2.py, train_dreambooth_lora_flux2_klein.py and their img2img siblings)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainers.families.common.base import Family, Grid
from trainers.families.common.encoding import Encoder, EncoderTurn, likeliest, packed, pixels
from trainers.families.common.sampling import FamilyPipeline


class Flux2(Family):
    """A few double-stream, then many single-stream blocks; the tokens of reference images follow the noisy ones."""

    sums = {"I": (0, ("FHW", "E")), "S": (0, ("FHW", "T", "E"))}
    extra_tokens = True
    reads_reference = True

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        size, tokens, channels = grid["B"], grid["H"] * grid["W"], self.config["in_channels"]
        return {
            "latents": torch.randn(size, tokens, channels, device=device, dtype=dtype),
            "reference": torch.randn(size, grid["E"], channels, device=device, dtype=dtype),
            "prompt": torch.randn(size, grid["T"], self.config["joint_attention_dim"], device=device, dtype=dtype),
            "image_ids": torch.zeros(size, tokens, 4, device=device, dtype=torch.int64),
            "reference_ids": torch.zeros(size, grid["E"], 4, device=device, dtype=torch.int64),
            "text_ids": torch.zeros(size, grid["T"], 4, device=device, dtype=torch.int64),
        }

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        noisy, sigmas, target = self.flow_matching(batch["latents"])
        inputs = {
            "hidden_states": torch.cat([noisy, batch["reference"]], dim=1),
            "timestep": sigmas,
            "encoder_hidden_states": batch["prompt"],
            "img_ids": torch.cat([batch["image_ids"], batch["reference_ids"]], dim=1),
            "txt_ids": batch["text_ids"],
        }
        if self.config["guidance_embeds"]:
            scale = self.profile.training.guidance
            inputs["guidance"] = torch.full((1,), scale, device=noisy.device).expand(noisy.shape[0])
        return inputs, target

    def loss(self, prediction: Tensor, target: Tensor, inputs: dict[str, Any]) -> Tensor:
        """The loss over the noisy tokens; the output for the references is dropped."""
        return super().loss(prediction[:, : target.shape[1]], target, inputs)

    def clip_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("vae", self.profile.vae.class_name, encode_clip),)

    def text_turns(self) -> tuple[EncoderTurn, ...]:
        """Mistral (dev) takes a processor for text and images; without images its tokenizer is enough."""
        kind = self.profile.text_encoders[0].class_name
        return (EncoderTurn("text_encoder", kind, ENCODE[kind], "tokenizer"),)

    def sampler(self) -> FamilyPipeline:
        """dev takes the guidance scale as an input, klein uses classifier-free guidance."""
        embedded = bool(self.config["guidance_embeds"])
        name = "Flux2Pipeline" if embedded else "Flux2KleinPipeline"
        return FamilyPipeline(
            pipeline=name, prompt={"prompt": "prompt_embeds"}, negative=not embedded, image=self.references > 0
        )


def encode_clip(encoder: Encoder, frames: Tensor) -> dict[str, Tensor]:
    """The mode of the posterior, packed and normalised by the VAE's batch norm, with the position of every token; the
    reference's time is 10 (Flux2Pipeline._prepare_image_ids)."""
    tokens, places = _tokens(encoder, frames, 0)
    if encoder.reference is None:
        reference, reference_places = tokens.new_zeros(0, tokens.shape[1]), places[:0]
    else:
        reference, reference_places = _tokens(encoder, encoder.reference, 10)
    return {"latents": tokens, "image_ids": places, "reference": reference, "reference_ids": reference_places}


def _tokens(encoder: Encoder, frames: Tensor, time: int) -> tuple[Tensor, Tensor]:
    latents, vae = likeliest(encoder, pixels(encoder, frames)[:, :, 0])[0], encoder.model
    deviation = torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps)
    cells = (packed(latents) - vae.bn.running_mean.float()) / deviation.float()
    rows, columns = torch.arange(cells.shape[0]), torch.arange(cells.shape[1])
    return cells.flatten(0, 1), torch.cartesian_prod(torch.tensor([time]), rows, columns, torch.arange(1))


def encode_by_qwen(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """Qwen3's states of the caption as a chat message, padded, with three layers concatenated along the width, and the
    position of every token."""
    return _encoded("Flux2KleinPipeline", encoder, captions)


def encode_by_mistral(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """Mistral's states of the caption as a chat message after the pipeline's system message, and their positions."""
    return _encoded("Flux2Pipeline", encoder, captions)


def _encoded(name: str, encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    pipe = encoder.pipeline(name)
    prompt, places = pipe.encode_prompt(captions, encoder.device, max_sequence_length=encoder.tokens)
    return {"prompt": prompt, "text_ids": places}


ENCODE = {"Qwen3ForCausalLM": encode_by_qwen, "Mistral3ForConditionalGeneration": encode_by_mistral}

FAMILY = Flux2
