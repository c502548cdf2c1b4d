"""Encoders of samples, and the operations on clips and captions that most families share.

Shape letters as in `trainers.families.common.base`; pixels are frames (F, H, W, 3) in 0..255.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass
class Encoder:
    """A text, image or sound encoder or a VAE on its device, with its tokenizer or processor and the current sample."""

    model: Any
    helper: Any = None
    """its tokenizer or image processor"""
    tokens: int = 0
    """text tokens that captions are padded to, from the plan"""
    size: tuple[int, int] = (0, 0)
    """height and width of the clip in its file"""
    reference: Tensor | None = None
    """the sample's reference image, at the sample's size; (1, H, W, 3)"""
    control: Tensor | None = None
    """the frames of the control video, with the number and size of the sample's"""
    source: Path | None = None
    """the clip's file, for encoders of sound"""
    times: tuple[Fraction, ...] = ()
    """the times of the frames in that file, seconds"""
    sound_features: dict[str, Tensor] = field(default_factory=dict)
    """file -> the encoded sound of the latest file, because a clip is cut into many samples"""
    earlier: dict[str, Tensor] = field(default_factory=dict)
    """outputs of earlier turns for the sample, if this turn reads them"""
    generator: torch.Generator | None = None
    """seeded by the sample, so that its encoding does not depend on the rank or the order"""
    prompt_pipelines: dict[tuple[str, str], Any] = field(default_factory=dict)
    """cache of `pipeline`: making a pipeline takes longer than encoding a caption with CLIP"""

    def pipeline(self, name: str, suffix: str = "") -> Any:
        """The diffusers pipeline ``name`` with this text encoder and tokenizer as its ``text_encoder{suffix}`` and
        ``tokenizer{suffix}``, and no other parts."""
        if (name, suffix) not in self.prompt_pipelines:
            components = {f"text_encoder{suffix}": self.model, f"tokenizer{suffix}": self.helper}
            self.prompt_pipelines[name, suffix] = pipeline(name, **components)
        return self.prompt_pipelines[name, suffix]

    def drop_model(self) -> None:
        """Drops the references to the model, so that its memory can be freed."""
        self.model = None
        self.prompt_pipelines.clear()

    @property
    def device(self) -> torch.device:
        """The device of the encoder's weights; offloaded layers (on `meta`) do not count."""
        parameters: Iterable[Tensor] = self.model.parameters()
        return next(parameter.device for parameter in parameters if parameter.device.type != "meta")


def pipeline(name: str, **components: Any) -> Any:
    """A diffusers pipeline with only these components, all others None, for its prompt encoding."""
    import diffusers

    kind = getattr(diffusers, name)
    parameters = inspect.signature(kind.__init__).parameters.values()
    required = [
        parameter.name for parameter in parameters if parameter.default is parameter.empty and parameter.name != "self"
    ]
    return kind(**dict.fromkeys(required) | components)


def prompt_of(name: str, encoder: Encoder, captions: list[str]) -> list[Tensor]:
    """Encodes captions with a video pipeline that has one text encoder: [embeddings (B, tokens, width), masks if the
    pipeline returns them]."""
    embeddings = encoder.pipeline(name).encode_prompt(
        captions, do_classifier_free_guidance=False, max_sequence_length=encoder.tokens, device=encoder.device
    )
    return [tensor for tensor in embeddings if tensor is not None]


CAPTIONS = 16
"""Captions to encode at once with T5 and CLIP. They are padded to one length, so results are bit-identical to encoding
them one by one. A small T5 spends most of its time on the table of relative positions, which all captions share."""

Sample = Any
"""Frames of a clip, a uint8 tensor (F, H, W, 3), or a list of captions."""


class EncoderTurn(NamedTuple):
    """The pass of one encoder over all clips or all captions of a dataset."""

    part: str
    """the encoder's folder in the model's folder"""
    class_name: str
    encode: Callable[[Encoder, Sample], Mapping[str, Tensor]]
    """tensors named as in `Family.batch`: of a clip without the batch dimension, of captions with it"""
    helper: str = ""
    """folder of its tokenizer or image processor"""
    frames: int | None = None
    """the number of a clip's first frames that it needs; None: all; 0 if it only encodes sound"""
    at_once: int = 1
    """captions that can be encoded together without changing the results"""
    reads_earlier: bool = False
    """whether it needs the outputs of earlier turns for a caption (`Encoder.earlier`)"""


def pixels(encoder: Encoder, frames: Tensor) -> Tensor:
    """Frames (F, H, W, 3) as VAEs take them: (1, 3, F, H, W) between -1 and 1 in the encoder's dtype, on its device."""
    count, height, width, _ = frames.shape
    clip = torch.empty((1, 3, count, height, width), device=encoder.device, dtype=encoder.model.dtype)
    for number, frame in enumerate(frames):  # one by one: the estimate does not include the whole clip in fp32
        clip[0, :, number] = frame.to(encoder.device).permute(2, 0, 1).float() / 127.5 - 1.0
    return clip


def sampled(encoder: Encoder, clip: Tensor) -> Tensor:
    """Latents sampled from the VAE's posterior, in fp32, as in most published trainers."""
    drawn: Tensor = encoder.model.encode(clip).latent_dist.sample(encoder.generator)
    return drawn.float()


def likeliest(encoder: Encoder, clip: Tensor) -> Tensor:
    """The mode of the VAE's posterior over a clip's latents, in fp32. ``clip``: (B, C, F, H, W), or without F for an
    image VAE."""
    mode: Tensor = encoder.model.encode(clip).latent_dist.mode()
    return mode.float()


def packed(latents: Tensor) -> Tensor:
    """Packs latents (C, h, w) in cells of 2x2: (h/2, w/2, 4C), with the channels first in a cell (diffusers
    FluxPipeline)."""
    channels, rows, columns = latents.shape
    cells = latents.view(channels, rows // 2, 2, columns // 2, 2)
    return cells.permute(1, 3, 0, 2, 4).reshape(rows // 2, columns // 2, channels * 4)


def standardised(latents: Tensor, config: Any) -> Tensor:
    """Latents (B, C, ...) with mean 0 and standard deviation 1 in each channel, by the numbers in a VAE's config."""
    return (latents - per_channel(config.latents_mean, latents)) / per_channel(config.latents_std, latents)


def per_channel(values: Any, like: Tensor) -> Tensor:
    """Numbers per channel as an fp32 tensor (1, C, 1, ...) that broadcasts over ``like``, which is (B, C, ...)."""
    shaped = torch.as_tensor(values, dtype=torch.float32, device=like.device)
    return shaped.view(1, -1, *[1] * (like.ndim - 2))
