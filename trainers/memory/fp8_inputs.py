"""Checkpoints in 8 bits: the input of a checkpointed block is kept as float8 until its backward, which recomputes the
block from numbers rounded to three mantissa bits (similar to COAT, arXiv 2410.19313, which keeps activations in FP8
with a scale for each tensor or group).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trainers.memory.block_inputs import BlockInputs

FP8 = torch.float8_e4m3fn

SPREAD = 2.0**8
"""The value that the largest number of a token is scaled to: a power of two, so that scaling is exact, and the largest
one below the format's maximum, 448."""


class _Rounded(NamedTuple):
    """An input in 8 bits."""

    values: Tensor
    """scaled so that the largest number of each token is `SPREAD`"""

    largest: Tensor
    """[..., 1]: the largest number of each token before scaling. Per token, because a few tokens have far larger
    numbers than the rest (Massive Activations in Large Language Models, arXiv 2402.17762)"""


class InputsInFp8(BlockInputs):
    """Keeps inputs in float8_e4m3fn, which halves 16-bit inputs."""

    def pack(self, call: int, tensor: Tensor) -> Tensor | _Rounded:
        """Rounds tensors that require gradients; masks and tables stay as they are. The full-precision tensor is freed
        after its block unless something else holds it."""
        del call
        if not tensor.requires_grad:
            return tensor
        tensor = tensor.detach()
        # A norm, because `abs` would make a second tensor. The clamp keeps tokens of zeros from being divided by zero.
        with torch.autocast(tensor.device.type, enabled=False):  # autocast would compute the norm in fp32
            largest = torch.linalg.vector_norm(tensor, torch.inf, dim=-1, keepdim=True)
        largest.clamp_(min=torch.finfo(tensor.dtype).tiny)
        return _Rounded((tensor / largest).mul_(SPREAD).to(FP8), largest)

    def unpack(self, packed: Tensor | _Rounded) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        return packed.values.to(packed.largest.dtype).div_(SPREAD).mul_(packed.largest)
