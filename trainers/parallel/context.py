"""Context parallelism: ranks share a sample, each with some of its tokens, as diffusers splits them (Ulysses).

Every rank of a group gets the same sample and noise and computes the loss over all of it: diffusers gathers the
model's output, and backward gives each rank the gradient of its own tokens (hooks/context_parallel.py,
``AllGatherFunction.backward`` is a slice). So each rank has its tokens' share of a weight's gradient, and the shares of
a group are added up. Engines that average over all ranks would also divide by the group's size, so the loss is
multiplied by it.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from planner.spec.job import Strategy


def split_tokens(model: nn.Module, strategy: Strategy, device: torch.device) -> None:
    """Sets a model up for context parallelism: groups of neighbouring ranks share each sample's tokens. All ranks call
    it together."""
    parts = strategy.context_parallel
    if parts == 1:
        return
    from diffusers import ContextParallelConfig

    groups = dist.get_world_size() // parts
    mesh = init_device_mesh(device.type, (groups, 1, parts), mesh_dim_names=("data", "ring", "ulysses"))
    with _with_device_count(device):
        model.enable_parallelism(  # type: ignore[operator]  # diffusers' own method
            config=ContextParallelConfig(ulysses_degree=parts, mesh=mesh)
        )


def _with_device_count(device: torch.device) -> Any:
    """A context in which torch counts one accelerator on the CPU instead of none: diffusers divides by the count."""
    count = torch.accelerator.device_count() if device.type != "cpu" else 1
    return mock.patch.object(torch.accelerator, "device_count", lambda: count)


def add_up(parameters: list[nn.Parameter]) -> None:
    """Sums the gradients of these parameters over all ranks, in place, if no engine does it."""
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
