"""The mean squared error of a batch, with a weight for each sample, in the memory that torch's own takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

MEAN = 1
"""torch's number for ``reduction="mean"`` (ATen/core/Reduction.h)."""


class _Weighted(torch.autograd.Function):
    """Weights after the reduction: torch's own error with ``reduction="none"`` keeps one more tensor as large as the
    latents, and recordings are of the unweighted error."""

    @staticmethod
    def forward(ctx: Any, prediction: Tensor, target: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(prediction, target, weights)
        errors = [functional.mse_loss(one, other) for one, other in zip(prediction, target, strict=True)]
        return (torch.stack(errors) * weights).mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        prediction, target, weights = ctx.saved_tensors
        gradient = torch.ops.aten.mse_loss_backward(gradients[0], prediction, target, MEAN)
        return gradient.mul_(weights.view(-1, *[1] * (prediction.ndim - 1))), None, None


def squared_error(prediction: Tensor, target: Tensor, weights: Tensor | None) -> Tensor:
    """The mean over a batch of its samples' squared errors, each times its weight. ``prediction``, ``target``:
    (B, ...) in fp32; ``weights``: (B,), or None where all are 1."""
    if weights is None:
        return functional.mse_loss(prediction, target)
    loss: Tensor = _Weighted.apply(prediction, target, weights)  # type: ignore[no-untyped-call]  # torch's
    return loss
