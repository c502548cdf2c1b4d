"""finetrainers around the turn of 2024, whose page printed the memory of LTX-Video's LoRA and full fine-tuning.

The commands are those of its README (@66189c8) and docs/training/ltx_video.md (@e5df80c), with the number of steps,
samples and cards of the printed "Training configuration". Its clips are not published; the text is padded to 128
tokens whatever it says.
"""

from __future__ import annotations

import subprocess

from planner.evidence.published import Row
from tests.tools.published_runs.trainer import Folders, PublishedTrainer

LORA_COMMIT = "66189c804bbb6daae297721006bd5bc89ee8a346"
FULL_COMMIT = "e5df80cc36740927c3a0c4184bc465723266465e"
"""The commits that brought the numbers of each method."""

MODEL, STEPS = "Lightricks/LTX-Video", 10
CLIP = "import imageio, numpy, sys; imageio.mimwrite(sys.argv[1], numpy.zeros((49, 512, 768, 3), 'uint8'), fps=24)"
SHARED = (
    *("--model_name", "ltx_video", "--pretrained_model_name_or_path", MODEL, "--caption_column", "prompts.txt"),
    *("--video_column", "videos.txt", "--id_token", "BW_STYLE", "--video_resolution_buckets", "49x512x768"),
    *("--caption_dropout_p", "0.05", "--dataloader_num_workers", "0", "--flow_resolution_shifting", "--seed", "42"),
    *("--mixed_precision", "bf16", "--batch_size", "1", "--train_steps", str(STEPS), "--gradient_checkpointing"),
    *("--gradient_accumulation_steps", "1", "--checkpointing_steps", "500", "--checkpointing_limit", "2"),
    *("--enable_slicing", "--enable_tiling", "--optimizer", "adamw", "--lr", "3e-5"),
    *("--lr_scheduler", "constant_with_warmup", "--lr_warmup_steps", "100", "--lr_num_cycles", "1"),
    *("--beta1", "0.9", "--beta2", "0.95", "--weight_decay", "1e-4", "--epsilon", "1e-8", "--max_grad_norm", "1.0"),
    *("--nccl_timeout", "1800", "--report_to", "none"),
)
"""The README's, but for the tracker, which needs an account, and the validation, whose peak stands apart."""
LORA = ("--rank", "128", "--lora_alpha", "128", "--target_modules", "to_q", "to_k", "to_v", "to_out.0")


def _prepare(folders: Folders) -> None:
    """One clip for full fine-tuning, which encodes it first; as many as steps for LoRA, which encodes as it trains."""
    for method, samples in (("lora", STEPS), ("full", 1)):
        folder = folders.data / method
        folder.mkdir(parents=True)
        subprocess.run([str(folders.python / "bin" / "python"), "-c", CLIP, str(folder / "clip.mp4")], check=True)
        (folder / "prompts.txt").write_text("a goat\n" * samples, encoding="utf-8")
        (folder / "videos.txt").write_text("clip.mp4\n" * samples, encoding="utf-8")


def _command(row: Row, folders: Folders) -> list[str]:
    method = row.job.method
    command = [str(folders.python / "bin" / "accelerate"), "launch", "--config_file"]
    command += ["accelerate_configs/uncompiled_1.yaml", "--gpu_ids", "0", "train.py", *SHARED]
    command += ["--data_root", str(folders.data / method), "--output_dir", str(folders.output)]
    if method == "lora":
        return [*command, "--training_type", "lora", *LORA]
    return [*command, "--training_type", "full-finetune", "--precompute_conditions"]


def _published(row: Row) -> dict[str, tuple[str, str]]:
    """A run printed the rows of both its counters."""
    if row.job.method == "lora":
        counters = {"ft-002": "max_memory_allocated", "ft-003": "max_memory_reserved"}
    else:
        counters = {"ft-014": "memory_allocated", "ft-015": "max_memory_reserved"}
    return {name: ("after_epoch", counter) for name, counter in counters.items()}


FINETRAINERS = PublishedTrainer(
    name="finetrainers",
    repository="https://github.com/a-r-r-o-w/finetrainers",
    packages=(
        *("filelock", "typing-extensions", "sympy==1.13.1", "networkx", "jinja2", "fsspec", "numpy<2", "pillow"),
        *("requests", "tqdm", "pyyaml", "regex", "packaging", "psutil", "pandas", "safetensors", "sentencepiece"),
        *("protobuf", "importlib_metadata", "setuptools<75", "wandb==0.19.1"),
    ),
    packages_alone=(
        *("torch===2.5.1", "torchvision===0.20.1", "transformers==4.47.1", "tokenizers==0.21.0", "peft==0.14.0"),
        *("accelerate==1.2.1", "bitsandbytes==0.45.0", "torchao==0.7.0", "decord==0.6.0", "huggingface_hub==0.27.1"),
        *("imageio", "imageio-ffmpeg", "diffusers==0.32.1"),
    ),
    versions=("torch", "diffusers", "transformers", "peft", "accelerate"),
    prepare=_prepare,
    commit=lambda row: LORA_COMMIT if row.job.method == "lora" else FULL_COMMIT,
    hollow=lambda row: (MODEL,),
    command=_command,
    published=_published,
    last="after_epoch",
    headings={
        "precomputed_conditions": "Memory after precomputing conditions:",
        "precomputed_latents": "Memory after precomputing latents:",
        "before_training": "Memory before training start:",
        "after_epoch": "Memory after epoch",
    },
    counter=r'"(?P<name>(max_)?memory_(allocated|reserved))": (?P<gib>[\d.]+)',
)
"""Full fine-tuning asked for torch 2.5.1 and newer, LoRA a month before for torch below 2.5 (requirements.txt), which a
virtual GPU does not stand in for. LTX-Video came with diffusers 0.32."""
