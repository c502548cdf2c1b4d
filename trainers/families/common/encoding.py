"""What families encode samples with: an encoder at work, and what most of them do with clips and captions.

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
    """A text encoder, image encoder or VAE on its device, with its tokenizer or processor and the sample that it works
    on."""

    model: Any
    helper: Any = None
    """its tokenizer or image processor"""
    tokens: int = 0
    """text tokens a caption is padded to (the plan's)"""
    size: tuple[int, int] = (0, 0)
    """height and width of the clip in its file"""
    reference: Tensor | None = None
    """the image that a sample was made from, at the sample's size; (1, H, W, 3)"""
    control: Tensor | None = None
    """the frames that steer a sample, as many and as large as its own"""
    source: Path | None = None
    """the clip's file, for who hears it"""
    times: tuple[Fraction, ...] = ()
    """when in that file the frames are shown, seconds"""
    sound_features: dict[str, Tensor] = field(default_factory=dict)
    """what it made of the file it was at last: a clip is cut into many samples"""
    earlier: dict[str, Tensor] = field(default_factory=dict)
    """what the turns before left of the sample, where this one reads it"""
    generator: torch.Generator | None = None
    """seeded by what is encoded, so that a sample is the same whoever encodes it, and whenever"""
    prompt_pipelines: dict[tuple[str, str], Any] = field(default_factory=dict)
    """made by `pipeline`, each for all captions: making one takes longer than encoding a caption with CLIP"""

    def pipeline(self, name: str, suffix: str = "") -> Any:
        """The diffusers pipeline ``name`` with this text encoder and tokenizer as its ``text_encoder{suffix}`` and
        ``tokenizer{suffix}``, and no other parts."""
        if (name, suffix) not in self.prompt_pipelines:
            components = {f"text_encoder{suffix}": self.model, f"tokenizer{suffix}": self.helper}
            self.prompt_pipelines[name, suffix] = pipeline(name, **components)
        return self.prompt_pipelines[name, suffix]

    def drop_model(self) -> None:
        """Lets go of the model, for whoever frees its memory."""
        self.model = None
        self.prompt_pipelines.clear()

    @property
    def device(self) -> torch.device:
        """The device of the encoder's weights; offloaded layers (on `meta`) do not count."""
        parameters: Iterable[Tensor] = self.model.parameters()
        return next(parameter.device for parameter in parameters if parameter.device.type != "meta")


def pipeline(name: str, **components: Any) -> Any:
    """A diffusers pipeline of a few parts and nothing else, for the way it encodes prompts."""
    import diffusers

    kind = getattr(diffusers, name)
    parameters = inspect.signature(kind.__init__).parameters.values()
    required = [
        parameter.name for parameter in parameters if parameter.default is parameter.empty and parameter.name != "self"
    ]
    return kind(**dict.fromkeys(required) | components)


def prompt_of(name: str, encoder: Encoder, captions: list[str]) -> list[Tensor]:
    """What a video pipeline with one text encoder makes of captions: their embeddings, (B, tokens, width), then their
    masks if there are any."""
    embeddings = encoder.pipeline(name).encode_prompt(
        captions, do_classifier_free_guidance=False, max_sequence_length=encoder.tokens, device=encoder.device
    )
    return [tensor for tensor in embeddings if tensor is not None]


CAPTIONS = 16
"""Captions that T5 and CLIP take at once: padded to one length, each gets the bytes that it gets alone. Most of what a
small T5 does for one caption, its table of distances, it does for all of them at once."""

Sample = Any
"""Frames of a clip, a uint8 tensor (F, H, W, 3), or a list of captions."""


class EncoderTurn(NamedTuple):
    """The pass of one encoder over all clips, or over all captions, of a dataset."""

    part: str
    """its folder in the model's"""
    class_name: str
    encode: Callable[[Encoder, Sample], Mapping[str, Tensor]]
    """tensors named as in `Family.batch`: of a clip without the batch dimension, of captions with it"""
    helper: str = ""
    """folder of its tokenizer or image processor"""
    frames: int | None = None
    """how many of a clip's first frames it looks at; all when not given, none where it only listens"""
    at_once: int = 1
    """captions that it may take together, as each gets the bytes that it gets alone"""
    reads_earlier: bool = False
    """whether it goes on from what the turns before left of a caption (`Encoder.earlier`)"""


def pixels(encoder: Encoder, frames: Tensor) -> Tensor:
    """(1, 3, F, H, W) between -1 and 1, as VAEs take clips, in the encoder's dtype."""
    count, height, width, _ = frames.shape
    clip = torch.empty((1, 3, count, height, width), device=encoder.device, dtype=encoder.model.dtype)
    for number, frame in enumerate(frames):  # one by one: the whole clip in fp32 would be what nobody planned for
        clip[0, :, number] = frame.to(encoder.device).permute(2, 0, 1).float() / 127.5 - 1.0
    return clip


def sampled(encoder: Encoder, clip: Tensor) -> Tensor:
    """Latents drawn from the VAE's posterior, in fp32, as most published trainers do it."""
    drawn: Tensor = encoder.model.encode(clip).latent_dist.sample(encoder.generator)
    return drawn.float()


def likeliest(encoder: Encoder, clip: Tensor) -> Tensor:
    """The mode of the VAE's posterior over a clip's latents, in fp32. ``clip``: (B, C, F, H, W), or without F for an
    image VAE."""
    mode: Tensor = encoder.model.encode(clip).latent_dist.mode()
    return mode.float()


def packed(latents: Tensor) -> Tensor:
    """Latents (C, h, w) in cells of 2x2: (h/2, w/2, 4C), channels first in a cell (diffusers FluxPipeline)."""
    channels, rows, columns = latents.shape
    cells = latents.view(channels, rows // 2, 2, columns // 2, 2)
    return cells.permute(1, 3, 0, 2, 4).reshape(rows // 2, columns // 2, channels * 4)


def per_channel(values: Any, like: Tensor) -> Tensor:
    """Numbers per channel as an fp32 tensor (1, C, 1, ...) that broadcasts over ``like``, which is (B, C, ...)."""
    shaped = torch.as_tensor(values, dtype=torch.float32, device=like.device)
    return shaped.view(1, -1, *[1] * (like.ndim - 2))
