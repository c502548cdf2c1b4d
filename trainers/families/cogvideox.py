"""CogVideoX: v-prediction on a zero-SNR schedule (arXiv 2408.06072; diffusers examples/cogvideo)."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import CogVideoXDPMScheduler
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid
from torch import Tensor

from planner.catalog.profiles import ModelProfile
from trainers.families.common import noise_levels, random_draws
from trainers.families.common.base import Family, Grid
from trainers.families.common.encoding import CAPTIONS, Encoder, EncoderTurn, pixels, prompt_of, sampled
from trainers.families.common.sampling import FamilyPipeline


class CogVideoX(Family):
    """CogVideoX 2B, 5B and 1.5 (patches over two latent frames): text and video tokens in one sequence."""

    def __init__(self, profile: ModelProfile) -> None:
        super().__init__(profile)
        tokens = self.config["max_text_seq_length"]
        self.fixed = {"T": tokens}
        """Every prompt is padded to the number of text tokens in the table of positions."""
        self.sums = {"S": (tokens, ("FHW",))}
        patch = self.config["patch_size"]
        self.rows, self.columns = self.config["sample_height"] // patch, self.config["sample_width"] // patch
        if self.config.get("use_learned_positional_embeddings"):
            self.fixed |= {"H": self.rows, "W": self.columns}
        if self.config.get("patch_size_t"):
            self.longest_side = min(self.rows, self.columns)
        self.scheduler = CogVideoXDPMScheduler(**profile.training.scheduler)

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        """Random tensors as in a real batch. Latents are (B, F, C, h, w) as in the published trainer; the image's
        latents are followed by zeros for all other frames."""
        latents = self.video_latents(grid, device, dtype).permute(0, 2, 1, 3, 4).contiguous()
        prompt = torch.randn(grid["B"], grid["T"], self.config["text_embed_dim"], device=device, dtype=dtype)
        batch = {"latents": latents, "prompt": prompt}
        if self.config["in_channels"] > latents.shape[2]:
            batch["image"] = torch.zeros_like(latents)
        return batch

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        latents = batch["latents"]
        steps = self.scheduler.config["num_train_timesteps"]
        timesteps = random_draws.integers(steps, latents.shape[0], latents.device)
        noisy = self.scheduler.add_noise(latents, random_draws.normal_like(latents), timesteps)
        self.loss_weights = noise_levels.min_snr(self.scheduler, timesteps, self.profile.training)
        inputs = {"hidden_states": noisy, "encoder_hidden_states": batch["prompt"], "timestep": timesteps}
        if "image" in batch:
            inputs["hidden_states"] = torch.cat([noisy, batch["image"]], dim=2)
        if self.config["use_rotary_positional_embeddings"]:
            inputs["image_rotary_emb"] = self.rotary_table(latents)
        if self.config.get("ofs_embed_dim"):
            inputs["ofs"] = latents.new_full((latents.shape[0],), 2.0)
        return inputs, latents

    def clip_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("vae", self.profile.vae.class_name, self.encode_clip),)

    def text_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("text_encoder", "T5EncoderModel", encode_prompt, "tokenizer", at_once=CAPTIONS),)

    def sampler(self) -> FamilyPipeline:
        """The scheduler is the published one (diffusers scripts/convert_cogvideox_to_diffusers.py)."""
        from_image = self.config["in_channels"] > self.profile.vae.latent_channels
        return FamilyPipeline(
            pipeline="CogVideoXImageToVideoPipeline" if from_image else "CogVideoXPipeline",
            prompt={"prompt": "prompt_embeds"},
            scheduler="CogVideoXDDIMScheduler",
            settings={**self.profile.training.scheduler, "timestep_spacing": "trailing"},
            image=from_image,
        )

    def encode_clip(self, encoder: Encoder, frames: Tensor) -> dict[str, Tensor]:
        """Latents sampled from the posterior and scaled, with frames first; for image-to-video also the latents of the
        first frame with a little noise (diffusers examples/cogvideo train_cogvideox_image_to_video_lora.py).

        For 1.5, if latent frames do not fill the last temporal patch, the first latent frame is repeated in front, for
        the clip and the image (diffusers CogVideoXImageToVideoPipeline).
        """
        clip = pixels(encoder, frames)
        scale = encoder.model.config.scaling_factor
        tensors = {"latents": sampled(encoder, clip) * scale}
        if self.config["in_channels"] > self.profile.vae.latent_channels:
            deviation = torch.exp(torch.randn(1, generator=encoder.generator) * 0.5 - 3.0).item()
            noise = torch.randn(clip[:, :, :1].shape, generator=encoder.generator)
            first = sampled(encoder, clip[:, :, :1] + deviation * noise.to(clip))
            first = first / scale if encoder.model.config.invert_scale_latents else first * scale
            tensors["image"] = torch.cat([first, torch.zeros_like(tensors["latents"][:, :, 1:])], dim=2)
        # 1.5's patches span two latent frames, which an odd number does not fill.
        missing = -tensors["latents"].shape[2] % (self.config.get("patch_size_t") or 1)
        padded = {name: torch.cat([tensor[:, :, :1]] * missing + [tensor], dim=2) for name, tensor in tensors.items()}
        return {name: tensor[0].transpose(0, 1) for name, tensor in padded.items()}

    def rotary_table(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """RoPE cosines and sines, each (F*H*W, head size) in fp32, as in CogVideoXPipeline: the grid of a clip is
        scaled into the grid that the model was trained at; for 1.5 it is a slice of a table for the longest side."""
        patch, patch_t = self.config["patch_size"], self.config.get("patch_size_t")
        frames, height, width = latents.shape[1], latents.shape[3] // patch, latents.shape[4] // patch
        kind: dict[str, Any] = {"crops_coords": None, "grid_type": "slice", "max_size": (self.rows, self.columns)}
        if not patch_t:
            kind = {"crops_coords": get_resize_crop_region_for_grid((height, width), self.columns, self.rows)}
        table: tuple[Tensor, Tensor] = get_3d_rotary_pos_embed(
            embed_dim=self.config["attention_head_dim"],
            grid_size=(height, width),
            temporal_size=frames // (patch_t or 1),
            device=latents.device,
            **kind,
        )
        return table

    def loss(self, prediction: Tensor, target: Tensor, inputs: dict[str, Any]) -> Tensor:
        """The error of the clean sample computed from the v-prediction, weighted by 1 / (1 - alpha_bar), which equals
        the error of v; times each sample's loss weight."""
        timesteps = inputs["timestep"]
        noisy = inputs["hidden_states"][:, :, : target.shape[2]]
        predicted = self.scheduler.get_velocity(prediction, noisy, timesteps)
        weights = 1 / (1 - self.scheduler.alphas_cumprod[timesteps])
        weights = weights.view(-1, *[1] * (predicted.ndim - 1))
        error: Tensor = weights * (predicted - target) ** 2
        errors = error.reshape(target.shape[0], -1).mean(dim=1)
        return (errors if self.loss_weights is None else errors * self.loss_weights).mean()


def encode_prompt(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """{"prompt": T5's states of the caption}: (tokens, width), padded, without a mask, as in diffusers' pipeline."""
    return {"prompt": prompt_of("CogVideoXPipeline", encoder, captions)[0]}


FAMILY = CogVideoX
