"""Which layers of a model a trainer puts its adapters on, in our words."""

from __future__ import annotations

from planner.facts import ModelProfile
from planner.job import QUANTISED

ALL_LINEAR = ("wan", "qwen-image")
"""Families whose wider recorded choice is every linear layer of the blocks but modulation."""


def on_all_linear(profile: ModelProfile, weights_dtype: object) -> tuple[str, ...] | None:
    """`lora_targets` of a trainer that adapts every linear layer of the blocks; None is the model's usual layers.

    Those are taken where the wider choice is not recorded: of other families, and over a quantised base
    (`planner.variants.precisions`).
    """
    wide = profile.lora.wide if profile.family.startswith(ALL_LINEAR) else ()
    return wide if wide and weights_dtype not in QUANTISED else None


def note(profile: ModelProfile, targets: object) -> str | None:
    """What is left out of the price where adapters on more layers are priced on the usual ones."""
    if targets is not None:
        return None
    return f"it adapts every linear layer of the blocks, priced on {profile.title}'s usual ones"
