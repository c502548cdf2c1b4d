"""Text encoders too large for the GPU: each layer is copied from host RAM when it runs, as the estimate assumes."""

from __future__ import annotations

import torch
from accelerate.hooks import attach_align_device_hook_on_blocks
from torch import nn

from planner.layout.phases import BESIDE_WHOLE_BYTES

LAYERS = (("block", "num_layers"), ("layers", "num_hidden_layers"), ("layers", "encoder_layers"))
"""Module lists of an encoder's layers (last part of the name), and the config key for the number of layers."""


def room_bytes(device: torch.device) -> int | None:
    """Bytes that this process may still allocate on a GPU: what is free, up to the process's own cap; None on the
    CPU."""
    if device.type != "cuda":
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    # A probe for a smaller GPU caps its process (trainers.measuring.measure.limit); NVML and CUDA still report the
    # whole GPU.
    share_bytes = torch.cuda.get_per_process_memory_fraction(device) * total_bytes
    return min(free_bytes, int(share_bytes) - torch.cuda.memory_reserved(device))


def is_too_large(model: nn.Module, room: int | None) -> bool:
    """Whether a text encoder that is not on the GPU yet does not fit there whole, and has layers to copy one by one.

    ``room``: bytes, see `room_bytes`.
    """
    nbytes = sum(tensor.nbytes for tensor in _tensors(model))
    return room is not None and nbytes + BESIDE_WHOLE_BYTES > room and bool(layers_of(model))


def layers_of(model: nn.Module) -> list[str]:
    """The name of the module list of an encoder's layers; in a vision-language model, the language model's. Empty for
    diffusers' models."""
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
    # accelerate's hooks copy a layer's weights to the device before its forward, and drop them after it.
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
