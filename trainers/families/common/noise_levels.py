"""Which noise levels training draws: each model's published density, as a function of one uniform number a sample.

A level is a sigma, 0 the clean clip and 1 noise alone. Every density is given by its quantiles, so that a part of the
range (one expert of two) is drawn from by a part of the uniform numbers, with the density's own shape.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from planner.catalog.profiles import Training

# Lightricks/LTX-2 packages/ltx-trainer/src/ltx_trainer/timestep_samplers.py: the mean grows with the tokens of a clip.
TOKENS, MEANS = (1024, 4096), (0.95, 2.05)
LOWEST, HIGHEST = -2.5758, 3.0902
"""Quantiles 0.005 and 0.999 of a normal number, which LTX-2 stretches to 0 and 1."""
EPSILON, UNIFORM_SHARE = 1e-3, 0.1


def levels(uniform: Tensor, training: Training, tokens: int, limits: tuple[float, float] = (0.0, 1.0)) -> Tensor:
    """Sigmas (B,) in fp32 of uniform numbers (B,) in fp64 between 0 and 1, inside ``limits``.

    ``uniform`` and ``logit_normal`` are then shifted by ``training_shift`` as schedulers do it, s x / (1 + (s - 1) x)
    (arXiv 2403.03206, section 5.3.2): training on the timesteps of a shifted scheduler.
    """
    kind, shift = training.timestep_sampling, training.training_shift
    if kind in ("shifted_logit_normal", "stretched_logit_normal"):
        assert limits == (0.0, 1.0), "no model with experts is trained so"
        mean = _mean(tokens)
        return (_stretched(uniform, mean) if kind.startswith("stretched") else _logit_normal(uniform, mean)).float()
    # Drawing from the part of the quantiles that an expert's limits enclose keeps the density's shape within them.
    low, high = _shares(kind, shift, limits)
    share = low + uniform * (high - low)
    base = share if kind == "uniform" else _logit_normal(share, 0.0)
    return (shift * base / (1 + (shift - 1) * base)).float()


def _logit_normal(share: Tensor, mean: float) -> Tensor:
    return torch.sigmoid(torch.special.ndtri(share) + mean)


@functools.cache
def _shares(kind: str, shift: float, limits: tuple[float, float]) -> list[float]:
    """How much of a density lies below each limit."""
    levels = _unshifted(torch.tensor(limits, dtype=torch.float64), shift)
    shares: list[float] = (levels if kind == "uniform" else torch.special.ndtr(torch.logit(levels))).tolist()
    return shares


def _unshifted(level: Tensor, shift: float) -> Tensor:
    return level / (shift - (shift - 1) * level)


def _mean(tokens: int) -> float:
    share = (min(tokens, TOKENS[1]) - TOKENS[0]) / (TOKENS[1] - TOKENS[0])
    return MEANS[0] + share * (MEANS[1] - MEANS[0])


def _stretched(uniform: Tensor, mean: float) -> Tensor:
    """A tenth uniform; the others logit-normal, stretched over the whole range and reflected at its lower end."""
    drawn = _logit_normal((uniform - UNIFORM_SHARE) / (1 - UNIFORM_SHARE), mean)
    low, high = (torch.sigmoid(torch.tensor(mean + quantile, dtype=torch.float64)) for quantile in (LOWEST, HIGHEST))
    stretched = (drawn - low) / (high - low)
    stretched = torch.where(stretched >= EPSILON, stretched, 2 * EPSILON - stretched).clamp(0, 1)
    flat = EPSILON + (1 - EPSILON) * uniform / UNIFORM_SHARE
    return torch.where(uniform < UNIFORM_SHARE, flat, stretched)


def limits(training: Training, expert: Any) -> tuple[float, float]:
    """The levels that a job trains: all, or those of one expert of two (``high`` or ``low`` noise)."""
    if training.boundary is None or expert not in ("high", "low"):
        return 0.0, 1.0
    return (training.boundary, 1.0) if expert == "high" else (0.0, training.boundary)
