"""Checkpoints in 8 bits: what a checkpointed block is given is kept as float8 until its backward, where the block is
recomputed from numbers that are rounded to three bits behind the first (COAT, arXiv 2410.19313, keeps activations in
FP8, with a scale for each tensor or group).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trainers.memory.block_inputs import BlockInputs

FP8 = torch.float8_e4m3fn

SPREAD = 2.0**8
"""The largest power of two that the format holds: products with it are exact, and none is beyond the largest, 448."""


class _Rounded(NamedTuple):
    """An input in 8 bits."""

    values: Tensor
    """the largest number of each token is `SPREAD`"""

    largest: Tensor
    """[..., 1]: that number. By token, as a few tokens have far larger numbers than the rest (Massive Activations in
    Large Language Models, arXiv 2402.17762)"""


class InputsInFp8(BlockInputs):
    """Inputs in float8_e4m3fn, half of 16 bits."""

    def pack(self, call: int, tensor: Tensor) -> Tensor | _Rounded:
        """Rounds what blocks compute; masks and tables stay. The tensor itself goes when nobody else holds it, behind
        its block."""
        del call
        if not tensor.requires_grad:
            return tensor
        tensor = tensor.detach()
        # A norm, as `abs` would make a second tensor. Zeros are divided by the smallest normal number.
        with torch.autocast(tensor.device.type, enabled=False):  # which takes norms in fp32
            largest = torch.linalg.vector_norm(tensor, torch.inf, dim=-1, keepdim=True)
        largest.clamp_(min=torch.finfo(tensor.dtype).tiny)
        return _Rounded((tensor / largest).mul_(SPREAD).to(FP8), largest)

    def unpack(self, packed: Tensor | _Rounded) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        return packed.values.to(packed.largest.dtype).div_(SPREAD).mul_(packed.largest)
