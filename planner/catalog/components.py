"""What stands around the model: VAEs and text encoders, by name, with what they take while they encode and decode."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from planner.catalog.profiles import ModelProfile, Vae

COMPONENTS = "components"
"""Folder of their tapes, beside the models'."""

DTYPES = ("half", "fp32")

CHUNKS = {
    "AutoencoderKLWan": (1, 1),
    "AutoencoderKLQwenImage": (1, 1),
    "AutoencoderKLMagvit": (1, 1),
    "AutoencoderKLCogVideoX": (3, 2),
}
"""VAEs that take a clip in chunks of frames: (latent frames of the first chunk, of each further one). diffusers
models/autoencoders: Wan (and Qwen-Image's, which is Wan's) one by one with a cache, EasyAnimate's too, CogVideoX 8
frames (2 latent) and what is left in the first."""

FRAMEWISE = {"AutoencoderKLHunyuanVideo": (5, 3)}
"""VAEs that take a long clip in overlapping tiles of frames: (latent frames of a tile, of the stride). HunyuanVideo:
16+1 frames, 12 apart (diffusers, ``use_framewise_encoding``)."""

KEPT_IN_FP32 = {"T5EncoderModel": ".wo.weight", "UMT5EncoderModel": ".wo.weight"}
"""Weights that ``from_pretrained`` leaves in fp32 where the rest is loaded in fp16, by the end of their names
(transformers modeling_t5.py and modeling_umt5.py ``_keep_in_fp32_modules``; bf16 is not held back)."""

SPLIT_OVER = 2**30
"""Numbers in the input of a convolution from which on it is split in time, copied and joined (diffusers
autoencoder_kl_cogvideox.py, CogVideoXSafeConv3d). Tapes hold whole ones."""

SPLIT_SHARE = 3
"""The most that this takes beyond a whole one, in what is larger of its input and output: every part but the first is
copied with the last two frames of the one before it, at most as long as itself, and what comes out of the parts is
there beside what it is joined to."""

SPLITTING = ("AutoencoderKLCogVideoX", "AutoencoderKLMochi")

SHORTEST = 5
"""Chunks a tape has at least: three from the start and two from the end. A shorter clip is priced like this one."""

FEWEST = {"AutoencoderKLMagvit": 11}
"""The same of tapes that address more chunks from their end than two: they do not unfold at fewer."""

CFG_IN_ONE_BATCH = ("cogvideox", "ltx", "sd3", "unet", "mochi", "easyanimate")
"""Families whose pipelines run the prompt and the empty prompt as one batch of two (diffusers pipelines). The others
call the model twice, or were distilled to need it once."""


def together(model: ModelProfile, guided: bool) -> int:
    """Samples in one call of the model per sample made: 2 where the prompt and the empty prompt are one batch."""
    return 2 if guided and model.family in CFG_IN_ONE_BATCH else 1


def calls(model: ModelProfile, guided: bool) -> int:
    """Calls of the model at one noise level. A model that takes the guidance scale as an input needs one
    (``guidance_embeds``: FLUX.1, HunyuanVideo, FLUX.2)."""
    if not guided or together(model, guided) == 2 or model.config.get("guidance_embeds"):
        return 1
    return 2


def chunks_of(vae: Vae, frames: int) -> int:
    """Chunks in which the VAE takes so many latent frames, rounded up; 0 when it takes them whole."""
    if vae.class_name not in CHUNKS or frames == 1:
        return 0
    first, each = CHUNKS[vae.class_name]
    return max(FEWEST.get(vae.class_name, SHORTEST), -(-(frames - first) // each) + 1)


def frames_of(vae: Vae, chunks: int) -> int:
    """Latent frames of so many whole chunks."""
    first, each = CHUNKS[vae.class_name]
    return first + (chunks - 1) * each


class Component(NamedTuple):
    """A tape of something around the model: its folder and its file."""

    name: str
    variant: str


def components(model: ModelProfile) -> Iterator[Component]:
    """Every tape around a model: each text encoder's forward, the VAE's encode and decode, in both precisions."""
    for encoder in model.text_encoders:
        yield from (Component(encoder.folder, f"encode-{d}") for d in DTYPES)
    name = model.vae.folder
    for part, dtype in itertools.product(("encode", "decode"), DTYPES):
        yield Component(name, f"{part}-{dtype}")
        if model.vae.class_name in CHUNKS or model.vae.class_name in FRAMEWISE:
            yield Component(name, f"{part}-{dtype}-image")
