"""SimpleTuner in August 2026, whose documentation has a table of examples with and without checkpointing.

The command line has the settings of its examples sd3.peft-lora and sd1x-dreamshaper.peft-lora (@6a43fd4), without
validation and checkpoints, as the table was made (documentation/experimental/SEGMENTED_CHECKPOINTING.md). Pictures of
our own stand for the data set, which it downloads, and Stable Diffusion 1.5 for dreamshaper-8, which has its shapes. It
makes its caches itself, and the table leaves them out, so the training's peak is compared.
"""

from __future__ import annotations

import json

from planner.evidence.published import Row
from tests.tools.published_runs.trainer import TRAINING, Folders, PublishedTrainer

COMMIT = "6a43fd4889932c11ba1fd502f44e038895522f84"
PICTURES = 6
REPOSITORIES = {
    "sd3.5-medium": "stabilityai/stable-diffusion-3.5-medium",
    "sd1.5": "stable-diffusion-v1-5/stable-diffusion-v1-5",
}
SIDES = {"sd3.5-medium": 1024, "sd1.5": 512}
EXAMPLES = {
    "sd3.5-medium": (
        *("--model_family=sd3", "--flow_schedule_shift=3", "--grad_clip_method=value", "--lora_alpha=128"),
        *("--quantize_via=cpu",),
    ),
    "sd1.5": (
        *("--model_family=sd1x", "--model_flavour=1.5", "--caption_dropout_probability=0.1"),
        *("--resolution=512", "--resolution_type=pixel"),
    ),
}
"""What the two examples say of their own."""
SHARED = (
    *("--base_model_precision=no_change", "--disable_bucket_pruning=true", "--learning_rate=1e-4"),
    *("--lora_type=standard", "--lr_scheduler=constant", "--max_train_steps=100", "--mixed_precision=bf16"),
    *("--model_type=lora", "--num_train_epochs=0", "--optimizer=adamw_bf16", "--push_to_hub=false"),
    *("--report_to=none", "--seed=42", "--use_ema=false", "--vae_batch_size=1", "--validation_disable=true"),
    "--checkpoint_step_interval=5000",
)


def _prepare(folders: Folders) -> None:
    from PIL import Image

    data = folders.data
    for name in ("images", "bin"):
        (data / name).mkdir(parents=True)
    for number in range(PICTURES):
        Image.new("RGB", (1024, 1024), (120, 120, 120)).save(data / "images" / f"{number}.png")
    # It asks this for the size of the card, in MiB (helpers/training/default_settings/safety_check.py).
    tool = data / "bin" / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 81559\n", encoding="utf-8")
    tool.chmod(0o755)
    for model, side in SIDES.items():
        pixels = "pixel_area" if side > 512 else "pixel"
        pictures = {
            "id": "dreambooth",
            "type": "local",
            "instance_data_dir": str(data / "images"),
            "crop": True,
            "crop_style": "random",
            "crop_aspect": "square",
            "minimum_image_size": side // 4,
            "maximum_image_size": side,
            "target_downsample_size": side,
            "resolution": side,
            "resolution_type": pixels,
            "caption_strategy": "instanceprompt",
            "instance_prompt": "x",
            "cache_dir_vae": str(data / "cache" / model / "vae"),
        }
        texts = {"id": "texts", "dataset_type": "text_embeds", "default": True, "type": "local"}
        texts["cache_dir"] = str(data / "cache" / model / "text")
        (data / f"{model}.json").write_text(json.dumps([pictures, texts], indent=2), encoding="utf-8")


def _command(row: Row, folders: Folders) -> list[str]:
    model, python = row.job.model, folders.python / "bin"
    command = ["env", f"PATH={folders.data / 'bin'}:{python}:/usr/bin:/bin", "CONFIG_BACKEND=cmd"]
    command += [str(python / "accelerate"), "launch", "--num_processes", "1", "--mixed_precision", "bf16"]
    command += ["simpletuner/train.py", *SHARED, *EXAMPLES[model], f"--lora_rank={row.job.lora_rank}"]
    command += [f"--train_batch_size={row.job.batch_size}", f"--output_dir={folders.output}"]
    checkpointing = "true" if row.strategy.gradient_checkpointing == "full" else "false"
    return [
        *command,
        f"--gradient_checkpointing={checkpointing}",
        f"--data_backend_config={folders.data / f'{model}.json'}",
    ]


SIMPLETUNER = PublishedTrainer(
    name="simpletuner",
    repository="https://github.com/bghira/SimpleTuner",
    interpreter="python3.12",
    packages=(
        *("filelock", "typing-extensions", "sympy==1.14.0", "networkx==3.6.1", "jinja2", "fsspec==2026.6.0"),
        *("numpy==2.5.2", "pillow==12.3.0", "requests==2.34.2", "tqdm", "pyyaml", "regex", "packaging", "psutil"),
        *("safetensors==0.8.0", "setuptools", "importlib-metadata", "huggingface-hub==1.27.0", "datasets==5.0.1"),
        *("wandb==0.28.2", "trainingsample==0.3.1", "iterutils==0.1.6", "scipy==1.18.0", "boto3==1.43.71"),
        *("pandas==3.0.5", "urllib3==1.26.20", "colorama==0.4.6", "tensorboard==2.21.0", "sentencepiece==0.2.2"),
        *("tiktoken==0.13.0", "loguru==0.7.3", "toml==0.10.2", "fastapi==0.141.1", "sse-starlette==3.4.8"),
        *("atomicwrites==1.4.1", "beautifulsoup4==4.15.0", "imageio==2.37.4", "imageio-ffmpeg==0.6.0", "av==18.1.0"),
        *("cryptography==50.0.0", "aiosqlite==0.22.1", "httpx==0.28.1", "webshart==0.5.2", "nvidia-ml-py==13.610.43"),
        *("einops==0.8.2", "einx==0.4.3", "ftfy==6.3.1", "ninja==1.13.0", "kernels==0.15.2", "trampoline==0.1.2"),
    ),
    packages_alone=(
        *("torch===2.13.0", "torchvision===0.28.0", "torchaudio===2.11.0", "torchao==0.17.0", "diffusers==0.39.0"),
        *("transformers==5.15.0", "tokenizers==0.22.2", "accelerate==1.14.0", "peft==0.20.0", "bitsandbytes==0.50.1"),
        *("open-clip-torch==3.3.0", "timm==1.0.28", "skrample==0.5.3", "torchsde==0.2.6", "torchmetrics==1.9.0"),
        *("lightning-utilities==0.15.3", "optimum-quanto==0.2.7", "lycoris-lora==3.4.0", "torch-optimi==0.3.3"),
        *("prodigy-plus-schedule-free==2.0.1", "peft-singlora==0.2.0", "vector-quantize-pytorch==1.31.1"),
        *("torch-einops-utils==0.1.19", "sdnq==0.2.4"),
    ),
    environment={"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},  # else it tries each file five times
    versions=("torch", "diffusers", "transformers", "peft", "accelerate"),
    prepare=_prepare,
    commit=lambda row: COMMIT,
    hollow=lambda row: (REPOSITORIES[row.job.model],),
    command=_command,
    published=lambda row: {row.id: (TRAINING, "allocated")},
    steps=3,
)
"""What its setup.py asks for, as of 12 August 2026, but for what only other models need."""
