"""Bindings that the tables of all sd-scripts' readers have alike, at 48d368f."""

from __future__ import annotations

from collections.abc import Callable

from planner.catalog import lookup
from planner.dialects.base import block_swap
from planner.dialects.base.bindings import (
    Choice,
    Fields,
    FunctionPair,
    InexpressibleError,
    Settings,
    UnsupportedValue,
    Value,
)
from planner.dialects.base.dialect import Move
from planner.dialects.base.launchers import ON_HOST, several_gpus
from planner.dialects.kohya.dataset_tables import DATASET
from planner.dialects.sd_scripts.common import (
    OPTIMIZERS,
    SAMPLES,
    SHAPE,
    changed_size,
    optimizer,
    size,
    validation,
    write_optimizer,
    write_size,
    write_validation,
)
from planner.errors import VplanError
from planner.spec.rules import DEEPSPEED

CHECKPOINTING = Choice(
    "gradient_checkpointing",
    {
        "none": {},
        "full": {"--gradient_checkpointing": True},
        "offload": {"--gradient_checkpointing": True, "--cpu_offload_checkpointing": True},
    },
)
ACCUMULATION = Value("gradient_accumulation", "--gradient_accumulation_steps", 1)
OPTIMIZER = FunctionPair(
    ("optimizer",), ("--optimizer_type",), optimizer, write_optimizer, {"optimizer": ", ".join(OPTIMIZERS)}
)
COMPILE = Choice("compile", {"none": {}, "full": {"--torch_compile": True}}, "accelerate compiles the whole model")
BUCKETS = Choice("grad_buckets", {"copy": {}, "view": {"--ddp_gradient_as_bucket_view": True}})
VALIDATION = FunctionPair(("validation_mode",), SAMPLES, validation, write_validation, {"validation_mode": "off, on"})


def size_pair(step: Callable[[Settings], int] = lambda settings: 1) -> FunctionPair:
    """Sizes and batches of the datasets, of their file or the flags. ``step``: pixels that sides are whole steps of."""
    return FunctionPair(
        SHAPE,
        (f"{DATASET}general.resolution", f"{DATASET}datasets[0].batch_size", "--resolution", "--train_batch_size"),
        lambda settings: size(settings, step(settings)),
        write_size,
        {
            "height": "resolution",
            "width": "resolution",
            "batch_size": "batch_size of the dataset's file",
            "buckets": "several datasets, read only",
        },
        lambda settings, before, after: changed_size(settings, before, after, step(settings)),
    )


def cell(model: str) -> Callable[[Settings], int]:
    """Pixels of the whole cells that a model's buckets are made of (``verify_bucket_reso_steps``)."""
    return lambda settings: lookup.model(model).shape.size_multiple


def engine_pair(
    to_fields: Callable[[Settings], Fields],
    to_settings: Callable[[Fields], Settings],
    weights: str,
    *flags: str,
) -> FunctionPair:
    """Number formats and engine. ``weights``: the formats of the base, in words; ``flags``: those that a script has for
    them beside the precision's."""
    words = {
        "weights_dtype": weights,
        "adapter_dtype": "fp32, bf16 (--full_bf16)",
        "autocast": "--mixed_precision",
        "master_weights": "with zero",
        "sharding": "none, ddp, zero-1, zero-2",
        "offload_optimizer": "with zero",
        "offload_gradients": "with the optimizer",
        "offload_params": "none",
    }
    settings = ("--mixed_precision", "--full_bf16", "--full_fp16", *flags, "--deepspeed", "--zero_stage")
    return FunctionPair(tuple(words), settings, to_fields, to_settings, words)


def swap_pair(to_fields: Callable[[Settings], Fields]) -> FunctionPair:
    """Swapped blocks, counted as the model's script counts them."""

    def write(fields: Fields) -> Settings:
        blocks = block_swap.setting("sd-scripts", fields)
        return {"--blocks_to_swap": blocks} if blocks else {}

    return FunctionPair(("swap_blocks",), ("--blocks_to_swap",), to_fields, write, {"swap_blocks": "--blocks_to_swap"})


def step_pair(is_full: Callable[[Settings], bool]) -> FunctionPair:
    """Where parameters step. The LoRA scripts take ``--fused_backward_pass`` and do not look at it (train_network.py).
    ``is_full``: whether the script is one of full training."""

    def read(settings: Settings) -> Fields:
        fused = settings.get("--fused_backward_pass") or settings.get("--blockwise_fused_optimizers")
        return {"optimizer_step": "backward" if fused and is_full(settings) else "foreach"}

    def write(fields: Fields) -> Settings:
        step = fields["optimizer_step"]
        if step == "foreach":
            return {}
        if step != "backward" or fields["method"] != "full":
            why = "--fused_backward_pass (Adafactor) and --blockwise_fused_optimizers are all it has, for full training"
            raise InexpressibleError(UnsupportedValue("optimizer_step", step, "foreach", why))
        return {"--fused_backward_pass" if fields["optimizer"] == "adafactor" else "--blockwise_fused_optimizers": True}

    words = {"optimizer_step": "foreach, backward (full training)"}
    return FunctionPair(
        ("optimizer_step",), ("--fused_backward_pass", "--blockwise_fused_optimizers"), read, write, words
    )


SHARDED = (
    Move({"sharding": "zero-2", **DEEPSPEED}, "gradients and states are sharded across the GPUs", when=several_gpus),
    Move(
        {"sharding": "zero-2", **ON_HOST, **DEEPSPEED},
        "the optimizer steps in host RAM",
        when=lambda fields: fields["method"] == "full",
    ),
)
"""ZeRO by the scripts' own flags."""


KERNELS = {"torch": "sdpa", "sdpa": "sdpa", "xformers": "efficient", "flash": "flash"}
"""Words of ``--attn_mode`` -> ours; sageattn has no backward."""


def _attention(settings: Settings) -> Fields:
    """``--attn_mode``, else ``--xformers``, else torch's (``load_unet_lazily``)."""
    mode = str(settings.get("--attn_mode") or ("xformers" if settings.get("--xformers") else "torch"))
    if mode not in KERNELS:
        raise VplanError(f"--attn_mode {mode} has no backward: it cannot train", "use --attn_mode flash or torch")
    return {"attention": KERNELS[mode]}


def _write_attention(fields: Fields) -> Settings:
    words = {"sdpa": {}, "efficient": {"--attn_mode": "xformers"}, "flash": {"--attn_mode": "flash"}}
    if fields["attention"] not in words:
        why = "--attn_mode is torch, xformers or flash"
        raise InexpressibleError(UnsupportedValue("attention", fields["attention"], "sdpa", why))
    return words[fields["attention"]]


ATTENTION_MODE = FunctionPair(
    ("attention",),
    ("--attn_mode",),
    _attention,
    _write_attention,
    {"attention": "sdpa, efficient, flash (--attn_mode)"},
)
"""Of the scripts for HunyuanImage 2.1 and Anima."""
