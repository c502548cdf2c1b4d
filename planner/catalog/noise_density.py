"""How training spreads over noise levels: how much of a density lies below a level, and the shift of a size.

A level is a sigma, 0 the clean clip and 1 noise alone. `trainers.families.common.noise_levels` draws from the same
densities.
"""

from __future__ import annotations

import math
from statistics import NormalDist

from planner.catalog.profiles import Training

TOKEN_DENSITIES = frozenset({"shifted_logit_normal", "stretched_logit_normal"})
"""Densities whose mean grows with the tokens of a sample."""

HALVINGS = 60
"""Of an interval, until fp64 has no number inside."""


def shift_of(training: Training, tokens: int) -> float:
    """The shift of the levels of samples with so many tokens. Where it goes by resolution it is e to the power of a
    line through two points (diffusers pipelines/flux/pipeline_flux.py ``calculate_shift``)."""
    if training.training_shift != "resolution":
        return training.training_shift
    least, low, most, high = training.resolution_shift
    return math.exp(low + (high - low) * (tokens - least) / (most - least))


def share_below(training: Training, level: float, shift: float) -> float:
    """How much of a density lies below a noise level, 0 to 1. ``shift``: that of `shift_of`; it is taken back first, as
    the inverse of s x / (1 + (s - 1) x) (arXiv 2403.03206, section 5.3.2)."""
    assert training.timestep_sampling not in TOKEN_DENSITIES, "those are not shifted"
    base = level / (shift - (shift - 1) * level)
    if base <= 0.0 or base >= 1.0 or training.timestep_sampling == "uniform":
        return min(max(base, 0.0), 1.0)
    if training.timestep_sampling == "logit_normal":
        normal = NormalDist(training.logit_mean, training.logit_std)
        return normal.cdf(math.log(base / (1 - base)))
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):  # `mode` has no inverse in closed form, and grows with its share
        middle = (low + high) / 2
        low, high = (middle, high) if _mode(middle, training.mode_scale) < base else (low, middle)
    return (low + high) / 2


def _mode(share: float, scale: float) -> float:
    """The level that a share of the mode density lies below (arXiv 2403.03206, section 3.1, "mode sampling with heavy
    tails", counted from the clean clip)."""
    return share + scale * (math.cos(math.pi * share / 2) ** 2 - 1 + share)
