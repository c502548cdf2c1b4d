"""cogvideox-factory in October 2024, whose README printed 63 peaks before and 63 after a validation.

Its commands are those of metrics.sh (@d81209b^), whose data set is not published. It trains two steps at batch 1 and
one at batch 4, as `planner.evidence.published.SHORT_RUNS` concludes from the table. In full training the first of two
steps overflowed and made no optimizer states; on a virtual GPU nothing overflows, so there it is one step as well.
"""

from __future__ import annotations

from planner.evidence.published import Row
from tests.tools.published_runs.trainer import Folders, PublishedTrainer

LORA_COMMIT = "d81209bf497f55132abd14deb9c109d4d13087ca"
FULL_COMMIT = "4af43644bd122e8d1312c8e83d1a15bd4b38c0d6"
DEEPSPEED_COMMIT = "be9d99a1b074861dd97cc887e0656499e0b7a8af"
"""The commits that brought the tables of each method, and of DeepSpeed."""

REPOSITORIES = {"cogvideox-2b": "THUDM/CogVideoX-2b", "cogvideox-5b": "THUDM/CogVideoX-5b"}
PRINTED = {"before_validation": "", "after_validation": "-validation"}
"""Moment -> the end of the id of the row that was printed then."""
SAMPLES = 5
LATENT, PROMPT = (32, 13, 60, 90), (226, 4096)
"""Moments of 49 frames of 480x720 and a T5 embedding (training/prepare_dataset.py)."""

SHARED = (
    *("--caption_column", "prompts.txt", "--video_column", "videos.txt", "--height_buckets", "480"),
    *("--width_buckets", "720", "--frame_buckets", "49", "--load_tensors", "--validation_prompt", "goat"),
    *("--validation_prompt_separator", ":::", "--num_validation_videos", "1", "--validation_epochs", "1"),
    *("--seed", "42", "--max_num_frames", "49", "--checkpointing_steps", "1000"),
    *("--gradient_accumulation_steps", "1", "--learning_rate", "1e-4", "--lr_scheduler", "cosine_with_restarts"),
    *("--lr_warmup_steps", "200", "--lr_num_cycles", "1", "--enable_slicing", "--enable_tiling"),
    *("--optimizer", "adamw", "--beta1", "0.9", "--beta2", "0.95", "--weight_decay", "0.001"),
    *("--max_grad_norm", "1.0", "--allow_tf32", "--report_to", "tensorboard", "--nccl_timeout", "1800"),
)
"""metrics.sh, but for the tracker: its log needs no account. TensorBoard is not there either, so nothing is tracked."""
DEEPSPEED = ("deepspeed", "0,1", "bf16")
"""Its accelerate config, cards and precision, which is the config's own."""


def _prepare(folders: Folders) -> None:
    import torch

    folder = folders.data
    (folder / "libraries").mkdir(parents=True)
    # DeepSpeed links its optimizer for CPUs with cuRAND, of which it uses nothing (ops/op_builder/builder.py).
    (folder / "libraries" / "libcurand.a").write_bytes(b"!<arch>\n")
    for kind, shape in (("latents", LATENT), ("embeddings", PROMPT)):
        (folder / kind).mkdir(parents=True)
        for number in range(SAMPLES):
            torch.save(torch.zeros(shape), folder / kind / f"{number}.pt")
    (folder / "prompts.txt").write_text("\n".join(["a goat"] * SAMPLES), encoding="utf-8")
    names = [f"videos/{number}.mp4" for number in range(SAMPLES)]
    (folder / "videos.txt").write_text("\n".join(names), encoding="utf-8")


def _commit(row: Row) -> str:
    if row.strategy.sharding != "none":
        return DEEPSPEED_COMMIT
    return LORA_COMMIT if row.job.method == "lora" else FULL_COMMIT


def _hollow(row: Row) -> tuple[str, ...]:
    return (REPOSITORIES[row.job.model],)


