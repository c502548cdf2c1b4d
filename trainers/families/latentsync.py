"""LatentSync, stage 1: lip synchronisation (arXiv 2412.09262; bytedance/LatentSync a229c39 scripts/train_unet.py).

A sample is a window of frames in the batch dimension of a UNet. Besides noise, each frame gets the mask, the masked
face, a frame of another window of the same clip as reference, and the surrounding sound in place of a caption. The
windows of a clip do not overlap, and the reference window is drawn anew in every step (in LatentSync both windows begin
at any frame: latentsync/data/unet_dataset.py, ``get_frames``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image
from torch import Tensor

from planner.dataset import clips
from trainers.families.common import random_draws
from trainers.families.common.encoding import Encoder, EncoderTurn, pixels, sampled
from trainers.families.unet import Unet

SHARED = 1.0
"""Strength of the noise that all frames of a window share, relative to each frame's own (arXiv 2305.10474 section 4.1,
"mixed"; configs/unet/stage1.yaml, ``mixed_noise_alpha``)."""

RATE, HOP, SEGMENT = 16_000, 160, 3000
"""Whisper's samples per second, samples per column of its spectrogram, and columns per call."""
PER_SECOND = 50
"""Whisper's states per second: one for two columns."""
BEFORE, BEHIND = 4, 6
"""States before and after a frame's time (``audio_feat_length`` 2, 2 frames at 25 per second;
latentsync/whisper/audio2feature.py)."""

MASK = "mask"
"""Folder of the mask image, which is black where the face is covered."""


class LatentSync(Unet):
    """Windows of a clip: latents (B * F, 4, h, w), condition (B * F, 9, h, w): mask 1, masked 4, reference 4."""

    captioned = False

    def cached_tensors(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """All frames of a window, without the reference, which is the latents of another window."""
        return {**batch, "condition": batch["condition"][:, : -self.profile.vae.latent_channels]}

    def with_window(self, sample: dict[str, Tensor], window: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**sample, "condition": torch.cat([sample["condition"], window["latents"]], dim=1)}

    def collate(self, samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}

    def drawn(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Noise that the frames of a window partly share, and one timestep for each window. A recorded step draws plain
        noise of the same size."""
        if random_draws.SEEDS not in batch:
            return super().drawn(batch)
        latents, windows = batch["latents"], len(batch[random_draws.SEEDS])
        apart = latents.unflatten(0, (windows, -1))
        independent, shared = random_draws.normal_like(apart), random_draws.normal_like(apart[:, :1])
        noise = (independent + SHARED * shared) / (1 + SHARED**2) ** 0.5
        timesteps = random_draws.integers(self.timesteps, windows, latents.device)
        return noise.flatten(0, 1), timesteps.repeat_interleave(apart.shape[1])

    def clip_turns(self) -> tuple[EncoderTurn, ...]:
        return (
            EncoderTurn("audio_encoder", "WhisperModel", encode_sound, "feature_extractor", frames=0),
            EncoderTurn("vae", self.profile.vae.class_name, self.encode_clip, MASK),
        )

    def text_turns(self) -> tuple[EncoderTurn, ...]:
        return ()

    def sampler(self) -> None:
        """None: its pipeline is not in diffusers, and first detects a face in a whole frame."""
        return

    def encode_clip(self, encoder: Encoder, frames: Tensor) -> dict[str, Tensor]:
        """Latents of the frames and of the masked frames, both sampled from the posterior
        (latentsync/utils/image_processor.py, ``preprocess_fixed_mask_image``)."""
        faces = pixels(encoder, frames)[0].transpose(0, 1)
        mask = mask_of(encoder.helper, *faces.shape[2:]).to(faces)
        small = torch.nn.functional.interpolate(mask[None, None], scale_factor=1 / self.profile.vae.spatial)
        latents = sampled(encoder, faces) * encoder.model.config.scaling_factor
        masked = sampled(encoder, faces * mask) * encoder.model.config.scaling_factor
        covered = small.float().expand(len(faces), -1, -1, -1)
        return {"latents": latents, "condition": torch.cat([covered, masked], dim=1)}


def mask_of(image: Image.Image, height: int, width: int) -> Tensor:
    """The mask at a size (H, W): 1 where the face is visible, 0 where it is to be generated."""
    resized = image.convert("L").resize((width, height), Image.Resampling.LANCZOS)
    return torch.from_numpy(numpy.array(resized)).float() / 255.0


def encode_sound(encoder: Encoder, _: Tensor) -> dict[str, Tensor]:
    """{"prompt": Whisper's states around each frame, (F, 50, width)}: ten times, with the first layer's input and the
    outputs of all layers for each."""
    states = _states(encoder)
    prompt = []
    for seconds in encoder.times:
        middle = int(seconds * PER_SECOND)
        around = torch.arange(middle - BEFORE, middle + BEHIND).clamp(0, len(states) - 1)
        prompt.append(states[around].flatten(0, 1))
    return {"prompt": torch.stack(prompt)}


def _states(encoder: Encoder) -> Tensor:
    """All states of a clip's sound (T, layers + 1, width) on the CPU, computed 30 seconds at a time."""
    name = str(encoder.source)
    # A clip is cut into many consecutive windows, so its sound is encoded only once.
    if name not in encoder.sound_features:
        assert isinstance(encoder.source, Path)
        features = _spectrogram(encoder.helper, clips.sound(encoder.source, RATE))
        encoder.sound_features = {name: torch.cat([_listen(encoder, part) for part in features.split(SEGMENT, dim=1)])}
    return encoder.sound_features[name]


def _spectrogram(extractor: Any, sound: numpy.ndarray[Any, Any]) -> Tensor:
    """The log-mel spectrogram (bins, columns) of a whole clip; its maximum sets the lower cut-off for all of it."""
    if len(sound) < HOP * 2:
        raise clips.UnusableError("its sound is too short")
    outputs = extractor(sound, sampling_rate=RATE, padding=False, truncation=False, return_tensors="np")
    return torch.from_numpy(outputs.input_features[0])


def _listen(encoder: Encoder, features: Tensor) -> Tensor:
    """The first layer's input and all layers' outputs for up to 30 seconds, (T, layers + 1, width), computed on
    features padded with zeros and cut to the length of the sound."""
    padded = torch.nn.functional.pad(features, (0, SEGMENT - features.shape[1]))
    inner = encoder.model.get_submodule("encoder")
    states: list[Tensor] = []

    def keep(value: Any) -> None:
        states.append((value[0] if isinstance(value, tuple) else value)[0])

    hooks = [inner.layers[0].register_forward_pre_hook(lambda _, inputs: keep(inputs))]
    hooks += [layer.register_forward_hook(lambda _, __, outputs: keep(outputs)) for layer in inner.layers]
    try:
        inner(padded[None].to(encoder.device, encoder.model.dtype))
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(states, dim=1)[: features.shape[1] // 2].float().cpu()


FAMILY = LatentSync
