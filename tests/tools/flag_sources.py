"""Where the flags of each trainer are, and what cannot be read there: what took the place of a flag that is gone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Entry:
    path: str
    function: str = ""
    """the function that makes the parser; the whole file when empty"""
    commit: str = ""
    removed: str = ""
    """for a script that is no more: since when, and what is there instead"""
    format: Literal["argparse", "toml", "yaml"] = "argparse"
    keys: tuple[tuple[str, dict[str, str]], ...] = ()
    """for a config file: the sources that read it, and how they call its tables (see `read_flags.keys`)"""
    open: tuple[str, ...] = ()
    """tables that are handed on whole, with whatever keys"""


@dataclass(frozen=True)
class Source:
    trainer: str
    url: str
    commit: str
    scripts: tuple[Entry, ...]
    gone: dict[str, str] = field(default_factory=dict)
    """flags that went with a script which is no more -> when"""
    instead: dict[str, str] = field(default_factory=dict)
    """gone flag -> what says the same now"""
    never: frozenset[str] = frozenset()
    """flags of the history that were another script's"""
    history: tuple[str, ...] = ()
    """files that are no more, and held such flags"""
    version: str = ""
    """where a release was read: its files, put into a git of their own"""
    dashes: bool = False
    """its parser takes every flag with dashes for underscores too"""


def _all(function: str, paths: str) -> tuple[Entry, ...]:
    return tuple(Entry(path, function) for path in paths.split())


LIGHTNING = "2025-06-13 (830b1b72), with examples/wanvideo/train_wan_t2v.py"

DIFFSYNTH = Source(
    "diffsynth",
    "https://github.com/modelscope/DiffSynth-Studio",
    "fed7b18f",
    (
        Entry("examples/wanvideo/model_training/train.py", "wan_parser"),
        Entry("examples/flux/model_training/train.py", "flux_parser"),
        Entry("examples/flux2/model_training/train.py", "flux2_parser"),
        Entry("examples/qwen_image/model_training/train.py", "qwen_image_parser"),
        *_all(
            "",
            "examples/z_image/model_training/train.py examples/ltx2/model_training/train.py "
            "examples/krea2/model_training/train.py examples/stable_diffusion_xl/model_training/train.py "
            "examples/stable_diffusion/model_training/train.py examples/ernie_image/model_training/train.py "
            "examples/anima/model_training/train.py examples/ideogram4/model_training/train.py",
        ),
        Entry(
            "examples/wanvideo/train_wan_t2v.py",
            "parse_args",
            "a25bd74d",
            "removed on 2025-06-13 (830b1b72); examples/wanvideo/model_training/train.py took its place",
        ),
    ),
    gone=dict.fromkeys(
        ("--training_strategy", "--train_architecture", "--accumulate_grad_batches", "--dit_path", "--max_epochs"),
        LIGHTNING,
    ),
    instead={
        "--training_strategy": "; how work is split over GPUs is accelerate's config now (`accelerate launch "
        "--config_file`)",
        "--train_architecture": "; LoRA is `--lora_base_model dit`, full training `--trainable_models dit`",
        "--accumulate_grad_batches": "; `--gradient_accumulation_steps`",
        "--dit_path": "; `--model_id_with_origin_paths` or `--model_paths`",
        "--max_epochs": "; `--num_epochs`",
    },
    history=("diffsynth/trainers/utils.py",),
)

EASYANIMATE = Source(
    "easyanimate",
    "https://github.com/aigc-apps/EasyAnimate",
    "c2a70d1",
    _all("parse_args", "scripts/train.py scripts/train_lora.py scripts/train_control.py scripts/train_reward_lora.py"),
)

FUN = (
    "wan2.1/train wan2.1/train_lora wan2.1_fun/train wan2.1_fun/train_lora wan2.1_fun/train_control wan2.2/train "
    "wan2.2/train_lora wan2.2_fun/train wan2.2_fun/train_lora cogvideox_fun/train cogvideox_fun/train_lora flux/train "
    "flux/train_lora flux2/train flux2/train_lora hunyuanvideo/train hunyuanvideo/train_lora ltx2/train "
    "ltx2/train_lora qwenimage/train qwenimage/train_lora z_image/train z_image/train_lora"
)
VIDEOX_FUN = Source(
    "videox-fun",
    "https://github.com/aigc-apps/VideoX-Fun",
    "804a425",
    _all("parse_args", " ".join(f"scripts/{path}.py" for path in FUN.split())),
)

