"""Bindings that the tables of all sd-scripts' readers have alike, at 48d368f."""

from __future__ import annotations

from collections.abc import Callable

from planner.dialects.base.bindings import Choice, Fields, FunctionPair, Settings, Value
from planner.dialects.sd_scripts.common import (
    DATASET,
    OPTIMIZERS,
    SAMPLES,
    optimizer,
    validation,
    write_optimizer,
    write_size,
    write_validation,
)

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


def size_pair(to_fields: Callable[[Settings], Fields]) -> FunctionPair:
    """Height, width and batch, of the dataset's file or the flags."""
    return FunctionPair(
        ("height", "width", "batch_size"),
        (f"{DATASET}general.resolution", f"{DATASET}datasets[0].batch_size", "--resolution", "--train_batch_size"),
        to_fields,
        write_size,
        {"height": "resolution", "width": "resolution", "batch_size": "batch_size of the dataset's file"},
    )


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
        "sharding": "none, ddp, zero-1, zero-2, zero-3",
        "offload_optimizer": "with zero",
        "offload_gradients": "with the optimizer",
        "offload_params": "with zero-3",
    }
    settings = ("--mixed_precision", "--full_bf16", "--full_fp16", *flags, "--deepspeed", "--zero_stage")
    return FunctionPair(tuple(words), settings, to_fields, to_settings, words)
