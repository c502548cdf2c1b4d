"""HiDream-I1: flow matching on latents of FLUX.1's VAE, with a mixture of experts (diffusers
HiDreamImageTransformer2DModel, examples/dreambooth train_dreambooth_lora_hidream.py)."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from trainers.families.common.base import Family, Grid
from trainers.families.common.encoding import CAPTIONS, Encoder, EncoderTurn
from trainers.families.common.sampling import FamilyPipeline
from trainers.families.sd3 import clip_pair, encode_clip


class HiDream(Family):
    """Double-stream, then single-stream blocks, each with the states of a different Llama layer as text.

    The sequence has the image's tokens, T5's states, those of Llama's last layer and those of the block's own layer. In
    diffusers' script the experts do not train (`force_inference_output`); here they get gradients, as in trainers that
    use the authors' class.
    """

    sums = {"S": (0, ("FHW", "T", "T", "T")), "J": (0, ("FHW", "T", "T"))}

    def complete(self, model: nn.Module) -> None:
        """Gives a shallow model all text projections: the class makes one for each block, and uses the last for T5."""
        projections = model.get_submodule("caption_projection")
        assert isinstance(projections, nn.ModuleList)
        for _ in range(len(self.config["llama_layers"]) + 1 - len(projections)):
            projections.append(copy.deepcopy(projections[0]))

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        size, (llama, t5) = grid["B"], reversed(self.config["caption_channels"])
        layers = max(self.config["llama_layers"]) + 1
        return {
            "latents": self.video_latents(grid, device, dtype).squeeze(2),
            "t5": torch.randn(size, grid["T"], t5, device=device, dtype=dtype),
            "llama": torch.randn(size, layers, grid["T"], llama, device=device, dtype=dtype),
            "pooled": torch.randn(size, self.config["text_emb_dim"], device=device, dtype=dtype),
        }

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        noisy, sigmas, target = self.flow_matching(batch["latents"], towards_clip=True)
        return {
            "hidden_states": noisy,
            "timesteps": sigmas * 1000,
            "encoder_hidden_states_t5": batch["t5"],
            "encoder_hidden_states_llama3": batch["llama"].transpose(0, 1),
            "pooled_embeds": batch["pooled"],
        }, self.by_cell(target)

    def by_cell(self, latents: Tensor) -> Tensor:
        """Latents (B, C, h, w) in the layout that the class returns in training: (B, C, cells, numbers per cell)."""
        size, patch = latents.shape[:2], self.config["patch_size"]
        rows, columns = latents.shape[2] // patch, latents.shape[3] // patch
        cells = latents.reshape(*size, rows, patch, columns, patch)
        return cells.transpose(3, 4).reshape(*size, rows * columns, patch * patch)

    def loss(self, prediction: Tensor, target: Tensor, inputs: dict[str, Any]) -> Tensor:
        """The loss over the image's cells, without the padding of images that are not square."""
        return super().loss(prediction[:, :, : target.shape[2]], target, inputs)

    def clip_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("vae", self.profile.vae.class_name, encode_clip),)

    def text_turns(self) -> tuple[EncoderTurn, ...]:
        return (
            *clip_pair(encode_by_clip, ("", "_2")),
            EncoderTurn("text_encoder_3", "T5EncoderModel", encode_by_t5, "tokenizer_3", at_once=CAPTIONS),
            EncoderTurn("text_encoder_4", "LlamaForCausalLM", encode_by_llama, "tokenizer_4"),
        )

    def sampler(self) -> FamilyPipeline:
        names = {"t5": "prompt_embeds_t5", "llama": "prompt_embeds_llama3", "pooled": "pooled_prompt_embeds"}
        return FamilyPipeline(
            pipeline="HiDreamImagePipeline", prompt=names, layers=frozenset({"llama"}), has_own_area=True
        )

    def joined(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """A sample, with both CLIPs' vectors concatenated as `pooled`."""
        if "pooled_2" not in parts:
            return parts
        others = {name: tensor for name, tensor in parts.items() if not name.startswith("pooled")}
        return {**others, "pooled": torch.cat([parts["pooled"], parts["pooled_2"]])}


def encode_by_clip(encoder: Encoder, captions: list[str], suffix: str) -> dict[str, Tensor]:
    """{"pooled" or "pooled_2": one CLIP's projected vector of the caption}. ``suffix``: "" or "_2"."""
    pipe = encoder.pipeline("HiDreamImagePipeline", suffix)
    vector = pipe._get_clip_prompt_embeds(encoder.helper, encoder.model, captions, encoder.tokens, encoder.device)
    return {f"pooled{suffix}": vector}


def encode_by_t5(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """{"t5": T5's states of the caption}, padded."""
    pipe = encoder.pipeline("HiDreamImagePipeline", "_3")
    return {"t5": pipe._get_t5_prompt_embeds(captions, encoder.tokens, encoder.device)}


def encode_by_llama(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """{"llama": (B, layers, tokens, width)}, the output of each of Llama's layers, padded."""
    pipe = encoder.pipeline("HiDreamImagePipeline", "_4")
    states = pipe._get_llama3_prompt_embeds(captions, encoder.tokens, encoder.device)
    return {"llama": states.transpose(0, 1).contiguous()}


FAMILY = HiDream