LATENTSYNC = Source(
    "latentsync",
    "https://github.com/bytedance/LatentSync",
    "a229c39",
    (
        *_all("", "scripts/train_unet.py scripts/train_syncnet.py"),
        *(
            Entry(f"configs/unet/{name}.yaml", format="yaml")
            for name in ("stage1", "stage1_512", "stage2", "stage2_512", "stage2_efficient")
        ),
    ),
)

_SUBSETS = ".general. .datasets[]. .datasets[].subsets[]."
SD_SCRIPTS = Source(
    "sd-scripts",
    "https://github.com/kohya-ss/sd-scripts",
    "48d368fa",
    (
        *_all(
            "setup_parser",
            "flux_train.py flux_train_network.py sdxl_train.py sdxl_train_network.py train_network.py sd3_train.py "
            "sd3_train_network.py lumina_train_network.py hunyuan_image_train_network.py anima_train_network.py",
        ),
        Entry(
            "dataset.toml",
            format="toml",
            keys=(
                (
                    "library/config_util.py",
                    {
                        "schema SUBSET_ASCENDABLE_SCHEMA": _SUBSETS,
                        "schema DO_SUBSET_ASCENDABLE_SCHEMA": _SUBSETS,
                        "schema DB_SUBSET_ASCENDABLE_SCHEMA": _SUBSETS,
                        "schema DATASET_ASCENDABLE_SCHEMA": ".general. .datasets[].",
                        "schema DB_SUBSET_DISTINCT_SCHEMA": ".datasets[].subsets[].",
                        "schema FT_SUBSET_DISTINCT_SCHEMA": ".datasets[].subsets[].",
                    },
                ),
            ),
        ),
    ),
)

DIFFUSERS = Source(
    "diffusers",
    "https://github.com/huggingface/diffusers",
    "58eb52c080",
    _all(
        "parse_args",
        "examples/dreambooth/train_dreambooth_flux.py "
        "examples/dreambooth/train_dreambooth_lora_flux.py examples/dreambooth/train_dreambooth_lora_flux_kontext.py "
        "examples/dreambooth/train_dreambooth_lora_flux2.py examples/dreambooth/train_dreambooth_lora_flux2_klein.py "
        "examples/dreambooth/train_dreambooth_lora_hidream.py "
        "examples/dreambooth/train_dreambooth_lora_krea2.py examples/dreambooth/train_dreambooth_lora_lumina2.py "
        "examples/dreambooth/train_dreambooth_lora_qwen_image.py examples/dreambooth/train_dreambooth_lora_sana.py "
        "examples/dreambooth/train_dreambooth_lora_sd3.py examples/dreambooth/train_dreambooth_lora_sdxl.py "
        "examples/dreambooth/train_dreambooth_lora_z_image.py examples/dreambooth/train_dreambooth_sd3.py "
        "examples/dreambooth/train_dreambooth.py "
        "examples/text_to_image/train_text_to_image.py examples/text_to_image/train_text_to_image_lora.py "
        "examples/text_to_image/train_text_to_image_lora_sdxl.py examples/text_to_image/train_text_to_image_sdxl.py",
    )
    + _all(
        "get_args",
        "examples/cogvideo/train_cogvideox_lora.py examples/cogvideo/train_cogvideox_image_to_video_lora.py",
    ),
)

_MUSUBI = (
    "wan flux_2 flux_kontext fpack hv hv_1_5 ideogram4 kandinsky5 krea2 qwen_image zimage"  # one network script each
)
MUSUBI = Source(
    "musubi-tuner",
    "https://github.com/kohya-ss/musubi-tuner",
    "30c658c",
    (
        *(Entry(f"src/musubi_tuner/{name}_train_network.py", "main") for name in _MUSUBI.split()),
        *(Entry(f"src/musubi_tuner/{name}_train.py", "main") for name in ("qwen_image", "zimage")),
        Entry("src/musubi_tuner/hv_train.py", "setup_parser"),
        *(
            Entry(f"src/musubi_tuner/{name}cache_{what}.py", "main")
            for name in ("", "wan_", "qwen_image_", "zimage_", "flux_2_", "flux_kontext_", "hv_1_5_", "krea2_")
            for what in ("latents", "text_encoder_outputs")
        ),
        Entry(
            "dataset.toml",
            format="toml",
            keys=(
                (
                    "src/musubi_tuner/dataset/config_utils.py",
                    {
                        "schema DATASET_ASCENDABLE_SCHEMA": ".general. .datasets[].",
                        "schema IMAGE_DATASET_DISTINCT_SCHEMA": ".datasets[].",
                        "schema VIDEO_DATASET_DISTINCT_SCHEMA": ".datasets[].",
                    },
                ),
            ),
        ),
    ),
)

