"""The mean squared error of a batch with a weight for each sample, in as much memory as torch's unweighted one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

MEAN = 1
"""torch's enum value of ``reduction="mean"`` (ATen/core/Reduction.h)."""


class _Weighted(torch.autograd.Function):
    """Applies the weights after the reduction: torch's error with ``reduction="none"`` would keep one more tensor as
    large as the latents, and recordings have the unweighted error."""

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
    """The mean of the squared errors of a batch's samples, each times its weight. ``prediction``, ``target``: (B, ...)
    in fp32; ``weights``: (B,), or None if all are 1."""
    if weights is None:
        return _in_own_memory(functional.mse_loss(prediction, target))
    loss: Tensor = _Weighted.apply(prediction, target, weights)  # type: ignore[no-untyped-call]  # torch's
    return loss


def _in_own_memory(loss: Tensor) -> Tensor:
    """Shrinks the storage of a loss to its single number. torch allocates the output of ``mse_loss`` with the size of
    the prediction and then resizes it to a scalar (ATen/native/Loss.cpp, the meta function of ``mse_loss``), so that
    memory would be held as long as the loss: through backward, the optimizer step and for each micro-batch."""
    storage = loss.untyped_storage()
    if storage.nbytes() > loss.nbytes:
        storage.resize_(loss.nbytes)
    return loss
