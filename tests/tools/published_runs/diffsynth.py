"""DiffSynth-Studio in March 2025, whose README says what a LoRA of Wan 2.1 1.3B takes at 81x480x832.

The commands are its README's (@e757013). Its `data_process` is a run of its own that leaves files, so they are made
directly. It prints no counters.
"""

from __future__ import annotations

from planner.evidence.published import Row
from tests.tools.published_runs.trainer import RUN, Folders, PublishedTrainer

COMMIT = "e757013a142fe1a80172c57053da7cb6c26851d3"
WEIGHTS = "models/Wan-AI/Wan2.1-T2V-1.3B"
LATENT, PROMPT = (16, 21, 60, 104), (1, 512, 4096)
"""Latents of 81 frames of 480x832 and a umT5 embedding, in bf16 (examples/wanvideo/train_wan_t2v.py)."""


def _prepare(folders: Folders) -> None:
    import torch

    (folders.data / "train").mkdir(parents=True)
    (folders.data / "metadata.csv").write_text("file_name,text\nclip.mp4,a goat\n", encoding="utf-8")
    latents, context = (torch.zeros(shape, dtype=torch.bfloat16) for shape in (LATENT, PROMPT))
    sample = {"latents": latents, "prompt_emb": {"context": context}}
    torch.save(sample, folders.data / "train" / "clip.mp4.tensors.pth")


def _command(row: Row, folders: Folders) -> list[str]:
    command = [str(folders.python / "bin" / "python"), "examples/wanvideo/train_wan_t2v.py", "--task", "train"]
    command += ["--train_architecture", "lora", "--dataset_path", str(folders.data), "--output_path"]
    command += [str(folders.output), "--dit_path", f"{WEIGHTS}/diffusion_pytorch_model.safetensors"]
    command += ["--steps_per_epoch", "500", "--max_epochs", "10", "--learning_rate", "1e-4"]
    command += ["--lora_rank", str(row.job.lora_rank), "--lora_alpha", "16"]
    command += ["--lora_target_modules", "q,k,v,o,ffn.0,ffn.2", "--accumulate_grad_batches", "1"]
    return [*command, "--use_gradient_checkpointing"]


DIFFSYNTH = PublishedTrainer(
    name="diffsynth",
    repository="https://github.com/modelscope/DiffSynth-Studio",
    packages=(
        *("filelock", "typing-extensions", "sympy==1.13.1", "networkx", "jinja2", "fsspec", "numpy<2", "pillow"),
        *("requests", "tqdm", "pyyaml", "regex", "packaging", "psutil", "pandas", "safetensors", "sentencepiece"),
        *("protobuf", "importlib_metadata", "setuptools<75", "einops", "ftfy", "imageio", "modelscope==1.23.2"),
        "aiohttp",
    ),
    packages_alone=(
        *("torch===2.6.0", "torchvision===0.21.0", "transformers==4.46.2", "tokenizers==0.20.3", "peft==0.14.0"),
        *("accelerate==1.4.0", "huggingface_hub==0.29.3", "lightning==2.5.0.post0"),
        *("pytorch-lightning==2.5.0.post0", "lightning-utilities==0.14.0", "torchmetrics==1.6.2"),
    ),
    versions=("torch", "transformers", "peft", "lightning"),
    prepare=_prepare,
    commit=lambda row: COMMIT,
    hollow=lambda row: (f"{WEIGHTS}=Wan-AI/Wan2.1-T2V-1.3B",),
    command=_command,
    published=lambda row: {row.id: (RUN, "device")},
    steps=3,
)
"""It asked for transformers 4.46.2 (requirements.txt); the others are the newest of those days."""
