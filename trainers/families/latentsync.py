"""LatentSync, stage 1: lips drawn to a sound (arXiv 2412.09262; bytedance/LatentSync a229c39 scripts/train_unet.py).

A sample is a window of frames in the batch of a UNet. What each frame is given beside its noise: the mask, the face
behind the mask, another window of the same clip as reference, and in a caption's place the sound around it. A clip's
windows do not overlap, and which of the others is the reference is drawn anew in every step (LatentSync begins both at
any frame: latentsync/data/unet_dataset.py, ``get_frames``).
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
"""How strong the noise is that all frames of a window share, to each one's own (arXiv 2305.10474 section 4.1, "mixed";
configs/unet/stage1.yaml, ``mixed_noise_alpha``)."""

RATE, HOP, SEGMENT = 16_000, 160, 3000
"""Whisper's: samples a second, samples a column of its spectrogram, columns it hears at once."""
PER_SECOND = 50
"""Whisper's states: one for two columns."""
BEFORE, BEHIND = 4, 6
"""States around a frame (``audio_feat_length`` 2, 2 frames of 25 a second; latentsync/whisper/audio2feature.py)."""

MASK = "mask"
"""Folder of the image that says what is covered: black is."""


class LatentSync(Unet):
    """Windows of a clip: latents (B * F, 4, h, w), condition (B * F, 9, h, w): mask 1, masked 4, reference 4."""

    captioned = False

    def cached_tensors(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """All frames of a window; the reference is left out, because it is another window's latents."""
        return {**batch, "condition": batch["condition"][:, : -self.profile.vae.latent_channels]}

    def with_window(self, sample: dict[str, Tensor], window: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**sample, "condition": torch.cat([sample["condition"], window["latents"]], dim=1)}

    def collate(self, samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}

    def drawn(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Noise of which frames share a part, and one timestep a window. A recorded step draws what is as large."""
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
        """None: its pipeline is not diffusers', and it first looks for a face in a whole picture."""
        return

    def encode_clip(self, encoder: Encoder, frames: Tensor) -> dict[str, Tensor]:
        """Latents of the frames and of the same behind the mask, both drawn from the posterior
        (latentsync/utils/image_processor.py, ``preprocess_fixed_mask_image``)."""
        faces = pixels(encoder, frames)[0].transpose(0, 1)
        mask = mask_of(encoder.helper, *faces.shape[2:]).to(faces)
        small = torch.nn.functional.interpolate(mask[None, None], scale_factor=1 / self.profile.vae.spatial)
        latents = sampled(encoder, faces) * encoder.model.config.scaling_factor
        masked = sampled(encoder, faces * mask) * encoder.model.config.scaling_factor
        covered = small.float().expand(len(faces), -1, -1, -1)
        return {"latents": latents, "condition": torch.cat([covered, masked], dim=1)}


def mask_of(image: Image.Image, height: int, width: int) -> Tensor:
    """The mask at a size (H, W): 1 where the face is seen, 0 where it is to be drawn."""
    resized = image.convert("L").resize((width, height), Image.Resampling.LANCZOS)
    return torch.from_numpy(numpy.array(resized)).float() / 255.0


def encode_sound(encoder: Encoder, _: Tensor) -> dict[str, Tensor]:
    """The states around each frame (F, 50, width): of ten half frames the input and the output of all layers."""
    states = _states(encoder)
    prompt = []
    for seconds in encoder.times:
        middle = int(seconds * PER_SECOND)
        around = torch.arange(middle - BEFORE, middle + BEHIND).clamp(0, len(states) - 1)
        prompt.append(states[around].flatten(0, 1))
    return {"prompt": torch.stack(prompt)}


def _states(encoder: Encoder) -> Tensor:
    """All states of a clip's sound (T, layers + 1, width) on the CPU, half a minute after the other."""
    name = str(encoder.source)
    # A clip is cut into many windows, which come one after another: its sound is heard once.
    if name not in encoder.sound_features:
        assert isinstance(encoder.source, Path)
        features = _spectrogram(encoder.helper, clips.sound(encoder.source, RATE))
        encoder.sound_features = {name: torch.cat([_listen(encoder, part) for part in features.split(SEGMENT, dim=1)])}
    return encoder.sound_features[name]


def _spectrogram(extractor: Any, sound: numpy.ndarray[Any, Any]) -> Tensor:
    """Log-mel (bins, columns) of a whole clip, whose loudest column decides how far down it goes."""
    if len(sound) < HOP * 2:
        raise clips.UnusableError("its sound is too short")
    outputs = extractor(sound, sampling_rate=RATE, padding=False, truncation=False, return_tensors="np")
    return torch.from_numpy(outputs.input_features[0])


def _listen(encoder: Encoder, features: Tensor) -> Tensor:
    """What enters the first layer and leaves each, of half a minute filled up with zeros: as many as there is sound."""
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