_DATASET = ".".join(("config", "process[]", "datasets[]", ""))
AI_TOOLKIT = Source(
    "ai-toolkit",
    "https://github.com/ostris/ai-toolkit",
    "27a03a9",
    (
        Entry("run.py", "main"),
        Entry(
            "config.yaml",
            format="yaml",
            keys=(
                (
                    "toolkit/config_modules.py",
                    {
                        "class SaveConfig": "config.process[].save.",
                        "class LoggingConfig": "config.process[].logging.",
                        "class SampleConfig": "config.process[].sample.",
                        "class SampleItem": "config.process[].sample.samples[].",
                        "class NetworkConfig": "config.process[].network.",
                        "class TrainConfig": "config.process[].train.",
                        "class EMAConfig": "config.process[].train.ema_config.",
                        "class ModelConfig": "config.process[].model.",
                        "class DatasetConfig": "config.process[].datasets[].",
                    },
                ),
            ),
        ),
    ),
)

_PIPE = {
    "config": "",
    "config['model']": "model.",
    "model_config": "model.",
    "self.model_config": "model.",
    "self.config": "",
    "config['adapter']": "adapter.",
    "adapter_config": "adapter.",
    "config['optimizer']": "optimizer.",
    "optim_config": "optimizer.",
    "config['monitoring']": "monitoring.",
    "config.get('monitoring', {})": "monitoring.",
}
_DIRECTORY = {
    "dataset_config": "",
    "self.dataset_config": "",
    "directory_config": "directory[].",
    "self.directory_config": "directory[].",
}
DIFFUSION_PIPE = Source(
    "diffusion-pipe",
    "https://github.com/tdrussell/diffusion-pipe",
    "8f83dbf",
    (
        Entry("train.py", ""),
        Entry(
            "config.toml",
            format="toml",
            keys=(
                ("train.py", _PIPE),
                ("utils/common.py", _PIPE),
                ("utils/saver.py", _PIPE),
                ("models/base.py", _PIPE),
                *(
                    (f"models/{name}.py", _PIPE)
                    for name in [
                        "cosmos_predict2",
                        "wan/wan",
                        "flux",
                        "flux2",
                        "hidream",
                        "hunyuan_video",
                        "hunyuan_video_15",
                        "ltx_video",
                        "ltx2",
                        "qwen_image",
                        "sdxl",
                        "sd3",
                        "z_image",
                        "chroma",
                        "krea2",
                        "lumina_2",
                    ]
                ),
            ),
            open=("optimizer",),
        ),
        Entry("dataset.toml", format="toml", keys=(("utils/dataset.py", _DIRECTORY),)),
    ),
)

ACCELERATE = Source(
    "accelerate",
    "https://github.com/huggingface/accelerate",
    "16cb6eb8",
    (Entry("src/accelerate/commands/launch.py", "launch_command_parser"),),
    dashes=True,  # commands/utils.py CustomArgumentParser
)
DEEPSPEED = Source(
    "deepspeed",
    "https://github.com/deepspeedai/DeepSpeed",
    "edaa722",
    (Entry("deepspeed/launcher/runner.py", "parse_args"),),
)

TORCHRUN = Source(
    "torchrun", "https://pypi.org/project/torch/", "HEAD", (Entry("torch/distributed/run.py", "get_args_parser"),),
    version="2.13.0",
)  # fmt: skip

COGVIDEO = Source(
    "cogvideo",
    "https://github.com/zai-org/CogVideo",
    "7a1af71",
    (Entry("finetune/schemas/args.py", "parse_args"),),
)

COGVIDEOX_FACTORY = Source(
    "cogvideox-factory",
    "https://github.com/a-r-r-o-w/cogvideox-factory",
    "223add1a",
    (Entry("training/cogvideox/args.py", "get_args"),),
    history=("training/args.py",),
)

SOURCES = {
    source.trainer: source
    for source in (
        *(DIFFSYNTH, EASYANIMATE, VIDEOX_FUN, LATENTSYNC, SD_SCRIPTS, DIFFUSERS, MUSUBI, AI_TOOLKIT, DIFFUSION_PIPE),
        *(ACCELERATE, COGVIDEO, COGVIDEOX_FACTORY, DEEPSPEED, TORCHRUN),
    )
}
