"""Allocates a model that was built on ``meta``: each weight on the GPU, in host RAM, or as this rank's share.

`place` is for random weights (probes); `trainers.step.weights` loads those of files with `materialise`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from planner.catalog.profiles import ModelProfile
from planner.spec.job import Strategy
from trainers.memory import quantise, swap

Fill = Callable[[str, torch.Tensor], None]
"""Gives a weight, by its full name and just allocated, its values."""


def place(
    model: nn.Module, profile: ModelProfile, strategy: Strategy, device: torch.device, fill: Fill | None = None
) -> None:
    """Materialises a model on ``device``. The blocks that are swapped and the shares that FSDP2 offloads stay in host
    RAM."""
    swapped = swap.swapped_blocks(model, profile, strategy)
    materialise(model, device, fill, swap.on_host(swapped) | offloaded_shares(model, strategy))
    if swapped:
        swap.BlockSwap([block for _, block in swapped], device)


def offloaded_shares(model: nn.Module, strategy: Strategy) -> frozenset[str]:
    """The names of the parameters that FSDP2 splits and keeps in host RAM: all, or none."""
    if strategy.sharding != "fsdp" or strategy.offload_params != "cpu":
        return frozenset()
    return frozenset(name for name, _ in model.named_parameters())


def materialise(
    model: nn.Module, device: torch.device | str, fill: Fill | None = None, on_host: Collection[str] = ()
) -> None:
    """Allocates parameters that are still on ``meta`` on ``device``, module by module, and copies the buffers there.

    Those named in ``on_host`` are allocated in host RAM instead. A quantised base is quantised on the device, one
    half-precision weight after another, and moved to host RAM afterwards if it waits there; so are the shares of FSDP2.
    Tied parameters stay tied.
    """
    allocated: dict[nn.Parameter, nn.Parameter] = {}  # meta parameter -> its allocation: a tied one is met again
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter in allocated:
                module._parameters[name] = allocated[parameter]
            elif parameter is not None and parameter.is_meta:
                full_name = f"{prefix}.{name}" if prefix else name
                waits, packed, splits = full_name in on_host, quantise.is_packed(parameter), _is_split(parameter)
                where = "cpu" if waits and not packed and not splits else device
                weight = torch.empty(parameter.shape, dtype=parameter.dtype, device=where)
                if fill is not None:
                    fill(full_name, weight)
                if splits:
                    module._parameters[name] = _share_of(weight, parameter, waits)
                else:
                    quantise.store(module, name, weight)
                if waits and packed:
                    quantise.to_host(module._parameters[name])
                allocated[parameter] = module._parameters[name]
                del weight  # or the half-precision one would still be there beside the next
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_cpu:  # FSDP2 has moved them to the GPU: not a second time
                module._buffers[name] = buffer.to(device, copy=True)


def _is_split(parameter: nn.Parameter) -> bool:
    """Whether FSDP2 splits the parameter. It is a DTensor then; the class is not imported, to save that for those who
    do not need it."""
    return hasattr(parameter, "device_mesh")


def _share_of(weight: torch.Tensor, parameter: Any, waits: bool) -> nn.Parameter:
    """This rank's part of a whole weight, cut as FSDP2 cut the parameter on meta; in host RAM if it waits there."""
    from torch.distributed.tensor import DTensor

    mesh, place = parameter.device_mesh, parameter.placements
    part = part_of(weight, parameter).clone()
    share = DTensor.from_local(part, mesh, place, run_check=False, shape=parameter.shape, stride=parameter.stride())
    return nn.Parameter(share.cpu() if waits else share, requires_grad=parameter.requires_grad)


def part_of(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """This rank's rows of a whole tensor, split like ``like``, a DTensor that FSDP2 made: by rows over the last
    dimension of its mesh."""
    mesh, last = like.device_mesh, like.device_mesh.ndim - 1
    parts, rank = whole.chunk(mesh.size(last)), mesh.get_local_rank(last)
    return parts[rank] if rank < len(parts) else whole[:0]  # there are fewer parts where there are fewer rows
