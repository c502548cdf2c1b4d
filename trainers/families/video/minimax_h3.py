"""MiniMax H3: flow matching of video and sound in one packed sequence with the prompt (diffusers
MiniMaxH3Transformer3DModel, modular_pipelines/minimax_h3; SimpleTuner helpers/models/minimaxh3 at bc8e6ab)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainers.families.common import random_draws
from trainers.families.common.base import Family, Grid

VIDEO, TEXT, SOUND = 0, 1, 2
"""Tags of a sequence's tokens, on which the blocks' modulation depends (modular_pipeline.py, ``MINIMAX_H3_*_TAG``)."""

SPANS = (1, 4, 4, 4, 4)
"""Frames per latent frame of a chunk (before_denoise.py ``_ROPE_FRAMES_PER_LATENT``)."""

TIME_OF_FRAME = 5 / 3
"""Duration of a frame in latents of the sound (before_denoise.py ``_ROPE_FRAME_RESCALE``)."""

SIDE = 32
"""Positions along each side of a square frame (before_denoise.py ``_ROPE_SPATIAL_SCALE``)."""


class MiniMaxH3(Family):
    """Attention over one sequence of prompt, sound (E tokens, one channel after the other) and clip. It predicts the
    velocity from noise to clip, and its time runs in that direction; the sound's noise levels have a different shift.
    """

    fixed: dict[str, int] = {}
    extra_tokens = True
    sums = {"S": (0, ("FHW", "T", "E"))}
    ragged = frozenset({"prompt"})
    sample_needs = "a modular pipeline, which has no common call"

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        sound, text = (grid["B"], grid["E"]), (grid["B"], grid["T"])
        return {
            "latents": self.video_latents(grid, device, dtype),
            "audio": torch.randn(*sound, self.config["audio_in_channels"], device=device, dtype=dtype),
            "prompt": torch.randn(*text, self.config["text_dim"], device=device, dtype=dtype),
        }

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], tuple[Tensor, Tensor]]:
        """The target is a pair: (clip, sound)."""
        latents, audio, prompt = batch["latents"], batch["audio"], batch["prompt"]
        noisy, sigmas, target = self.flow_matching(self.rows(latents), towards_clip=True)
        quieter = self.of_sound(sigmas)
        spread, noise = quieter.view(-1, 1, 1).to(audio.dtype), random_draws.normal_like(audio)
        lengths = (prompt.shape[1], audio.shape[1], noisy.shape[1])
        places = torch.arange(sum(lengths), device=noisy.device).split(lengths)
        tags = [torch.full_like(part, tag) for part, tag in zip(places, (TEXT, SOUND, VIDEO), strict=True)]
        return {
            "hidden_states": noisy,
            "audio_hidden_states": (1.0 - spread) * audio + spread * noise,
            "encoder_hidden_states": prompt,
            "timestep": 1.0 - torch.stack([sigmas[0], quieter[0]]),
            "timestep_indices": torch.cat([(tag == SOUND).long() for tag in tags]),
            "token_tags": torch.cat(tags),
            "position_ids": self.positions(latents, audio, prompt),
            "video_indices": places[2],
            "audio_indices": places[1],
            "text_indices": places[0],
        }, (target, audio - noise)

    def levels(self, latents: Tensor) -> Tensor:
        """The same level for all samples of a batch: the class takes only one timestep for the clip."""
        drawn, samples = super().levels(latents), latents.shape[0]
        if self.loss_weights is not None:
            self.loss_weights = self.loss_weights[:1].expand(samples)
        return drawn[:1].expand(samples)

    def of_sound(self, sigmas: Tensor) -> Tensor:
        """The sound's noise levels for the clip's ``sigmas``: the same unshifted level, with the sound's shift."""
        shift, other = self.profile.inputs["video_shift"], self.profile.inputs["audio_shift"]
        share = sigmas / (shift + sigmas * (1.0 - shift))
        levels: Tensor = other * share / (1.0 + (other - 1.0) * share)
        return levels

    def rows(self, latents: Tensor) -> Tensor:
        """Latents (B, C, F, h, w) as tokens (B, FHW, C * cell) (before_denoise.py ``patchify_video_latents``)."""
        batch, channels, frames, height, width = latents.shape
        _, high, wide = self.profile.shape.patch
        cells = latents.reshape(batch, channels, frames, height // high, high, width // wide, wide)
        return cells.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3)

    def positions(self, latents: Tensor, audio: Tensor, prompt: Tensor) -> Tensor:
        """Positions (S, 3) in fp64: times, rows and columns. Clip and sound both begin at the end of the prompt, and
        the sound's channels are at the left and right side of the frame (before_denoise.py
        ``build_packed_sequence``)."""
        device, text, sound = latents.device, prompt.shape[1], audio.shape[1]
        frames, height, width = latents.shape[2:]
        _, high, wide = self.profile.shape.patch
        area = (height * width) ** 0.5
        rows = side(height, height // high, area, device)
        columns = side(width, width // wide, area, device)
        spans = TIME_OF_FRAME * torch.tensor(SPANS, device=device, dtype=torch.float64)
        spans = spans[torch.arange(frames, device=device) % len(SPANS)]
        times = text + spans.cumsum(0) - spans
        clip = torch.stack([grid.flatten() for grid in torch.meshgrid(times, rows, columns, indexing="ij")], dim=-1)

        channels = self.profile.shape.audio_channels
        number = torch.arange(sound, device=device)
        length = max(1, sound // channels)
        sides = torch.where(number < length, columns[0], columns[-1])
        heard = torch.stack([text + (number % length).double(), torch.zeros_like(sides), sides], dim=-1)
        words = torch.zeros(text, 3, device=device, dtype=torch.float64)
        words[:, 0] = torch.arange(text, device=device)
        return torch.cat([words, heard, clip])

    def collate(self, samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        return self.collate_repeating(samples)

    def prediction(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """The predictions: (clip, sound)."""
        return outputs[0], outputs[1]

    def loss(self, prediction: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor], inputs: dict[str, Any]) -> Tensor:
        """The sum of both mean squared errors (SimpleTuner ``_compute_av_loss``, ``audio_loss_weight`` 1)."""
        clip, sound = zip(prediction, target, strict=True)
        return super().loss(*clip, inputs) + super().loss(*sound, inputs)


def side(length: int, cells: int, area: float, device: torch.device) -> Tensor:
    """The positions of the cells along a side: the frame is centred in a square with the same number of latents."""
    share = length / area
    return SIDE * ((1.0 - share) / 2.0 + torch.arange(cells, device=device, dtype=torch.float64) * (share / cells))


FAMILY = MiniMaxH3
