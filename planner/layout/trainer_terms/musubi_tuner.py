"""musubi-tuner (kohya-ss), read at 30c658c.

Latents and prompts are cached by scripts of their own, one encoder at a time, as ours does.
"""

from __future__ import annotations

from planner.layout.run import Run, Transform
from planner.layout.trainer_terms.lora_layers import wider_adapters
from planner.layout.trainer_terms.shared import (
    cache_kept_while_sampling,
    checkpoints_saved_on_cpu,
    modulation_in_8_bits,
    swap_in_place,
)


def modulation_in_16_bits(run: Run) -> None:
    """``--fp8_scaled`` left Qwen-Image's modulation layers, a third of each block, in 16 bits until 2025-09-18
    (qwen_image/qwen_image_model.py FP8_OPTIMIZATION_EXCLUDE_KEYS, changed in 0df4bee)."""
    if run.strategy.weights_dtype == "fp8" and run.facts.model.trained_with("musubi-tuner", "modulation-in-16-bits"):
        for name, buffer in run.named("weight").items():
            if "_mod." in name:
                run.resize(buffer, 2 * run.sizes[buffer])


TERMS: tuple[Transform, ...] = (
    *(modulation_in_8_bits("musubi-tuner"), wider_adapters, swap_in_place, checkpoints_saved_on_cpu),
    cache_kept_while_sampling,
)
"""``swap_in_place``: without ``--block_swap_h2d_only``, which streams through a ring like ours. Checkpoints:
utils/model_utils.py ``to_cpu``."""

OLDER: dict[str, tuple[Transform, ...]] = {"36f3a98": (modulation_in_16_bits,)}
"""36f3a98: 2025-08-10, of the table of VRAM in docs/qwen_image.md."""
