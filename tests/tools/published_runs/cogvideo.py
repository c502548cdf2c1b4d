"""CogVideo's own finetune scripts in January 2025, whose README names a card for a LoRA of CogVideoX-2B.

The command is train_ddp_t2v.sh (@f516938) with the model and shape of that row. The script caches the clips and prompts
itself before it trains, and its peak is never reset. It prints its counters behind each checkpoint only; those of the
rehearsal are taken.
"""

from __future__ import annotations

from planner.evidence.published import Row
from tests.tools.published_runs.trainer import RUN, Folders, PublishedTrainer, write_clip

COMMIT = "f5169385bd6d9f33867c37bc45e89469da318fa0"
CLIPS = 5
REPOSITORY = "THUDM/CogVideoX-2b"


def _prepare(folders: Folders) -> None:
    names = [f"videos/{number}.mp4" for number in range(CLIPS)]
    (folders.data / "videos").mkdir(parents=True)
    for name in names:
        write_clip(folders, folders.data / name, frames=49, height=480, width=720)
    (folders.data / "prompts.txt").write_text("\n".join(["a goat"] * CLIPS), encoding="utf-8")
    (folders.data / "videos.txt").write_text("\n".join(names), encoding="utf-8")


def _command(row: Row, folders: Folders) -> list[str]:
    job = row.job
    command = [str(folders.python / "bin" / "accelerate"), "launch", "--num_processes", "1", "finetune/train.py"]
    command += ["--model_path", REPOSITORY, "--model_name", "cogvideox-t2v", "--model_type", "t2v"]
    command += ["--training_type", "lora", "--rank", str(job.lora_rank), "--output_dir", str(folders.output)]
    command += ["--report_to", "tensorboard", "--data_root", str(folders.data), "--caption_column", "prompts.txt"]
    command += ["--video_column", "videos.txt", "--train_resolution", f"{job.frames}x{job.height}x{job.width}"]
    command += ["--train_epochs", "10", "--batch_size", str(job.batch_size), "--gradient_accumulation_steps", "1"]
    command += ["--mixed_precision", "fp16", "--seed", "42", "--num_workers", "8", "--pin_memory", "True"]
    return [*command, "--nccl_timeout", "1800"]


COGVIDEO = PublishedTrainer(
    name="cogvideo",
    repository="https://github.com/zai-org/CogVideo",
    packages=(
        *("filelock", "typing-extensions", "sympy==1.13.1", "networkx", "jinja2", "fsspec", "numpy==1.26.0", "pillow"),
        *("requests", "tqdm", "pyyaml", "regex", "packaging", "psutil", "safetensors", "sentencepiece==0.2.0"),
        *("protobuf", "importlib_metadata", "setuptools<75", "opencv-python-headless==4.10.0.84", "wandb==0.19.2"),
        *("imageio==2.36.1", "imageio-ffmpeg==0.5.1", "decord==0.6.0", "pydantic==2.10.5"),
    ),
    packages_alone=(
        *("torch===2.5.1", "torchvision===0.20.1", "diffusers==0.32.1", "transformers==4.47.1", "tokenizers==0.21.0"),
        *("accelerate==1.2.1", "peft==0.14.0", "huggingface_hub==0.27.1"),
    ),
    versions=("torch", "diffusers", "transformers", "peft", "accelerate"),
    prepare=_prepare,
    commit=lambda row: COMMIT,
    hollow=lambda row: (REPOSITORY,),
    command=_command,
    published=lambda row: {row.id: (RUN, "reserved")},
    steps=3,
)
"""The newest of that day that its requirements.txt allows. It names no TensorBoard, so nothing is tracked; where it is
there, its writer refuses the script's paths."""
