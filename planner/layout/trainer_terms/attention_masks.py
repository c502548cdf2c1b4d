"""Masks over all pairs of tokens that other trainers' code makes where the recorded model makes none, or smaller ones:
they are not priced, and a note says what they take."""

from __future__ import annotations

from typing import Any

from planner.catalog import lookup
from planner.catalog.shapes import grid
from planner.spec.job import Job
from planner.units import GIB

MADE, RUNNING = 8, 3
"""Bytes per pair and head of a mask for every head. As it is made: repeated in fp32, then int32 beside it
(``.repeat(...).int().bool()`` in ai-toolkit's chroma/src/model.py and diffusion-pipe's models/chroma.py). While a block
runs: the boolean mask, and the one of numbers that attention makes of it."""

HALF = 2
"""Bytes per pair of a mask of numbers, which each block makes anew (diffusers' transformer_chroma.py)."""


def unpriced_masks_note(trainer: str, fields: dict[str, Any]) -> str | None:
    """A note on the masks that the estimate of a job leaves out; None where a trainer makes no other masks. ``fields``:
    of the job and the strategy, by name."""
    model = lookup.model(fields["model"])
    by_head, one_sample = (model.trained_with(trainer, trait) for trait in ("masks-by-head", "masks-one-sample"))
    if not by_head and not (one_sample and fields["batch_size"] == 1):
        return None
    shape = {name: fields[name] for name in ("model", "height", "width", "batch_size")}
    atoms = grid(model, Job.read({**shape, "frames": 1}))
    pairs = atoms["B"] * (atoms["H"] * atoms["W"] + atoms["T"]) ** 2
    if by_head:
        heads = model.config["num_attention_heads"]
        made, running = (pairs * heads * nbytes / GIB for nbytes in (MADE, RUNNING))
        what = f"{made:.2f} GiB for a moment before the first block, {running:.2f} while blocks run"
        return f"its own code of {model.title} masks all pairs of tokens for every head: not estimated, {what}"
    blocks = model.blocks if fields["gradient_checkpointing"] == "none" else 1
    return f"it pads and masks the prompt of one sample too: not estimated, {blocks * pairs * HALF / GIB:.2f} GiB"
