"""Text encoders that are larger than the card: each layer comes from host RAM for its turn, as the estimate has it."""

from __future__ import annotations

import torch
from accelerate.hooks import attach_align_device_hook_on_blocks
from torch import nn

from planner.units import GIB

BESIDE_BYTES = 2 * GIB
"""Room for a prompt's activations: what text encoders take beside their weights is at most 1.7 GiB (LTX-2's Gemma)."""


def is_too_large(model: nn.Module, room_bytes: int | None) -> bool:
    """Whether a model on the CPU has no place whole in so much device memory; None: there is no end to it."""
    nbytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    return room_bytes is not None and nbytes + BESIDE_BYTES > room_bytes


def bring_layers(model: nn.Module, lists: list[str], device: torch.device) -> nn.Module:
    """Has the layers of these module lists (names) come and go with their forward; all else goes to the device."""
    layers = [f"{name}.{index}" for name in lists for index in range(len(model.get_submodule(name)))]  # type: ignore[arg-type]
    weights = model.state_dict()
    inside = {tensor for layer in layers for tensor in _tensors(model.get_submodule(layer))}
    with torch.no_grad():
        for tensor in _tensors(model) - inside:
            tensor.data = tensor.data.to(device)
    attach_align_device_hook_on_blocks(
        model,
        execution_device={"": device, **dict.fromkeys(layers, device)},
        offload=dict.fromkeys(layers, True),
        weights_map=weights,
        offload_buffers=True,
    )
    return model


def _tensors(model: nn.Module) -> set[torch.Tensor]:
    return {*model.parameters(), *model.buffers()}
