"""What stands around the model: VAEs and text encoders, by name, with what they take while they encode and decode."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from planner.catalog.profiles import ModelProfile, Vae

COMPONENTS = "components"
"""Folder of their tapes, beside the models'."""

DTYPES = ("half", "fp32")

SPLIT_OVER = 2**30
"""Numbers in the input of a convolution from which on it is split in time, copied and joined (diffusers
autoencoder_kl_cogvideox.py, CogVideoXSafeConv3d). Tapes hold whole ones."""

SPLIT_SHARE = 3
"""The most that this takes beyond a whole one, in what is larger of its input and output: every part but the first is
copied with the last two frames of the one before it, at most as long as itself, and what comes out of the parts is
there beside what it is joined to."""


def samples_per_call(model: ModelProfile, guided: bool) -> int:
    """Samples in one call of the model per sample made: 2 where the prompt and the empty prompt are one batch."""
    return 2 if guided and model.traits.guidance_in_one_batch else 1


def calls(model: ModelProfile, guided: bool) -> int:
    """Calls of the model at one noise level. A model that takes the guidance scale as an input needs one
    (``guidance_embeds``: FLUX.1, HunyuanVideo, FLUX.2)."""
    if not guided or samples_per_call(model, guided) == 2 or model.config.get("guidance_embeds"):
        return 1
    return 2


def chunks_of(vae: Vae, frames: int) -> int:
    """The number of chunks in which the VAE takes `frames` latent frames, rounded up; 0 for a VAE that takes them
    whole."""
    if vae.traits.chunks is None or frames == 1:
        return 0
    first, further = vae.traits.chunks
    return -(-(frames - first) // further) + 1


def frames_of(vae: Vae, chunks: int) -> int:
    """The latent frames of `chunks` whole chunks, for a VAE that takes clips in chunks."""
    assert vae.traits.chunks is not None
    first, further = vae.traits.chunks
    return first + (chunks - 1) * further


def recorded_length(vae: Vae, frames: int) -> str:
    """The end of the name of a VAE's tape for `frames` latent frames: "-image" for a single one that is recorded apart,
    "-3-chunks" for a clip of fewer chunks than the tape of long clips unfolds at, "-3-frames" for one that is shorter
    than a tile of frames and goes through whole."""
    if frames == 1:
        return "-image" if vae.traits.has_image_tapes else ""
    if vae.traits.frame_tiles:
        return f"-{frames}-frames" if frames < vae.traits.frame_tiles[0] else ""
    chunks = chunks_of(vae, frames)
    return f"-{chunks}-chunks" if 0 < chunks < vae.traits.fewest_chunks else ""


def recorded_lengths(model: ModelProfile) -> dict[str, int]:
    """Every `recorded_length` that a model's VAE is recorded at beside long clips, with its latent frames."""
    vae, counts = model.vae, [1]
    if vae.traits.chunks and model.kind == "video":
        counts += [frames_of(vae, chunks) for chunks in range(1, vae.traits.fewest_chunks)]
    if vae.traits.frame_tiles:
        counts += range(2, vae.traits.frame_tiles[0])
    return {name: frames for frames in counts if (name := recorded_length(vae, frames))}


class Component(NamedTuple):
    """A tape of something around the model: its folder and its file."""

    name: str
    variant: str


def components(model: ModelProfile) -> Iterator[Component]:
    """Every tape around a model: each text encoder's forward, the VAE's encode and decode, in both precisions."""
    for encoder in model.text_encoders:
        yield from (Component(encoder.folder, f"encode-{d}") for d in DTYPES)
    if not model.vae.traits.recorded:
        return
    name = model.vae.folder
    for part, dtype in itertools.product(("encode", "decode"), DTYPES):
        yield Component(name, f"{part}-{dtype}")
        yield from (Component(name, f"{part}-{dtype}{end}") for end in recorded_lengths(model))
