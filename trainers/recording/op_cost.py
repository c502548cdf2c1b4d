"""The work of one operator: FLOPs by torch's own counters, and the bytes of the tensors that it reads and writes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry


class OpCost(NamedTuple):
    """The work of one operator. ``kind``: matmul, attention, convolution or pointwise; ``dtype``: of its arithmetic."""

    kind: str
    dtype: str
    flops: int
    nbytes: tuple[int, ...]


IDLE = frozenset({"_unsafe_view", "empty", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias"})
"""Operators that do no work. ``empty_like`` is not among them: in FusedRmsNorm it stands for the kernel's output."""


HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def cost_of(func: Any, args: Any, kwargs: Any, out: Any, inputs: list[Tensor], outputs: list[Tensor]) -> OpCost | None:
    """The work of one call, or None for views and for operators that only take memory."""
    if not outputs or func.is_view or func.overloadpacket.__name__ in IDLE:
        return None
    name = func.overloadpacket.__name__
    if name == "constant_pad_nd":  # the padded size would hide the shape's atoms; it writes about what it reads
        outputs = inputs
    elif "efficient_attention" in name:  # without the logsumexp, whose rows are rounded up, and which is small
        inputs, outputs = ([tensor for tensor in side if tensor.ndim == 4] for side in (inputs, outputs))
    nbytes = tuple(tensor.numel() * tensor.element_size() for tensor in [*inputs, *outputs])
    if name == "gemm_4bit":  # the weight is dequantised (written, then read) and multiplied
        rows, columns = args[2]
        copy = 2 * rows * columns * args[0].element_size()
        return OpCost("matmul", HALVES.get(args[0].dtype, "fp32"), 2 * args[0].numel() * rows, (*nbytes, copy))
    counter = flop_registry.get(func.overloadpacket)
    if counter is None:
        return OpCost("pointwise", "fp32", 0, nbytes)
    flops = int(counter(*args, **kwargs, out_val=out))
    return OpCost(_kind(name), HALVES.get(outputs[0].dtype, "fp32"), flops, nbytes)


def _kind(name: str) -> str:
    if "attention" in name:
        return "attention"
    return "convolution" if "conv" in name else "matmul"
