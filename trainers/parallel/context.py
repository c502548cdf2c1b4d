"""Context parallelism: ranks that share a sample, each with some of its tokens, as diffusers splits them (Ulysses).

Every rank of a group is given the same sample and noise and computes the loss over all of it: diffusers gathers what
the model gives out, and backward hands each rank the gradient of its own tokens (hooks/context_parallel.py,
``AllGatherFunction.backward`` is a slice). So what a rank has of a weight's gradient is its tokens' share, and the
shares of a group are added up. Engines that average over all ranks would divide by the group as well, so the loss is
that much larger.
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
    """diffusers numbers the accelerators of a machine, of which there is none beside a CPU."""
    count = torch.accelerator.device_count() if device.type != "cpu" else 1
    return mock.patch.object(torch.accelerator, "device_count", lambda: count)


def add_up(parameters: list[nn.Parameter]) -> None:
    """Sums the gradients of these parameters over all ranks, in place, where no engine does it."""
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
