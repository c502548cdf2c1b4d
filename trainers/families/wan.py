"""Wan 2.1 and 2.2, text-to-video and image-to-video: flow matching (arXiv 2503.20314; WanTransformer3DModel)."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from planner.catalog.profiles import ModelProfile
from planner.spec.job import Job
from trainers.families.common.base import Family, Grid
from trainers.families.common.encoding import CAPTIONS, Encoder, EncoderTurn, likeliest, pixels, prompt_of, standardised
from trainers.families.common.sampling import FamilyPipeline

PUBLISHED_POSITIONS = 1024
"""Size of the table of positions in every published Wan: frames, rows or columns of latents."""


class Wan(Family):
    """Wan: self-attention over video tokens, cross-attention to text and, for Wan 2.1 I2V, image tokens."""

    fixed = {"T": 512}
    """diffusers' Wan attention splits image from text tokens at 512; the pipelines pad every prompt to 512."""

    def __init__(self, profile: ModelProfile) -> None:
        super().__init__(profile)
        self.first_frame_given = bool(profile.inputs.get("first_frame_given"))
        """Wan 2.2 TI2V: the first latent frame is the given image, at timestep 0, so every token has its own timestep.
        A clip of one frame is an image generated from text, without a given frame."""

        self.samples_images = False
        if self.config["rope_max_seq_len"] < PUBLISHED_POSITIONS:
            self.longest_side = self.config["rope_max_seq_len"]
        if self.first_frame_given:
            self.sums = {"G": (-1, ("F",))}

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        batch = {
            "latents": self.video_latents(grid, device, dtype),
            "prompt": torch.randn(grid["B"], grid["T"], self.config["text_dim"], device=device, dtype=dtype),
        }
        image_dim = self.config.get("image_dim")
        if self.image_to_video:
            extra = self.config["in_channels"] - self.profile.vae.latent_channels
            batch["condition"] = batch["latents"].new_empty((grid["B"], extra, *batch["latents"].shape[2:])).normal_()
        if self.first_frame_given:
            batch["first_frame"] = self.video_latents({**grid, "F": 1}, device, dtype)
        if image_dim:
            tokens = self.profile.inputs["image_tokens"]
            batch["image"] = torch.randn(grid["B"], tokens, image_dim, device=device, dtype=dtype)
        return batch

    @property
    def image_to_video(self) -> bool:
        """Whether a mask and the first frame's latents are stacked onto the noisy latents (20 more channels)."""
        return bool(self.config["in_channels"] > self.profile.vae.latent_channels)

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        noisy, sigmas, target = self.flow_matching(batch["latents"])
        inputs = {"hidden_states": noisy, "timestep": sigmas * 1000, "encoder_hidden_states": batch["prompt"]}
        if "condition" in batch:
            inputs["hidden_states"] = torch.cat([noisy, batch["condition"]], dim=1)
        if "first_frame" in batch:
            inputs["timestep"] = self.timestep_per_token(noisy, sigmas * 1000)
            # The given first latent frame has no noise and timestep 0, and is left out of the target.
            if noisy.shape[2] > 1:
                noisy[:, :, :1] = batch["first_frame"]
                target = target[:, :, 1:]
        if "image" in batch:
            inputs["encoder_hidden_states_image"] = batch["image"]
        return inputs, target

    def for_job(self, job: Job) -> Self:
        self.samples_images = (job.validation or job.shapes[0]).frames == 1
        return super().for_job(job)

    def clip_turns(self) -> tuple[EncoderTurn, ...]:
        vae = EncoderTurn("vae", self.profile.vae.class_name, self.encode_clip)
        if self.config.get("image_dim"):
            return EncoderTurn("image_encoder", "CLIPVisionModel", encode_image, "image_processor", frames=1), vae
        return (vae,)

    def text_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("text_encoder", "UMT5EncoderModel", encode_prompt, "tokenizer", at_once=CAPTIONS),)

    def sampler(self) -> FamilyPipeline:
        """Samples begin with an image if training gives one. The scheduler is the published one (diffusers
        scripts/convert_wan_to_diffusers.py)."""
        from_image = self.image_to_video or (self.first_frame_given and not self.samples_images)
        return FamilyPipeline(
            pipeline="WanImageToVideoPipeline" if from_image else "WanPipeline",
            prompt={"prompt": "prompt_embeds"},
            scheduler="UniPCMultistepScheduler",
            settings={"prediction_type": "flow_prediction", "use_flow_sigmas": True, "num_train_timesteps": 1000},
            init={"expand_timesteps": self.first_frame_given},
            image=from_image,
            embeds="image" if self.config.get("image_dim") else "",
        )

    def encode_clip(self, encoder: Encoder, frames: Tensor) -> dict[str, Tensor]:
        """Latents from the mode of the posterior, standardised per channel (Wan-Video/Wan2.1 wan/modules/vae.py), and
        for image-to-video the condition, as prepared by diffusers' WanImageToVideoPipeline."""
        clip = pixels(encoder, frames)
        # Encode the clip first: the condition below overwrites its frames.
        tensors = {"latents": self.normalised(encoder, clip)}
        if self.first_frame_given:
            tensors["first_frame"] = self.normalised(encoder, clip[:, :, :1])
        if self.image_to_video:
            # diffusers encodes the first frame followed by zeros (WanImageToVideoPipeline.prepare_latents).
            clip[:, :, 1:] = 0.0
            mask = tensors["latents"].new_zeros(1, self.profile.vae.temporal, *tensors["latents"].shape[2:])
            mask[:, :, 0] = 1.0
            tensors["condition"] = torch.cat([mask, self.normalised(encoder, clip)], dim=1)
        return {name: tensor[0] for name, tensor in tensors.items()}

    def normalised(self, encoder: Encoder, clip: Tensor) -> Tensor:
        """Latents of a clip (1, 3, F, H, W), standardised per channel."""
        return standardised(likeliest(encoder, clip), encoder.model.config)

    def timestep_per_token(self, latents: Tensor, timesteps: Tensor) -> Tensor:
        """Timesteps (B, F*H*W): 0 for the tokens of a given first frame (diffusers WanPipeline and
        WanImageToVideoPipeline, ``expand_timesteps``)."""
        _, patch_h, patch_w = self.profile.shape.patch
        batch, _, frames, height, width = latents.shape
        frame = (height // patch_h) * (width // patch_w)
        given = frame if frames > 1 else 0
        steps = timesteps.new_zeros((batch, frames * frame))
        steps[:, given:] = timesteps[:, None]
        return steps

    def loss(self, prediction: Tensor, target: Tensor, inputs: dict[str, Any]) -> Tensor:
        """The loss without a given first frame (DiffSynth-Studio diffsynth/diffusion/loss.py FlowMatchSFTLoss)."""
        predicted = prediction[:, :, -target.shape[2] :] if self.first_frame_given else prediction
        return super().loss(predicted, target, inputs)


def encode_prompt(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """{"prompt": T5's states of the caption}, padded with zeros, as in diffusers' pipeline."""
    return {"prompt": prompt_of("WanPipeline", encoder, captions)[0]}


def encode_image(encoder: Encoder, frames: Tensor) -> dict[str, Tensor]:
    """{"image": CLIP's penultimate states of the first frame} (diffusers WanImageToVideoPipeline.encode_image)."""
    pixels = encoder.helper(images=frames[0].permute(2, 0, 1), return_tensors="pt").pixel_values
    states = encoder.model(pixels.to(encoder.device, encoder.model.dtype), output_hidden_states=True).hidden_states
    return {"image": states[-2][0]}


FAMILY = Wan
