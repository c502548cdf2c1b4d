"""Kandinsky 5.0, video and image: flow matching with cross-attention to the prompt (arXiv 2511.14993; diffusers
Kandinsky5Transformer3DModel; SimpleTuner helpers/models/kandinsky5_video/model.py at bc8e6ab)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from planner.catalog.profiles import ModelProfile
from trainers.families.common.base import Family, Grid
from trainers.families.common.encoding import CAPTIONS, Encoder, EncoderTurn, pixels, sampled
from trainers.families.common.sampling import FamilyPipeline

LONGEST_SIDE = 128
"""Size of the tables of positions in frames, rows or columns of cells (``Kandinsky5RoPE3D``, ``max_pos``)."""


class Kandinsky5(Family):
    """Blocks over the prompt, then blocks over the clip with cross-attention to the prompt. Video models take a given
    first frame's latents and a mask in addition to the noisy latents; both are zero for text-to-video."""

    ragged = frozenset({"prompt"})
    longest_side = LONGEST_SIDE

    def __init__(self, profile: ModelProfile) -> None:
        super().__init__(profile)
        self.fixed = {"F": 1} if profile.kind == "image" else {}
        self.first_frame_given = bool(profile.inputs["first_frame_given"])
        self.sample_needs = "sparse attention (NABLA), which no recording has"
        if self.first_frame_given:
            self.sample_needs = "the first frame without noise, where training adds it as SimpleTuner does"

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        text = grid["B"], grid["T"]
        tensors = {
            "latents": self.video_latents(grid, device, dtype),
            "prompt": torch.randn(*text, self.config["in_text_dim"], device=device, dtype=dtype),
            "pooled": torch.randn(grid["B"], self.config["in_text_dim2"], device=device, dtype=dtype),
        }
        if self.first_frame_given:
            tensors["first_frame"] = self.video_latents({**grid, "F": 1}, device, dtype)
        return tensors

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        noisy, sigmas, target = self.flow_matching(batch["latents"])
        clip = noisy.permute(0, 2, 3, 4, 1)
        if self.config["visual_cond"]:
            clip = torch.cat([clip, *self.condition(clip, batch.get("first_frame"))], dim=-1)
        sizes = [size // patch for size, patch in zip(clip.shape[1:4], self.config["patch_size"], strict=True)]
        return {
            "hidden_states": clip,
            "encoder_hidden_states": batch["prompt"],
            "timestep": sigmas * self.profile.training.num_train_timesteps,
            "pooled_projections": batch["pooled"],
            "visual_rope_pos": [torch.arange(size, device=clip.device) for size in sizes],
            "text_rope_pos": torch.arange(batch["prompt"].shape[1], device=clip.device),
            "scale_factor": self.scale_factor(noisy),
        }, target.permute(0, 2, 3, 4, 1)

    def prediction(self, outputs: Any) -> Tensor:
        """The output itself, because the class does not return a tuple."""
        whole: Tensor = outputs
        return whole

    def scale_factor(self, latents: Tensor) -> tuple[float, float, float]:
        """The divisors of the positions (diffusers Kandinsky5T2VPipeline ``_get_scale_factor``)."""
        if self.profile.kind == "image":
            return (1.0, 1.0, 1.0)
        sides = [side * self.profile.vae.spatial for side in latents.shape[-2:]]
        return (1.0, 2.0, 2.0) if all(480 <= side <= 854 for side in sides) else (1.0, 3.16, 3.16)

    def condition(self, clip: Tensor, first_frame: Tensor | None) -> tuple[Tensor, Tensor]:
        """The given latents of a clip, (B, F, h, w, C), zero where nothing is given, and a mask with one channel."""
        given, mask = torch.zeros_like(clip), clip.new_zeros((*clip.shape[:-1], 1))
        if first_frame is not None:
            given[:, :1] = first_frame.permute(0, 2, 3, 4, 1)
            mask[:, 0] = 1.0
        return given, mask

    def collate(self, samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        return self.collate_repeating(samples)  # as SimpleTuner, ``unpack_text_embeddings_from_cache``

    def clip_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("vae", self.profile.vae.class_name, self.encode_clip),)

    def text_turns(self) -> tuple[EncoderTurn, ...]:
        pooled = EncoderTurn("text_encoder_2", "CLIPTextModel", self.encode_pooled, "tokenizer_2", at_once=CAPTIONS)
        qwen = EncoderTurn("text_encoder", "Qwen2_5_VLForConditionalGeneration", self.encode_prompt, "tokenizer")
        return pooled, qwen

    @property
    def pipeline(self) -> str:
        """The diffusers pipeline of the model, or one that encodes captions in the same way."""
        return "Kandinsky5T2IPipeline" if self.profile.kind == "image" else "Kandinsky5T2VPipeline"

    def sampler(self) -> FamilyPipeline | None:
        """Samples of an image model have the requested size; by default the pipeline uses the nearest of its own sizes.
        None for models whose pipeline uses sparse attention, or begins with a frame without noise
        (Kandinsky5I2VPipeline ``prepare_latents``)."""
        if self.profile.inputs.get("sparse_samples") or self.first_frame_given:
            return None
        return FamilyPipeline(
            pipeline=self.pipeline,
            prompt={"prompt": "prompt_embeds_qwen", "pooled": "prompt_embeds_clip"},
            lengths="prompt_cu_seqlens",
            has_own_sizes=self.profile.kind == "image",
        )

    def encode_clip(self, encoder: Encoder, frames: Tensor) -> dict[str, Tensor]:
        """`latents` (C, F, h, w), sampled from the VAE's posterior and scaled, and those of a given first frame
        (diffusers Kandinsky5I2VPipeline ``prepare_latents``)."""
        clip = pixels(encoder, frames)
        if self.profile.kind == "image":
            return {"latents": scaled(encoder, clip[:, :, 0])[0][:, None]}
        tensors = {"latents": scaled(encoder, clip)[0]}
        if self.first_frame_given:
            tensors["first_frame"] = scaled(encoder, clip[:, :, :1])[0]
        return tensors

    def encode_pooled(self, encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
        """{"pooled": CLIP's pooled vector of the caption}."""
        pipe = encoder.pipeline(self.pipeline, "_2")
        return {"pooled": pipe._encode_prompt_clip(cleaned(captions), encoder.device)}

    def encode_prompt(self, encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
        """{"prompt": Qwen's last states of the caption in the pipeline's template}, without the template's tokens and
        without padding."""
        pipe = encoder.pipeline(self.pipeline)
        prompt, _ = pipe._encode_prompt_qwen(cleaned(captions), encoder.device, encoder.tokens)
        return {"prompt": prompt}


def scaled(encoder: Encoder, clip: Tensor) -> Tensor:
    """Latents of a clip or an image, sampled and scaled. FLUX's VAE is used without its shift too, because diffusers'
    Kandinsky5T2IPipeline decodes without it."""
    latents: Tensor = sampled(encoder, clip) * encoder.model.config.scaling_factor
    return latents


def cleaned(captions: list[str]) -> list[str]:
    """Captions, cleaned as in the pipelines."""
    from diffusers.pipelines.kandinsky5.pipeline_kandinsky import prompt_clean

    return [prompt_clean(caption) for caption in captions]


FAMILY = Kandinsky5