def _published(row: Row) -> dict[str, tuple[str, str]]:
    run = row.id.removesuffix(PRINTED["after_validation"])  # named by either of its rows, it printed both
    return {run + end: (moment, "max_memory_reserved") for moment, end in PRINTED.items()}


def _command(row: Row, folders: Folders) -> list[str]:
    strategy = row.strategy
    config, gpus, precision = ("uncompiled_1", "0", "fp16") if strategy.sharding == "none" else DEEPSPEED
    script = "lora" if row.job.method == "lora" else "sft"
    command = [str(folders.python / "bin" / "accelerate"), "launch", "--gpu_ids", gpus]
    command += [
        "--config_file",
        f"accelerate_configs/{config}.yaml",
        f"training/cogvideox_text_to_video_{script}.py",
    ]
    command += ["--pretrained_model_name_or_path", *_hollow(row), "--data_root", str(folders.data)]
    command += ["--output_dir", str(folders.output), "--train_batch_size", str(row.job.batch_size), *SHARED]
    command += ["--mixed_precision", precision]
    command += ["--max_train_steps", "1" if row.states_come_last else "2"]
    if row.job.method == "lora":
        command += ["--rank", str(row.job.lora_rank), "--lora_alpha", "64"]
    if strategy.gradient_checkpointing == "full":
        command.append("--gradient_checkpointing")
    if strategy.optimizer == "adamw-8bit":
        command.append("--use_8bit")
    if strategy.offload_optimizer == "cpu" and strategy.sharding == "none":
        command += ["--use_cpu_offload_optimizer", "--offload_gradients"]
    return command


COGVIDEOX_FACTORY = PublishedTrainer(
    name="cogvideox-factory",
    repository="https://github.com/a-r-r-o-w/cogvideox-factory",
    packages=(
        *("filelock", "typing-extensions", "sympy==1.13.1", "networkx", "jinja2", "fsspec", "numpy<2", "pillow"),
        *("requests", "tqdm", "pyyaml", "regex", "packaging", "psutil", "pandas", "safetensors", "sentencepiece"),
        *("protobuf", "importlib_metadata", "setuptools<75", "opencv-python-headless", "wandb==0.18.3"),
        *("ninja", "hjson", "py-cpuinfo", "msgpack", "pydantic>=2", "nvidia-ml-py"),
    ),
    packages_alone=(
        *("torch===2.5.1", "torchvision===0.20.1", "transformers==4.45.2", "tokenizers==0.20.0", "peft==0.13.0"),
        *("accelerate==1.0.0", "bitsandbytes==0.44.1", "torchao==0.5.0", "decord==0.6.0", "huggingface_hub==0.25.1"),
        *("imageio", "imageio-ffmpeg", "diffusers @ git+https://github.com/huggingface/diffusers@66eef9a6dc"),
    ),
    packages_built=("deepspeed==0.15.2",),
    environment={"DS_BUILD_OPS": "0", "DS_SKIP_CUDA_CHECK": "1", "LIBRARY_PATH": "{data}/libraries"},
    versions=("torch", "diffusers", "transformers", "peft", "accelerate", "bitsandbytes", "torchao", "deepspeed"),
    prepare=_prepare,
    commit=_commit,
    hollow=_hollow,
    command=_command,
    headings={
        "before_training": "===== Memory before training =====",
        "before_validation": "===== Memory before validation =====",
        "after_validation": "===== Memory after validation =====",
        "before_testing": "===== Memory before testing =====",
    },
    published=_published,
    counter=r"(?P<name>memory_allocated|max_memory_allocated|max_memory_reserved)=(?P<gib>[\d.]+) GB",
    last="before_testing",
    sampler=("diffusers/pipelines/cogvideo/pipeline_cogvideox.py", r"(?m)^(        num_inference_steps: int = )\d+"),
)
"""Tracebacks in its README fit torch 2.5 (torch/cuda/__init__.py:476, optim/optimizer.py:487), of which it had a
nightly; the other packages were the newest of those days, and it asked for diffusers from source."""
