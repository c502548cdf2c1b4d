"""LTX-2: flow matching of video and sound together (arXiv 2601.03233; diffusers LTX2VideoTransformer3DModel)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainers.families.common import random_draws
from trainers.families.common.base import Family, Grid


class Ltx2(Family):
    """LTX-2: a wide stream of video tokens and a narrow one of audio tokens (E), each attending to the other."""

    fixed: dict[str, int] = {}
    extra_tokens = True

    def without_gradient(self, name: str, blocks: int) -> bool:
        """Whether a parameter never gets a gradient; also 2.5's embedding of keyframes does not."""
        return name == "keyframes_abs_pos_embedding" or super().without_gradient(name, blocks)

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        """Random tensors as in a real batch. The prompts are the outputs of LTX-2's connectors, one for each stream."""
        text = (grid["B"], grid["T"])
        channels = self.config["audio_in_channels"]
        width, audio_width = self.text_widths()
        return {
            "latents": self.video_latents(grid, device, dtype),
            "audio": torch.randn(grid["B"], grid["E"], channels, device=device, dtype=dtype),
            "prompt": torch.randn(*text, width, device=device, dtype=dtype),
            "audio_prompt": torch.randn(*text, audio_width, device=device, dtype=dtype),
            "prompt_mask": torch.ones(text, device=device, dtype=torch.long),
        }

    def text_widths(self) -> tuple[int, int]:
        """The widths of a text token for (video, sound). LTX-2's transformer projects both itself; from 2.3 on the
        connectors project them to the streams' widths."""
        if self.config["use_prompt_embeddings"]:
            return self.config["caption_channels"], self.config["caption_channels"]
        return self.config["cross_attention_dim"], self.config["audio_cross_attention_dim"]

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], tuple[Tensor, Tensor]]:
        """The target is a pair, of video and sound, which have the same noise level. From 2.3 on the noise level also
        modulates the text, and each stream's cross-attention to the other (pipeline_ltx2.py)."""
        frames, height, width = batch["latents"].shape[2:]
        packed = batch["latents"].flatten(2).transpose(1, 2).contiguous()
        noisy, sigmas, target = self.flow_matching(packed)
        audio, noise = batch["audio"], random_draws.normal_like(batch["audio"])
        spread = sigmas.view(-1, 1, 1).to(audio.dtype)
        timestep = sigmas * 1000
        modulated = {"sigma": timestep, "use_cross_timestep": True} if self.config["cross_attn_mod"] else {}
        return {
            "hidden_states": noisy,
            "audio_hidden_states": (1.0 - spread) * audio + spread * noise,
            "encoder_hidden_states": batch["prompt"],
            "audio_encoder_hidden_states": batch["audio_prompt"],
            "timestep": timestep,
            "encoder_attention_mask": batch["prompt_mask"],
            "audio_encoder_attention_mask": batch["prompt_mask"],
            "num_frames": frames,
            "height": height,
            "width": width,
            "fps": 24.0,
            "audio_num_frames": audio.shape[1],
            **modulated,
        }, (target, noise - audio)

    def prediction(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """The predictions of both streams: (video, audio)."""
        return outputs[0], outputs[1]

    def loss(self, prediction: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor], inputs: dict[str, Any]) -> Tensor:
        """The sum of both mean squared errors (Lightricks/LTX-2, packages/ltx-trainer)."""
        video, sound = zip(prediction, target, strict=True)
        return super().loss(*video, inputs) + super().loss(*sound, inputs)


FAMILY = Ltx2
