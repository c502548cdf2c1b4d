"""Which blocks SimpleTuner checkpoints, read at bc8e6ab."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from planner.catalog import lookup
from planner.dialects.base.bindings import Fields, InexpressibleError, Settings, UnsupportedValue
from planner.dialects.base.values import integer
from planner.dialects.simpletuner.defaults import is_true
from planner.dialects.simpletuner.models import CONFIG, family_of, model_of, of
from planner.errors import VplanError, quoted

INTERVAL, STRIDE = "gradient_checkpointing_interval", "gradient_checkpointing_segment_stride"

SEGMENTS = ("flux", "flux2", "hunyuanvideo", "krea2", "ltxvideo", "ltxvideo2", "lumina2", "sd3", "wan", "z_image")
"""Families that checkpoint as many blocks together as the interval says (``checkpoint_sequential_state`` in
helpers/models/*/transformer.py)."""

COUNTED_ON = ("kandinsky5_image", "kandinsky5_video")
"""Those of `ONE_BY_ONE` that count the blocks of all stacks on (``global_idx`` in helpers/models/kandinsky5_video/
transformer_kandinsky5.py); others begin anew with each stack."""

ONE_BY_ONE = ("anima", "chroma", "ernie", "hidream", "ideogram", "qwen_image", "sana", "sanavideo", *COUNTED_ON)
"""Families that checkpoint one block of as many as the interval says (``should_checkpoint_block``). All others ignore
it (helpers/training/default_settings/safety_check.py)."""

BACKENDS = {"torch": "full", "unsloth": "offload"}
"""``gradient_checkpointing_backend`` -> where a block's inputs are kept (helpers/training/
offloaded_gradient_checkpointer.py)."""


def checkpointing_of(settings: Settings) -> Fields:
    """The fields `gradient_checkpointing` and `checkpointed_blocks`. Of segments, whose blocks are recomputed together,
    all but one are priced as if they were not checkpointed."""
    if not is_true(of(settings, "gradient_checkpointing")):
        return {"gradient_checkpointing": "none", "checkpointed_blocks": None}
    backend = str(of(settings, "gradient_checkpointing_backend")).lower()
    if backend not in BACKENDS:
        raise VplanError(f"gradient_checkpointing_backend {quoted(backend)} is not priced", "torch and unsloth are")
    interval = interval_of(settings)
    if interval is None:
        return {"gradient_checkpointing": BACKENDS[backend], "checkpointed_blocks": None}
    if backend != "torch":
        fault = f"gradient_checkpointing_interval with gradient_checkpointing_backend {backend} is not priced"
        raise VplanError(fault, "leave one of both out")
    chosen = sum(index % interval.stride < interval.width for depth in _depths(settings) for index in range(depth))
    checkpointed = chosen - (interval.width - 1 if interval.together else 0)
    if checkpointed <= 0:
        return {"gradient_checkpointing": "none", "checkpointed_blocks": None}
    return {"gradient_checkpointing": "partial", "checkpointed_blocks": checkpointed}


class CheckpointInterval(NamedTuple):
    """Which blocks are checkpointed: the first ``width`` of every ``stride``."""

    width: int
    stride: int
    together: bool
    """recomputed together"""


def interval_of(settings: Settings) -> CheckpointInterval | None:
    """What ``gradient_checkpointing_interval`` and ``gradient_checkpointing_segment_stride`` choose, None: all blocks,
    one by one."""
    family = family_of(settings)
    number = integer(of(settings, INTERVAL) or 1, INTERVAL)
    if number <= 1 or family not in (*SEGMENTS, *ONE_BY_ONE):
        return None
    stride = integer(of(settings, STRIDE) or 0, STRIDE)
    if 0 < stride < number:
        raise VplanError(f"{STRIDE} {stride} is less than {INTERVAL} {number}", f"use {number} or more")
    if family in SEGMENTS:
        return CheckpointInterval(number, stride or number, True)
    return CheckpointInterval(number if stride else 1, stride or number, False)


def _depths(settings: Settings) -> Iterator[int]:
    model = lookup.model(model_of(settings)["model"])
    if family_of(settings) in COUNTED_ON:
        return iter([model.blocks])
    return (model.depth(stack) for stack in model.stacks)


def write_checkpointing(fields: Fields) -> Settings:
    """The settings of `gradient_checkpointing`. Raises an InexpressibleError for a part of the blocks, or 8 bits."""
    kind = fields["gradient_checkpointing"]
    backend = next((word for word, ours in BACKENDS.items() if ours == kind), None)
    if backend is None and kind != "none":
        why = "every block is checkpointed, or none; intervals are read, not written"
        raise InexpressibleError(UnsupportedValue("gradient_checkpointing", kind, "full", why))
    written: Settings = {f"{CONFIG}gradient_checkpointing": backend is not None}
    return written | ({f"{CONFIG}gradient_checkpointing_backend": backend} if backend == "unsloth" else {})
