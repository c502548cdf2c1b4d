"""Frozen encoders in 8 and 4 bits: matrices and embedding tables are kept packed, and unpacked only while in use.

* ``fp8``: float8 e4m3, one scale per row.
* ``int8``: one scale per row (as torchao's weight-only int8).
* ``nf4``: bitsandbytes' 4 bits with one scale per 64 weights.

The libraries' own layers do not suit encoders: T5 casts activations to the dtype of its last matrix, which breaks fp8
and 4 bits there, and embedding tables, a fifth of UMT5-XXL, would stay unpacked. Gradients are not supported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.errors import VplanError

FORMATS = ("fp8", "int8", "nf4")
SMALLEST = 4096
"""Weights with fewer elements stay as they are (bitsandbytes' rule), such as T5's relative position bias."""
BLOCK = 64

Layer = nn.Linear | nn.Embedding
"""Module types whose weight is packed."""


def shrink(model: nn.Module, how: str, device: torch.device) -> nn.Module:
    """Packs a half-precision model, matrix by matrix, on the device, and moves the rest there.

    At most one matrix is on the device in both forms.
    """
    if how not in FORMATS:
        fault = f"text_encoder_dtype {how} cannot be built: there is no portable 4-bit integer format"
        raise VplanError(fault, "use --text-encoder-dtype nf4, which takes the same 4 bits")
    packed: dict[Tensor, Packed] = {}  # an embedding table may be in two places
    for parent, name, module in list(_large(model)):
        if module.weight not in packed:
            packed[module.weight] = Packed(module, how, device)
        setattr(parent, name, packed[module.weight])
    return model.to(device)


def _large(model: nn.Module) -> Iterator[tuple[nn.Module, str, Layer]]:
    """(parent, name in it, module) of every linear layer and embedding worth packing."""
    for parent in model.modules():
        for name, module in parent.named_children():
            if isinstance(module, Layer) and module.weight.numel() >= SMALLEST:
                yield parent, name, module


class Packed(nn.Module):
    """A linear layer or embedding whose weight is stored in packed form and unpacked when it runs."""

    weight = None
    """None, so that encoders that look at a layer's weight before they use it leave their activations alone."""

    packed: Tensor
    scale: Tensor

    def __init__(self, module: Layer, how: str, device: torch.device) -> None:
        super().__init__()
        weight = module.weight.data.to(device)
        self.is_table, self.shape, self.dtype = isinstance(module, nn.Embedding), weight.shape, weight.dtype
        pack, self._unpack = KINDS[how]
        for name, tensor in zip(("packed", "scale"), pack(weight), strict=True):
            self.register_buffer(name, tensor)
        self.bias = getattr(module, "bias", None)

    def forward(self, inputs: Tensor) -> Tensor:
        """The output of the original layer. ``inputs``: activations of a linear layer, or token ids of an embedding."""
        if not self.is_table:
            weight = self._unpack(self.packed, self.scale, self.dtype).reshape(self.shape)
            return functional.linear(inputs, weight, self.bias)
        # Only the rows of an embedding that are looked up are unpacked: the whole table would be as large as before.
        rows = inputs.flatten()
        unpacked = self._unpack(_rows(self.packed, rows, self.shape), _rows(self.scale, rows, self.shape), self.dtype)
        return unpacked.reshape(*inputs.shape, self.shape[1])

    def _apply(self, change: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves the packed tensors without casting them: their dtype is a storage format."""
        self.packed, self.scale = (_moved(tensor, change) for tensor in (self.packed, self.scale))
        if self.bias is not None:
            self.bias.data = change(self.bias.data)
        return self


def _moved(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    # `change` may be a cast as well as a move (Module.to, .half): an empty tensor shows which device it would give.
    return tensor.to(change(tensor.new_empty(0, dtype=torch.float32)).device)


def _rows(tensor: Tensor, rows: Tensor, shape: torch.Size) -> Tensor:
    """The entries of some rows of a table, in a tensor that has equally many entries for each row."""
    return tensor.reshape(shape[0], -1)[rows]


def _pack_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = _largest(weight) / torch.finfo(torch.float8_e4m3fn).max
    return (weight.float() / scale).to(torch.float8_e4m3fn), scale


def _pack_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = _largest(weight) / 127
    return (weight.float() / scale).round().to(torch.int8), scale


def _largest(weight: Tensor) -> Tensor:
    """The largest magnitude in each row (rows, 1), clamped to be above zero."""
    return weight.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-12)


def _unpack_rows(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (packed.to(torch.float32) * scale).to(dtype)


def _pack_nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    from bitsandbytes.functional import quantize_4bit

    if weight.shape[1] % BLOCK:
        raise VplanError(f"a matrix of {weight.shape[1]} columns cannot be packed as nf4", "use int8")
    packed, state = quantize_4bit(weight.contiguous(), blocksize=BLOCK, compress_statistics=False, quant_type="nf4")
    return packed, state.absmax


def _unpack_nf4(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    from bitsandbytes.functional import QuantState, dequantize_4bit, get_4bit_type

    shape = torch.Size((2 * packed.numel(),))
    code = get_4bit_type("nf4", device=packed.device, blocksize=BLOCK)
    state = QuantState(scale.flatten(), shape, code, BLOCK, "nf4", dtype)
    unpacked: Tensor = dequantize_4bit(packed.reshape(-1, 1), state)
    return unpacked


KINDS = {
    "fp8": (_pack_fp8, _unpack_rows),
    "int8": (_pack_int8, _unpack_rows),
    "nf4": (_pack_nf4, _unpack_nf4),
}
"""Functions that pack a weight, as (packed, scales), and unpack it, by format."""
