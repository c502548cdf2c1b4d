"""The distributions of noise levels and the loss weights of published trainers, as functions of one uniform number per
sample.

A level is a sigma: 0 is the clean clip, 1 pure noise. Every density is given by its quantile function. So part of the
range (for one expert of two) is sampled by restricting the uniform numbers, which keeps the shape of the density.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from planner.catalog.noise_density import TOKEN_DENSITIES, share_below, shift_of
from planner.catalog.profiles import Training

# Lightricks/LTX-2 packages/ltx-trainer/src/ltx_trainer/timestep_samplers.py: the mean grows with the tokens of a clip.
TOKENS, MEANS = (1024, 4096), (0.95, 2.05)
LOWEST, HIGHEST = -2.5758, 3.0902
"""Quantiles 0.005 and 0.999 of the standard normal distribution, which LTX-2 maps to 0 and 1."""
EPSILON, UNIFORM_SHARE = 1e-3, 0.1

WHOLE = (0.0, 1.0)
STEPS = 1000
"""Number of quantiles over which weights are normalised to a mean of 1: the steps of DiffSynth-Studio's schedule."""


def levels(uniform: Tensor, training: Training, tokens: int, limits: tuple[float, float] = WHOLE) -> Tensor:
    """Sigmas (B,) in fp32 within ``limits``, from uniform fp64 numbers (B,) between 0 and 1. ``tokens``: of a sample.

    ``uniform``, ``logit_normal`` and ``mode`` are then shifted by ``training_shift`` as in schedulers,
    s x / (1 + (s - 1) x) (arXiv 2403.03206, section 5.3.2), which is training on the timesteps of a shifted scheduler.
    """
    kind = training.timestep_sampling
    if kind in TOKEN_DENSITIES:
        assert limits == WHOLE, "no model with experts is trained so"
        mean = _mean(tokens)
        return (_stretched(uniform, mean) if kind.startswith("stretched") else _logit_normal(uniform, mean)).float()
    shift = shift_of(training, tokens)
    # Restricting the quantiles to those inside an expert's limits keeps the density's shape there.
    low, high = _shares(training, shift, limits)
    base = _quantiles(low + uniform * (high - low), training)
    return (shift * base / (1 + (shift - 1) * base)).float()


def weights(sigmas: Tensor, training: Training, tokens: int) -> Tensor | None:
    """The loss weight of each sample at its noise level, (B,) in fp32; None if all are 1.

    ``sigma_sqrt`` and ``cosmap``: diffusers training_utils.py ``compute_loss_weighting_for_sd3`` (arXiv 2403.03206).
    ``bell``: DiffSynth-Studio diffsynth/diffusion/flow_match.py ``set_training_weight``: a Gaussian around the middle
    level, shifted to 0 at pure noise, with a mean of 1 over the levels of the density.
    """
    kind = training.loss_weighting
    if kind == "none":
        return None
    if kind == "bell":
        return ((_bell(sigmas) - _bell(torch.ones(()))) / _mean_bell(training, tokens)).float()
    assert kind in ("sigma_sqrt", "cosmap"), f"{kind} weighs steps of a schedule"
    return (sigmas**-2.0 if kind == "sigma_sqrt" else 2 / (math.pi * (1 - 2 * sigmas + 2 * sigmas**2))).float()


def min_snr(scheduler: Any, timesteps: Tensor, training: Training) -> Tensor | None:
    """The min-SNR loss weight of each sample at its step of a diffusers schedule, (B,) in fp32; None if all are 1.

    It is min(SNR, gamma) / SNR for noise prediction and min(SNR, gamma) / (SNR + 1) for v-prediction (arXiv 2303.09556;
    diffusers examples/text_to_image train_text_to_image_lora.py, ``--snr_gamma``).
    """
    if training.loss_weighting != "min_snr":
        return None
    from diffusers.training_utils import compute_snr

    assert training.snr_gamma is not None
    ratio: Tensor = compute_snr(scheduler, timesteps)
    return ratio.clamp(max=training.snr_gamma) / (ratio + 1 if training.objective == "v" else ratio)


def _bell(sigmas: Tensor) -> Tensor:
    return torch.exp(-2 * (sigmas - 0.5) ** 2)


@functools.cache
def _mean_bell(training: Training, tokens: int) -> float:
    """The mean of the bell above its lowest value over all quantiles of a density, also if one expert trains only part
    of the levels."""
    quantiles = torch.arange(1, STEPS + 1, dtype=torch.float64) / STEPS
    drawn = levels(quantiles.clamp(max=1 - 1e-9), training, tokens).double()
    return float((_bell(drawn) - _bell(torch.ones(()))).mean())


def _quantiles(share: Tensor, training: Training) -> Tensor:
    """The quantile function of a density, without shift: the levels below which these shares of it lie."""
    if training.timestep_sampling == "logit_normal":
        return _logit_normal(share, training.logit_mean, training.logit_std)
    if training.timestep_sampling == "mode":
        return share + training.mode_scale * (torch.cos(math.pi * share / 2) ** 2 - 1 + share)
    return share


def _logit_normal(share: Tensor, mean: float, deviation: float = 1.0) -> Tensor:
    return torch.sigmoid(deviation * torch.special.ndtri(share) + mean)


@functools.cache
def _shares(training: Training, shift: float, limits: tuple[float, float]) -> tuple[float, float]:
    """The share of a density below each limit."""
    low, high = limits
    return share_below(training, low, shift), share_below(training, high, shift)


def _mean(tokens: int) -> float:
    share = (min(tokens, TOKENS[1]) - TOKENS[0]) / (TOKENS[1] - TOKENS[0])
    return MEANS[0] + share * (MEANS[1] - MEANS[0])


def _stretched(uniform: Tensor, mean: float) -> Tensor:
    """One tenth of the levels uniform, the others logit-normal, stretched over the whole range and reflected at its
    lower end."""
    drawn = _logit_normal((uniform - UNIFORM_SHARE) / (1 - UNIFORM_SHARE), mean)
    low, high = (torch.sigmoid(torch.tensor(mean + quantile, dtype=torch.float64)) for quantile in (LOWEST, HIGHEST))
    stretched = (drawn - low) / (high - low)
    stretched = torch.where(stretched >= EPSILON, stretched, 2 * EPSILON - stretched).clamp(0, 1)
    flat = EPSILON + (1 - EPSILON) * uniform / UNIFORM_SHARE
    return torch.where(uniform < UNIFORM_SHARE, flat, stretched)


def limits(training: Training, expert: Any) -> tuple[float, float]:
    """The range of levels that a job trains: all, or those of one expert (``high`` or ``low`` noise)."""
    if training.boundary is None or expert not in ("high", "low"):
        return WHOLE
    return (training.boundary, 1.0) if expert == "high" else (0.0, training.boundary)
