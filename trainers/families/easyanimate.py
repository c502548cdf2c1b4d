"""EasyAnimate 5.1: flow matching (arXiv 2405.18991; diffusers EasyAnimateTransformer3DModel)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainers.families.common.base import Family, Grid
from trainers.families.common.encoding import Encoder, EncoderTurn, likeliest, pixels, prompt_of, sampled
from trainers.families.common.sampling import FamilyPipeline


class EasyAnimate(Family):
    """EasyAnimate 5.1: text and video tokens in one sequence, with separate weights, then (7B) with shared ones."""

    fixed: dict[str, int] = {}
    encoding = 2
    """since the mask is scaled"""
    sums = {"S": (0, ("FHW", "T"))}
    idle = ("attn1.to_add_out.", "txt_ff.")

    def prepare(self, model: nn.Module) -> None:
        """Adds a hook that moves the table of rotations to the GPU once a step.

        diffusers makes it on the host, and every block would copy it to the GPU twice and keep the copies for backward.
        """
        rope = model.get_submodule("rope_embedding")
        rope.register_forward_hook(lambda _, args, tables: tuple(table.to(args[0].device) for table in tables))

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        batch = {
            "latents": self.video_latents(grid, device, dtype),
            "prompt": torch.randn(grid["B"], grid["T"], self.config["text_embed_dim"], device=device, dtype=dtype),
        }
        extra = self.config["in_channels"] - self.profile.vae.latent_channels
        if extra:  # the clip with frames masked out, and the mask
            batch["inpaint"] = batch["latents"].new_empty((grid["B"], extra, *batch["latents"].shape[2:])).normal_()
        return batch

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        noisy, sigmas, target = self.flow_matching(batch["latents"])
        inputs = {
            "hidden_states": noisy,
            "timestep": (sigmas * 1000).to(noisy.dtype),
            "encoder_hidden_states": batch["prompt"],
        }
        if "inpaint" in batch:
            inputs["inpaint_latents"] = batch["inpaint"]
        return inputs, target

    def clip_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("vae", self.profile.vae.class_name, self.encode_clip),)

    def text_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("text_encoder", "Qwen2VLForConditionalGeneration", encode_prompt, "tokenizer"),)

    def sampler(self) -> FamilyPipeline | None:
        """The text-to-video or inpainting pipeline, which requires prompt masks but does not use them; None for the
        control models, because there is no control video."""
        extra = self.config["in_channels"] - self.profile.vae.latent_channels
        if extra not in (0, self.profile.vae.latent_channels + 1):
            return None
        mask = {"prompt_attention_mask": torch.ones(1, 1), "negative_prompt_attention_mask": torch.ones(1, 1)}
        return FamilyPipeline(
            pipeline="EasyAnimateInpaintPipeline" if extra else "EasyAnimatePipeline",
            prompt={"prompt": "prompt_embeds"},
            call=mask,
            vae={"cache_mag_vae": True},  # then the first latent frame's mask is that of the first frame
            image=bool(extra),
        )

    def sampled_image(self, image: Any, height: int, width: int, frames: int) -> dict[str, Any]:
        """The pipeline's arguments for a sample that begins with an image: a clip that begins with it, and a mask of
        the other frames."""
        from diffusers.pipelines.easyanimate.pipeline_easyanimate_inpaint import get_image_to_video_latent

        clip, mask = get_image_to_video_latent(image, None, frames, (height, width))
        return {"video": clip, "mask_video": mask}

    def encode_clip(self, encoder: Encoder, frames: Tensor) -> dict[str, Tensor]:
        """Latents sampled from the posterior and scaled. For InP also `inpaint`: a mask that is scaled like latents and
        0 where no frame is given, then the latents of the first frame with a little noise and the rest black
        (EasyAnimateInpaintPipeline; its own trainer also draws other masks).
        """
        clip, scale = pixels(encoder, frames), encoder.model.config.scaling_factor
        tensors = {"latents": sampled(encoder, clip) * scale}
        if self.config["in_channels"] > self.profile.vae.latent_channels:
            clip[:, :, 1:] = -1.0
            if self.config.get("add_noise_in_inpaint_model"):
                deviation = torch.exp(torch.randn(1, generator=encoder.generator) * 0.5 - 3.0).item()
                clip[:, :, 0] += deviation * torch.randn(clip[:, :, 0].shape, generator=encoder.generator).to(clip)
            masked = likeliest(encoder, clip) * scale
            mask = masked.new_zeros(1, 1, *masked.shape[2:])
            mask[:, :, 0] = scale
            tensors["inpaint"] = torch.cat([mask, masked], dim=1)
        return {name: tensor[0] for name, tensor in tensors.items()}


def encode_prompt(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """{"prompt": Qwen2-VL's penultimate states of the caption as a chat message}, padded."""
    return {"prompt": prompt_of("EasyAnimatePipeline", encoder, captions)[0]}


FAMILY = EasyAnimate
