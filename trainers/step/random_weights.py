"""Random weights, for runs that measure memory and speed: neither depends on what the numbers are."""

from __future__ import annotations

import torch

from planner.layout.optimizer.zero_starts import ZERO_MATRIX

SPREAD = 0.02
"""Standard deviation: small enough for every published architecture to keep its loss finite."""

FP8_BITS = 0b1000_1111
"""Of an e4m3 number: its sign, the lowest bit of its exponent and its mantissa, which spell numbers up to 0.03."""


PATTERN = (1 << 20) + 7
"""Numbers that are drawn for a weight in host RAM and then repeated: a CPU draws 16-bit numbers one by one, minutes for
a model of 20B. No power of two, so that rows of a matrix differ."""


@torch.no_grad()
def randomise(name: str, weight: torch.Tensor) -> None:
    """Fills a weight in place: vectors like fresh norms and biases, second matrices of adapters like fresh ones, the
    rest with small noise. Prodigy keeps a copy of what does not begin at zero."""
    if ZERO_MATRIX.search(name):
        weight.zero_()
    elif weight.ndim <= 1:
        weight.fill_(0.0 if name.endswith("bias") else 1.0)
    elif weight.dtype == torch.float8_e4m3fn:  # has no random numbers of its own, and files fill it without a copy
        weight.view(torch.uint8).random_(0, 256).bitwise_and_(FP8_BITS)
    elif weight.device.type == "cpu" and weight.numel() > PATTERN and weight.is_contiguous():
        drawn = torch.empty(PATTERN, dtype=weight.dtype).normal_(0.0, SPREAD)
        for part in weight.view(-1).split(PATTERN):
            part.copy_(drawn[: part.numel()])
    else:
        weight.normal_(0.0, SPREAD)
