"""Text encoders that are larger than the card: each layer comes from host RAM for its turn, as the estimate has it."""

from __future__ import annotations

import torch
from accelerate.hooks import attach_align_device_hook_on_blocks
from torch import nn

from planner.layout.phases import BESIDE_WHOLE_BYTES

LAYERS = (("block", "num_layers"), ("layers", "num_hidden_layers"), ("layers", "encoder_layers"))
"""Module lists of an encoder's layers (end of the name), and the config key of their number."""


def room_bytes(device: torch.device) -> int | None:
    """Bytes that this process may still allocate on a card: what is free, and at most its own cap; None without a
    card."""
    if device.type != "cuda":
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    # A probe for a smaller card caps its process (trainers.measuring.measure.limit); NVML and CUDA still report the
    # whole card.
    share_bytes = torch.cuda.get_per_process_memory_fraction(device) * total_bytes
    return min(free_bytes, int(share_bytes) - torch.cuda.memory_reserved(device))


def is_too_large(model: nn.Module, room: int | None) -> bool:
    """Whether a text encoder that is not on the card yet has no place there whole, and has layers to bring one by one.

    ``room``: bytes, see `room_bytes`.
    """
    nbytes = sum(tensor.nbytes for tensor in _tensors(model))
    return room is not None and nbytes + BESIDE_WHOLE_BYTES > room and bool(layers_of(model))


def layers_of(model: nn.Module) -> list[str]:
    """The module list of an encoder's layers: of one that sees too, those of the language model. None of diffusers'."""
    ends = tuple(end for end, _ in LAYERS)
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    names = [name for name in lists if name.rpartition(".")[2] in ends]
    language = [name for name in names if "language_model" in name]
    return (language or names)[:1]


def bring_layers(model: nn.Module, device: torch.device) -> nn.Module:
    """Hooks a text encoder on the CPU so that each layer is copied to the device for its forward and dropped after it;
    everything else is moved to the device. Returns the model."""
    layers = [
        f"{name}.{index}" for name in layers_of(model) for index, _ in enumerate(model.get_submodule(name).children())
    ]
    waiting = tuple(f"{layer}." for layer in layers)
    weights = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(waiting)}
    inside = {tensor for layer in layers for tensor in _tensors(model.get_submodule(layer))}
    with torch.no_grad():
        for tensor in _tensors(model) - inside:
            tensor.data = tensor.data.to(device)
    # accelerate's hooks copy a layer's weights to the device before its forward, and drop them behind it.
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
