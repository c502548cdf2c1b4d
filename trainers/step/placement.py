"""Allocates a model that was built on ``meta``: each weight on the GPU, in host RAM, or as this rank's shard.

Probes call `place` for random weights; `trainers.step.weights` calls `materialise` to load weights from files.
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
"""Fills a newly allocated weight, given its full name."""

SPLITTER = "_splitter"
"""Attribute of a parameter on ``meta``: a function that splits its filled allocation over the ranks, in place."""


def place(
    model: nn.Module, profile: ModelProfile, strategy: Strategy, device: torch.device, fill: Fill | None = None
) -> None:
    """Materialises a model on ``device``. Swapped blocks and the shards that FSDP2 offloads stay in host RAM."""
    shares, moving = offloaded_shares(model, strategy), swap.blocks_to_host(model, profile, strategy, device)
    if moving is None:
        materialise(model, device, fill, shares)
    else:
        materialise(model, device, moving.filling(fill), moving.names | shares)
        swap.BlockSwap(moving, device)


def offloaded_shares(model: nn.Module, strategy: Strategy) -> frozenset[str]:
    """The names of the parameters that FSDP2 shards and keeps in host RAM: all or none."""
    if strategy.sharding != "fsdp" or strategy.offload_params != "cpu":
        return frozenset()
    return frozenset(name for name, _ in model.named_parameters())


def materialise(
    model: nn.Module, device: torch.device | str, fill: Fill | None = None, on_host: Collection[str] = ()
) -> None:
    """Allocates parameters that are still on ``meta`` on ``device``, module by module, and copies the buffers there.

    Parameters named in ``on_host`` end up in host RAM. Quantised weights and FSDP2's shards are made on the device, one
    half-precision weight at a time, and moved to host RAM afterwards. What has a `SPLITTER` is split as soon as it is
    filled, so a GPU never holds two whole parameters. Tied parameters stay tied.
    """
    allocated: dict[nn.Parameter, nn.Parameter] = {}  # meta parameter -> its allocation; tied ones occur again
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
                if splitter := getattr(parameter, SPLITTER, None):
                    splitter(module._parameters[name])
                if waits and packed:
                    quantise.to_host(module._parameters[name])
                allocated[parameter] = module._parameters[name]
                del weight  # otherwise the half-precision weight would live on while the next one is allocated
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_cpu:  # FSDP2 has already moved its buffers to the GPU
                module._buffers[name] = buffer.to(device, copy=True)


def split_when_filled(model: nn.Module, splitter: Callable[[nn.Parameter], None], dtype: torch.dtype) -> None:
    """Lets `materialise` split the parameters of a model on ``meta`` one by one, each allocated in ``dtype``."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
        setattr(parameter, SPLITTER, splitter)


def _is_split(parameter: nn.Parameter) -> bool:
    """Whether FSDP2 shards the parameter, which is a DTensor then. Recognised by an attribute, because importing the
    class is slow and few runs need it."""
    return hasattr(parameter, "device_mesh")


def _share_of(weight: torch.Tensor, parameter: Any, waits: bool) -> nn.Parameter:
    """This rank's shard of a whole weight, split as FSDP2 split the parameter on meta; in host RAM if ``waits``."""
    from torch.distributed.tensor import DTensor

    mesh, place = parameter.device_mesh, parameter.placements
    part = part_of(weight, parameter).clone()
    share = DTensor.from_local(part, mesh, place, run_check=False, shape=parameter.shape, stride=parameter.stride())
    return nn.Parameter(share.cpu() if waits else share, requires_grad=parameter.requires_grad)


def part_of(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """This rank's rows of a whole tensor, split as ``like`` is, a DTensor made by FSDP2: by rows, over the last
    dimension of its mesh."""
    mesh, last = like.device_mesh, like.device_mesh.ndim - 1
    parts, rank = whole.chunk(mesh.size(last)), mesh.get_local_rank(last)
    return parts[rank] if rank < len(parts) else whole[:0]  # a tensor with fewer rows than ranks has fewer parts
