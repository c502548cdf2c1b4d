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
        return _in_own_memory(functional.mse_loss(prediction, target))
    loss: Tensor = _Weighted.apply(prediction, target, weights)  # type: ignore[no-untyped-call]  # torch's
    return loss


def _in_own_memory(loss: Tensor) -> Tensor:
    """The mean of an error, without the memory of the errors. torch allocates the output of ``mse_loss`` for as many
    numbers as the prediction has, and then calls it a scalar (ATen/native/Loss.cpp, the meta function of ``mse_loss``):
    as long as the loss is kept, through backward, the optimizer's step and for each micro-batch, so is that."""
    storage = loss.untyped_storage()
    if storage.nbytes() > loss.nbytes:
        storage.resize_(loss.nbytes)
    return loss
