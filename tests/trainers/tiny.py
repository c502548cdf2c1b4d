"""Tiny diffusers folders with random weights, and short real videos, for tests of data, caching and training."""

from __future__ import annotations

from pathlib import Path

import av
import numpy
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from planner import catalog
from planner.facts import ModelProfile

WORDS = ("<pad>", "</s>", "<unk>", "a", "cat", "dog", "runs", "sits", "red", "blue")


def write_video(path: Path, frames: int = 9, height: int = 48, width: int = 64, fps: int = 16) -> Path:
    """A clip whose frames differ, encoded for real."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(frames):
            picture = numpy.zeros((height, width, 3), numpy.uint8)
            picture[..., 0] = 255 * number // max(1, frames - 1)  # red tells the frame
            picture[: height // 2, :, 1] = 200
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return path


def write_image(path: Path, height: int = 48, width: int = 64) -> Path:
    Image.fromarray(numpy.tile(numpy.arange(width, dtype=numpy.uint8)[None, :, None], (height, 1, 3))).save(path)
    return path


def write_clips(folder: Path, count: int = 3, **shape: int) -> Path:
    """So many videos with captions beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        write_video(folder / f"{number}.mp4", **{"frames": 9 + number, **shape})
        (folder / f"{number}.txt").write_text(f"a {WORDS[3 + number % 7]} cat")
    return folder


def tokenizer(length: int = 512) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=length
    )


def t5(kind: str, width: int) -> torch.nn.Module:
    """A T5 or UMT5 encoder of one layer."""
    import transformers

    config_class = {"UMT5EncoderModel": transformers.UMT5Config, "T5EncoderModel": transformers.T5Config}[kind]
    config = config_class(
        vocab_size=len(WORDS), d_model=width, d_kv=4, d_ff=8, num_layers=1, num_heads=2, feed_forward_proj="gated-gelu"
    )
    return getattr(transformers, kind)(config)


def smaller(name: str, config: dict[str, object], **changes: object) -> ModelProfile:
    """A bundled model's profile with some keys of its config changed, for clips of 64x64."""
    profile = catalog.model(name)
    shape = profile.shape.replace(resolutions=((64, 64),))
    return profile.replace(config={**profile.config, **config}, shape=shape, **changes)


WAN = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 16, "freq_dim": 8, "text_dim": 8}


def wan_profile(name: str = "wan2.1-t2v-1.3b") -> ModelProfile:
    if name.startswith("wan2.1-i2v"):
        inputs = {**catalog.model(name).inputs, "image_tokens": 5}
        return smaller(name, {**WAN, "image_dim": 16, "added_kv_proj_dim": 24}, inputs=inputs)
    return smaller(name, WAN)


def wan_folder(folder: Path, profile: ModelProfile) -> Path:
    """A pipeline's folder as save_pretrained writes it."""
    import transformers
    from diffusers import AutoencoderKLWan

    torch.manual_seed(0)
    large = {"base_dim": 3, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    if profile.vae.config.get("decoder_base_dim"):
        large["decoder_base_dim"] = 3
    AutoencoderKLWan(**{**profile.vae.config, **large}).save_pretrained(folder / "vae")
    t5("UMT5EncoderModel", profile.config["text_dim"]).save_pretrained(folder / "text_encoder")
    tokenizer().save_pretrained(folder / "tokenizer")
    if profile.config.get("image_dim"):
        vision = transformers.CLIPVisionConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=28,
            patch_size=14,
        )
        transformers.CLIPVisionModel(vision).save_pretrained(folder / "image_encoder")
        size = {"height": 28, "width": 28}
        transformers.CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=size).save_pretrained(
            folder / "image_processor"
        )
    return folder


def cogvideox_profile(name: str = "cogvideox-2b") -> ModelProfile:
    config = {
        "num_layers": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "text_embed_dim": 8,
        "time_embed_dim": 8,
    }
    if "5b" in name and "1.5" not in name:
        config |= {"sample_height": 8, "sample_width": 8}
    else:
        config |= {"sample_height": 8, "sample_width": 8}
    return smaller(name, config)


def cogvideox_folder(folder: Path, profile: ModelProfile) -> Path:
    from diffusers import AutoencoderKLCogVideoX

    torch.manual_seed(0)
    small = {"block_out_channels": [8, 8, 8, 8], "layers_per_block": 1, "norm_num_groups": 2}
    AutoencoderKLCogVideoX(**{**profile.vae.config, **small}).save_pretrained(folder / "vae")
    t5("T5EncoderModel", profile.config["text_embed_dim"]).save_pretrained(folder / "text_encoder")
    tokenizer().save_pretrained(folder / "tokenizer")
    return folder


MODELS = (
    "wan2.1-t2v-1.3b",
    "wan2.1-i2v-14b-480p",
    "wan2.2-i2v-a14b",
    "wan2.2-ti2v-5b",
    "cogvideox-2b",
    "cogvideox-5b-i2v",
    "cogvideox1.5-5b-i2v",
)
"""Bundled models whose samples can be encoded, at least one of each kind of condition."""


def profile(name: str) -> ModelProfile:
    """A tiny sibling of a bundled model."""
    return {"wan": wan_profile, "cogvideox": cogvideox_profile}[catalog.model(name).family](name)


def folder(path: Path, made: ModelProfile) -> Path:
    """A tiny sibling's diffusers folder."""
    return {"wan": wan_folder, "cogvideox": cogvideox_folder}[made.family](path, made)
