"""LatentSync in March 2025, whose README says what stage 1 takes on a card of 24 GB.

The command is train_unet.sh with configs/unet/stage1.yaml (@6c5c716), which names files of the authors' own: the clips,
the cache of their audio features and the UNet to begin with. Clips and features are made; the UNet begins without
weights, which are read and freed before the first step otherwise. Whisper, SyncNet and the face detector are loaded as
the script does, from files of their names and shapes. It prints no counters.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from planner.evidence.published import Row
from tests.tools.published_runs.trainer import RUN, Folders, PublishedTrainer, write_clip

COMMIT = "6c5c7165aba627aba80746c9e13c1df4685fc8f8"
CONFIG = "configs/unet/stage1.yaml"
CLIPS, FRAMES, SIDE = 2, 100, 256
FEATURES = (2 * FRAMES, 5, 384)
"""Whisper's features of a clip: a row each 20 ms, of five layers (latentsync/whisper/audio2feature.py)."""
WHISPER = {
    "n_mels": 80,
    "n_audio_ctx": 1500,
    "n_audio_state": 384,
    "n_audio_head": 6,
    "n_audio_layer": 4,
    "n_vocab": 51865,
    "n_text_ctx": 448,
    "n_text_state": 384,
    "n_text_head": 6,
    "n_text_layer": 4,
}
"""Dimensions of Whisper tiny, as its file has them (openai/whisper, whisper/model.py)."""


def _module(path: Path) -> ModuleType:
    """One file of a package whose `__init__` imports what only the trainer's Python has."""
    package = ModuleType(path.parent.name)
    package.__path__ = [str(path.parent)]
    sys.modules[package.__name__] = package
    return importlib.import_module(f"{package.__name__}.{path.stem}")


def _whisper_tensors() -> dict[str, Any]:
    """Those of latentsync/whisper/whisper/model.py, in fp16 as published."""
    import torch

    width = WHISPER["n_audio_state"]
    shapes: dict[str, tuple[int, ...]] = {
        "encoder.conv1.weight": (width, WHISPER["n_mels"], 3),
        "encoder.conv1.bias": (width,),
        "encoder.conv2.weight": (width, width, 3),
        "encoder.conv2.bias": (width,),
        "encoder.positional_embedding": (WHISPER["n_audio_ctx"], width),
        "decoder.token_embedding.weight": (WHISPER["n_vocab"], width),
        "decoder.positional_embedding": (WHISPER["n_text_ctx"], width),
    }
    norms = ["encoder.ln_post", "decoder.ln"]
    for part, layers in (("encoder", WHISPER["n_audio_layer"]), ("decoder", WHISPER["n_text_layer"])):
        for block in (f"{part}.blocks.{number}" for number in range(layers)):
            attentions = ["attn"] if part == "encoder" else ["attn", "cross_attn"]
            for attention in attentions:
                for name in ("query", "key", "value", "out"):
                    shapes[f"{block}.{attention}.{name}.weight"] = (width, width)
                    if name != "key":
                        shapes[f"{block}.{attention}.{name}.bias"] = (width,)
            norms += [f"{block}.{attention}_ln" for attention in attentions] + [f"{block}.mlp_ln"]
            shapes |= {f"{block}.mlp.0.weight": (4 * width, width), f"{block}.mlp.0.bias": (4 * width,)}
            shapes |= {f"{block}.mlp.2.weight": (width, 4 * width), f"{block}.mlp.2.bias": (width,)}
    shapes |= {f"{norm}.{kind}": (width,) for norm in norms for kind in ("weight", "bias")}
    return {name: torch.zeros(shape, dtype=torch.float16) for name, shape in shapes.items()}


def _prepare(folders: Folders) -> None:
    import torch

    source, data = folders.source, folders.data
    for folder in (data / "clips", data / "features", source / "checkpoints/auxiliary", source / "checkpoints/whisper"):
        folder.mkdir(parents=True, exist_ok=True)
    sync = _module(source / "eval" / "syncnet" / "syncnet.py").S(num_layers_in_fc_layers=1024)
    torch.save(sync.state_dict(), source / "checkpoints" / "auxiliary" / "syncnet_v2.model")
    face = _module(source / "eval" / "detectors" / "s3fd" / "nets.py").S3FDNet(device="cpu")
    torch.save(face.state_dict(), source / "checkpoints" / "auxiliary" / "sfd_face.pth")
    whisper = {"dims": WHISPER, "model_state_dict": _whisper_tensors()}
    torch.save(whisper, source / "checkpoints" / "whisper" / "tiny.pt")
    for number in range(CLIPS):
        clip = data / "clips" / f"{number}.mp4"
        write_clip(folders, clip, FRAMES, SIDE, SIDE)
        torch.save(torch.zeros(FEATURES), data / "features" / f"{clip.name}.pt")
    config = (source / CONFIG).read_text(encoding="utf-8").splitlines()
    values = {
        "train_fileslist": '""',
        "train_data_dir": str(data / "clips"),
        "audio_embeds_cache_dir": str(data / "features"),
        "audio_mel_cache_dir": str(data / "features"),
        "train_output_dir": str(data / "output"),
        "resume_ckpt_path": '""',
        "num_workers": "1",
    }
    lines = []
    for line in config:
        name = line.strip().partition(":")[0]
        indent = line[: len(line) - len(line.lstrip())]
        lines.append(f"{indent}{name}: {values[name]}" if name in values else line)
    (data / "stage1.yaml").write_text("\n".join(lines), encoding="utf-8")


def _command(row: Row, folders: Folders) -> list[str]:
    launch = [str(folders.python / "bin" / "torchrun"), "--nnodes=1", "--nproc_per_node=1", "--master_port=25679"]
    return [*launch, "-m", "scripts.train_unet", "--unet_config_path", str(folders.data / "stage1.yaml")]


LATENTSYNC = PublishedTrainer(
    name="latentsync",
    repository="https://github.com/bytedance/LatentSync",
    packages=(
        *("filelock", "typing-extensions", "sympy==1.13.1", "networkx", "jinja2", "fsspec", "numpy==1.26.4", "pillow"),
        *("requests", "tqdm", "pyyaml", "regex", "packaging", "psutil", "safetensors==0.4.2", "importlib_metadata"),
        *("setuptools<75", "imageio==2.27.0", "decord==0.6.0", "einops==0.7.0", "omegaconf==2.3.0", "scipy<1.16"),
        *("opencv-python-headless==4.9.0.80", "mediapipe==0.10.11", "python_speech_features==0.6", "librosa==0.10.1"),
        *("scenedetect==0.6.1", "ffmpeg-python==0.2.0", "huggingface-hub==0.25.2", "scikit-image", "numba"),
        *("matplotlib", "more-itertools", "soundfile"),
    ),
    packages_alone=(
        *("torch===2.5.1", "torchvision===0.20.1", "diffusers==0.32.2", "transformers==4.48.0", "tokenizers==0.21.1"),
        *("accelerate==0.26.1", "lpips==0.1.4", "face-alignment==1.4.1"),
    ),
    versions=("torch", "diffusers", "transformers", "accelerate"),
    prepare=_prepare,
    commit=lambda row: COMMIT,
    hollow=lambda row: ("stabilityai/sd-vae-ft-mse",),
    command=_command,
    published=lambda row: {row.id: (RUN, "device")},
    steps=3,
)
"""As it pins them (requirements.txt), but for torch 2.4.1: a virtual GPU stands in from 2.5 on."""
