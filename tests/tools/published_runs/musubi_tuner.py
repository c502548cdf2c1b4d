"""musubi-tuner in August 2025, whose docs/qwen_image.md says what LoRAs of Qwen-Image take at 1024x1024.

The command is that page's (@36f3a98), with `--sdpa` in place of the `--xformers` that the numbers were taken with. Its
caches are scripts' of their own that leave files, so they are made directly, with the 512 tokens of text that an
estimate counts on; what the printed runs had is not known. It prints no counters.
"""

from __future__ import annotations

from planner.evidence.published import Row
from tests.tools.published_runs.trainer import RUN, Folders, PublishedTrainer

COMMIT = "36f3a98d97f9dee91258bcb3f5565776400e8446"
WEIGHTS = "models/qwen_image_bf16.safetensors"
LATENT, PROMPT = (16, 1, 128, 128), (512, 3584)
"""Latents of 1024x1024 and embeddings of Qwen2.5-VL, in bf16 (src/musubi_tuner/dataset/image_video_dataset.py)."""
DATASET = """[general]
resolution = [1024, 1024]
caption_extension = ".txt"
batch_size = 1

[[datasets]]
image_directory = "{data}/images"
cache_directory = "{data}/cache"
"""


def _prepare(folders: Folders) -> None:
    import torch
    from PIL import Image
    from safetensors.torch import save_file

    data = folders.data
    for name in ("images", "cache"):
        (data / name).mkdir(parents=True)
    Image.new("RGB", (1024, 1024)).save(data / "images" / "image.png")
    (data / "images" / "image.txt").write_text("a goat", encoding="utf-8")
    (data / "dataset.toml").write_text(DATASET.format(data=data), encoding="utf-8")
    latents, embedding = (torch.zeros(shape, dtype=torch.bfloat16) for shape in (LATENT, PROMPT))
    _, *sizes = LATENT
    key = "x".join(map(str, sizes))
    save_file({f"latents_{key}_bfloat16": latents}, data / "cache" / "image_1024x1024_qi.safetensors")
    save_file({"varlen_vl_embed_bfloat16": embedding}, data / "cache" / "image_qi_te.safetensors")


def _command(row: Row, folders: Folders) -> list[str]:
    command = [str(folders.python / "bin" / "accelerate"), "launch", "--num_cpu_threads_per_process", "1"]
    command += ["--mixed_precision", "bf16", "src/musubi_tuner/qwen_image_train_network.py", "--dit", WEIGHTS]
    command += ["--vae", "models/vae.safetensors", "--text_encoder", "models/qwen_2.5_vl_7b.safetensors"]
    command += ["--dataset_config", str(folders.data / "dataset.toml"), "--sdpa", "--mixed_precision", "bf16"]
    command += ["--timestep_sampling", "shift", "--weighting_scheme", "none", "--discrete_flow_shift", "3.0"]
    command += ["--optimizer_type", "adamw8bit", "--learning_rate", "1e-4", "--gradient_checkpointing"]
    command += ["--max_data_loader_n_workers", "2", "--persistent_data_loader_workers", "--network_module"]
    command += ["networks.lora_qwen_image", "--network_dim", str(row.job.lora_rank), "--max_train_epochs", "16"]
    command += ["--save_every_n_epochs", "16", "--seed", "42", "--output_dir", str(folders.output)]
    command += ["--output_name", "lora"]
    if row.strategy.weights_dtype == "fp8":
        command += ["--fp8_base", "--fp8_scaled"]
    if row.strategy.swap_blocks:
        command += ["--blocks_to_swap", str(row.strategy.swap_blocks)]
    return command


MUSUBI_TUNER = PublishedTrainer(
    name="musubi-tuner",
    repository="https://github.com/kohya-ss/musubi-tuner",
    packages=(
        *("filelock", "typing-extensions", "sympy>=1.13.3", "networkx", "jinja2", "fsspec", "numpy<2.3", "pillow"),
        *("requests", "tqdm", "pyyaml", "regex", "packaging", "psutil", "safetensors==0.4.5", "importlib_metadata"),
        *("setuptools<81", "einops==0.7.0", "toml==0.10.2", "voluptuous==0.15.2", "ftfy==6.3.1", "easydict==1.13"),
        *("sentencepiece==0.2.0", "huggingface-hub==0.34.3", "av==14.0.1", "opencv-python-headless==4.10.0.84"),
    ),
    packages_alone=(
        *("torch===2.7.1", "torchvision===0.22.1", "transformers==4.54.1", "tokenizers==0.21.4"),
        *("accelerate==1.6.0", "bitsandbytes==0.45.4", "diffusers==0.32.1"),
    ),
    versions=("torch", "transformers", "diffusers", "accelerate", "bitsandbytes"),
    prepare=_prepare,
    commit=lambda row: COMMIT,
    hollow=lambda row: (WEIGHTS,),
    command=_command,
    published=lambda row: {row.id: (RUN, "device")},
    code="src",
    steps=3,
)
"""As it pins them (pyproject.toml), with the torch that it asks for with CUDA 12.8."""
