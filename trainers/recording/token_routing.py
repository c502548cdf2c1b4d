"""Replaces the parts of diffusers' HiDream that depend on the values of tensors while a recording runs.

Its router decides which rows each expert takes, so a fake tensor does not know how many there are. Two of four experts
work on each token, so together they always have twice the number of tokens. The recorded distribution is the one that
takes most memory: all tokens for each of the first two experts, none for the others. What is kept for backward is the
same for any distribution, and backward's peak is largest with this one (docs/your-own-model.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


@contextlib.contextmanager
def by_row_numbers() -> Iterator[None]:
    """A context in which experts take rows by index instead of by masks and counts, and in which latents that are not
    square are cut into cells as square ones are: recordings use unequal sides to tell rows from columns."""
    from diffusers.models.transformers import transformer_hidream_image as hidream

    layer, model = hidream.MOEFeedForwardSwiGLU, hidream.HiDreamImageTransformer2DModel
    replaced = (
        (layer, "forward", _forward),
        (model, "patchify", _cells),
        (model, "unpatchify", _image),
    )
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _rows(layer: Any, chosen: Tensor) -> Iterator[tuple[Any, Tensor]]:
    """Each expert with the indices of its rows. ``chosen``: the experts of each token."""
    for number, expert in enumerate(layer.experts):
        yield expert, chosen.new_empty(chosen.shape[0] if number < layer.num_activated_experts else 0)


def _forward(layer: Any, states: Tensor) -> Tensor:
    """MOEFeedForwardSwiGLU.forward: with gradients in training, without them (`moe_infer`) in sampling."""
    chosen, weights, _ = layer.gate(states)
    tokens = states.view(-1, states.shape[-1])
    if layer.training and not layer._force_inference_output:
        repeated = tokens.repeat_interleave(layer.num_activated_experts, dim=0)
        out = torch.empty_like(repeated)
        for expert, rows in _rows(layer, chosen):
            out[rows] = expert(repeated[rows]).to(dtype=states.dtype)
        mixed = (out.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)
        mixed = mixed.view(*states.shape).to(dtype=states.dtype)
    else:
        mixed = _without_gradients(layer, tokens, chosen, weights).view(*states.shape)
    out_of_all: Tensor = mixed + layer.shared_experts(states)
    return out_of_all


@torch.no_grad()
def _without_gradients(layer: Any, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """MOEFeedForwardSwiGLU.moe_infer: experts without rows are left out."""
    kept = torch.zeros_like(tokens)
    order = chosen.view(-1).argsort()
    positions = order // layer.num_activated_experts
    flat = weights.view(-1, 1)
    for expert, rows in _rows(layer, chosen):
        if not rows.shape[0]:
            continue
        taken, weighed = positions[: rows.shape[0]], order[: rows.shape[0]]
        out = expert(tokens[taken])
        out.mul_(flat[weighed])
        kept = kept.to(out.dtype)
        kept.scatter_reduce_(0, taken.view(-1, 1).repeat(1, tokens.shape[-1]), out, reduce="sum")
    return kept


def _cells(model: Any, latents: Tensor) -> tuple[Tensor, None, Tensor, Tensor]:
    """HiDreamImageTransformer2DModel.patchify, with the path of square latents for all: (cells, no mask, sizes,
    positions)."""
    size, channels, height, width = latents.shape
    patch, device = model.config.patch_size, latents.device
    rows, columns = height // patch, width // patch
    sizes = torch.tensor([rows, columns], dtype=torch.int64, device=device).reshape(-1).unsqueeze(0).repeat(size, 1)
    positions = torch.zeros(rows, columns, 3, device=device)
    positions[..., 1] = positions[..., 1] + torch.arange(rows, device=device)[:, None]
    positions[..., 2] = positions[..., 2] + torch.arange(columns, device=device)[None, :]
    positions = positions.reshape(rows * columns, -1).unsqueeze(0).repeat(size, 1, 1)
    cut = latents.reshape(size, channels, rows, patch, columns, patch).permute(0, 2, 4, 3, 5, 1)
    cells = cut.reshape(size, rows * columns, patch * patch * channels)
    model.recorded_rows = rows
    return cells, None, sizes, positions


def _image(model: Any, cells: Tensor, sizes: Tensor, is_training: bool) -> Tensor:
    """HiDreamImageTransformer2DModel.unpatchify, which in sampling would read the sizes of each sample from
    ``sizes``."""
    size, count, numbers = cells.shape
    patch = model.config.patch_size
    channels = numbers // patch**2
    if is_training and not model.config.force_inference_output:
        cut = cells.reshape(size, count, patch, patch, channels).permute(0, 4, 1, 2, 3)
        return cut.reshape(size, channels, count, patch**2)
    rows = model.recorded_rows
    cut = cells.reshape(size, rows, count // rows, patch, patch, channels).permute(0, 5, 1, 3, 2, 4)
    return torch.cat([cut.reshape(size, channels, rows * patch, -1)], dim=0)
