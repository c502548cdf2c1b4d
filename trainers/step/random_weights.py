"""Random weights, for runs that measure memory and speed: neither depends on what the numbers are."""

from __future__ import annotations

import torch

from planner.layout.optimizer.zero_starts import ZERO_MATRIX

SPREAD = 0.02
"""Standard deviation: small enough for every published architecture to keep its loss finite."""

FP8_BITS = 0b1000_1111
"""Mask over an e4m3 number that leaves its sign, the lowest bit of its exponent and its mantissa: numbers up to 0.03
in size."""


PATTERN = (1 << 20) + 7
"""How many numbers are drawn for a weight in host RAM, and then repeated: a CPU draws 16-bit numbers one by one, which
takes minutes for a 20B model. Not a power of two, so that the rows of a matrix differ."""


@torch.no_grad()
def randomise(name: str, weight: torch.Tensor) -> None:
    """Fills a weight in place: norms and biases with ones and zeros, the second matrices of adapters with zeros as
    when freshly initialised (Prodigy keeps a copy of every weight that is not zero at first), the rest with small
    noise."""
    if ZERO_MATRIX.search(name):
        weight.zero_()
    elif weight.ndim <= 1:
        weight.fill_(0.0 if name.endswith("bias") else 1.0)
    elif weight.dtype == torch.float8_e4m3fn:  # torch cannot draw these; in place, as files are read without a copy too
        weight.view(torch.uint8).random_(0, 256).bitwise_and_(FP8_BITS)
    elif weight.device.type == "cpu" and weight.numel() > PATTERN and weight.is_contiguous():
        drawn = torch.empty(PATTERN, dtype=weight.dtype).normal_(0.0, SPREAD)
        for part in weight.view(-1).split(PATTERN):
            part.copy_(drawn[: part.numel()])
    else:
        weight.normal_(0.0, SPREAD)
