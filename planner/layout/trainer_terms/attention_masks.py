"""Masks over all pairs of tokens that other trainers' code makes where the recorded model makes none, or smaller ones:
those for every head are priced, and a note says what the others take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from planner.catalog import lookup
from planner.catalog.shapes import grid
from planner.layout.run import Run, Transform
from planner.layout.trainer_terms.shared import HeldTensor, hold, stretches_of_blocks
from planner.spec.job import Job
from planner.tape.program import Block, Stage
from planner.units import GIB

MADE, BOOLEAN, HALF = 8, 1, 2
"""Bytes per pair (and head) of a mask. As one for every head is made: repeated in fp32, then int32 beside it; then the
boolean one (``.repeat(...).int().bool()`` in ai-toolkit's chroma/src/model.py and diffusion-pipe's models/chroma.py).
HALF: the one of numbers, which attention makes of it in each block, as diffusers' model does of a smaller one."""


def masks_by_head(trainer: str) -> Transform:
    """Chroma's mask for every head, which all blocks share, and the one of numbers that each attention makes of it."""

    def term(run: Run) -> None:
        """The masks for every head."""
        if not run.samples_only and run.facts.model.trained_with(trainer, "masks-by-head"):
            for stage in filter(None, (run.first_step, run.step, run.accumulate)):
                _with_masks(run, stage)

    return term


def masks_of_numbers_by_head(run: Run) -> None:
    """A mask of which each block's code has a view for all heads and queries (sd-scripts' library/flux_models.py
    ``attn_mask[:, None, None, :].expand``): attention makes one of numbers of it, which is as large as the view looks
    (``convert_boolean_attn_mask`` in ATen/native/transformers/attention.cpp; 972 MiB of 24 heads and 4,608 tokens, seen
    with the memory-efficient kernel and with cuDNN's), and never runs flash."""
    run.work.attention_masked = True
    for stage in filter(None, (run.first_step, run.step, run.accumulate)):
        hold(run, stage, _of_numbers(run, *stretches_of_blocks(stage)))


def _with_masks(run: Run, stage: Stage) -> None:
    forward, backward = stretches_of_blocks(stage)
    start = min(at[0] for at in forward.values())
    spans = [
        HeldTensor(MADE * _pairs(run), "masks as they are made", start - 1, start - 1),
        HeldTensor(BOOLEAN * _pairs(run), "mask for every head", start, max(at[-1] for at in backward.values())),
    ]
    hold(run, stage, [*spans, *_of_numbers(run, forward, backward)])


def _pairs(run: Run) -> int:
    """Pairs of tokens, for every head and sample."""
    grid, heads = run.grid, run.facts.model.config["num_attention_heads"]
    return int(heads * grid["B"] * (grid["H"] * grid["W"] + grid["T"]) ** 2)


def _of_numbers(run: Run, forward: dict[Block, list[int]], backward: dict[Block, list[int]]) -> Iterator[HeldTensor]:
    """The mask that attention makes in each block: kept for its backward pass, which with checkpoints makes it anew."""
    size, name = HALF * _pairs(run), "mask of numbers for every head"
    for block, again in backward.items():
        ran = forward[block]
        if run.strategy.gradient_checkpointing == "none":
            yield HeldTensor(size, name, ran[0], again[-1])
        else:
            yield from (HeldTensor(size, name, at, end) for at, end in ((ran[0], ran[0]), (again[0], again[-1])))


def unpriced_masks_note(trainer: str, fields: dict[str, Any]) -> str | None:
    """A note on the masks that the estimate of a job leaves out; None where a trainer makes no other masks. ``fields``:
    of the job and the strategy, by name."""
    model = lookup.model(fields["model"])
    if not model.trained_with(trainer, "masks-one-sample") or fields["batch_size"] > 1:
        return None
    shape = {name: fields[name] for name in ("model", "height", "width", "batch_size")}
    atoms = grid(model, Job.read({**shape, "frames": 1}))
    pairs = atoms["B"] * (atoms["H"] * atoms["W"] + atoms["T"]) ** 2
    blocks = model.blocks if fields["gradient_checkpointing"] == "none" else 1
    return f"it pads and masks the prompt of one sample too: not estimated, {blocks * pairs * HALF / GIB:.2f} GiB"
