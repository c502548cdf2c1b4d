"""Training on several ranks: the engines for DDP, DeepSpeed's ZeRO and FSDP2, and what a checkpoint saves of them.

An engine is set up after the weights are loaded. `full_tensor` gives a trained weight as it is without the engine;
`kept_weight` and `state` give this rank's parts of the weights and of the optimizer's state, for a checkpoint.
"""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from planner.catalog.profiles import ModelProfile
from planner.errors import VplanError
from planner.layout.sharding.zero import DEEPSPEED
from planner.spec.job import Job, Strategy
from planner.spec.training import MAX_GRAD_NORM, TrainingSettings
from trainers.families import family
from trainers.parallel import context
from trainers.parallel.engines import mesh_of, shard
from trainers.parallel.local_engine import LocalEngine
from trainers.parallel.state_files import Share, share_of
from trainers.parallel.zero import Zero, split_as_loaded
from trainers.step import experts, placement, step
from trainers.step.loss_scaling import LossScaler, loss_scaler
from trainers.step.optimizers import make_optimizer


class Ddp(LocalEngine):
    """DistributedDataParallel: gradients are averaged in the backward of the last micro-batch."""

    averages = True

    def __init__(
        self, trainee: step.Trainee, strategy: Strategy, finds_unused: bool, scaler: LossScaler | None
    ) -> None:
        super().__init__(trainee, scaler)
        device = next(iter(trainee.trainable.values())).device
        frozen = [name for name, weight in trainee.model.named_parameters() if not weight.requires_grad]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(trainee.model, frozen)  # some are swapped
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")  # its successor is not in torch 2.9
        trainee.model = self.wrapped = DistributedDataParallel(
            trainee.model,
            device_ids=[device] if device.type == "cuda" else None,
            broadcast_buffers=False,
            find_unused_parameters=finds_unused,
            gradient_as_bucket_view=strategy.grad_buckets == "view",
            init_sync=False,  # every rank has read the same files; `check_alike` verifies it
        )

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[None]:
        # Under no_sync gradients add up on each rank; the last backward reduces the sums, once a step.
        return contextlib.nullcontext() if last else self.wrapped.no_sync()


class Fsdp(LocalEngine):
    """FSDP2: parameters are DTensors. Every micro-batch reduces its gradients to shards, which add up; the last one
    also reduces them over the copies of the model."""

    replicated = False
    averages = True
    gathers = True
    splits_weights = True

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[None]:
        assert isinstance(self.plain, FSDPModule)
        self.plain.set_requires_all_reduce(last)  # without copies it has no effect
        return contextlib.nullcontext()

    def full_tensor(self, name: str) -> Tensor:
        parameter = self.parameters[name].detach()
        assert isinstance(parameter, DTensor)
        return parameter.full_tensor()

    def release(self) -> None:
        for module in self.plain.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def kept_weight(self, name: str, key: str) -> list[Share]:
        return share_of(key, self.parameters[name].detach(), dist.get_rank())

    def room(self, shape: torch.Size, dtype: torch.dtype, is_split: bool) -> Tensor:
        if not is_split:
            return torch.empty(shape, dtype=dtype)
        first = next(iter(self.trainee.trainable.values()))
        assert isinstance(first, DTensor)
        mesh, whole = first.device_mesh, torch.empty(shape, dtype=dtype, device="meta")
        local = torch.empty_like(placement.part_of(whole, first), device=mesh.device_type)
        share = DTensor.from_local(local, mesh, first.placements, run_check=False, shape=shape, stride=whole.stride())
        return share.cpu()  # `from_local` moves tensors in host RAM to the mesh's device


def split(
    model: nn.Module, profile: ModelProfile, job: Job, strategy: Strategy, device: torch.device,
    drive: Path | None = None,
) -> None:  # fmt: skip
    """Sets up context parallelism, FSDP2 and the split of ZeRO-3, as the strategy says. All ranks call it together, on
    a built model whose weights are not loaded yet: unsplit, they may not fit on one GPU. ``drive``: as for `set_up`."""
    context.split_tokens(model, strategy, device)
    if strategy.sharding == "fsdp":
        shard(model, profile, job, strategy, mesh_of(strategy, device))
    elif strategy.sharding == "zero-3":
        split_as_loaded(model, job, strategy, DEEPSPEED, drive)


def set_up(
    model: nn.Module, profile: ModelProfile, job: Job, strategy: Strategy, training: TrainingSettings,
    device: torch.device, drive: Path | None = None,
) -> tuple[step.Trainee, LocalEngine]:  # fmt: skip
    """Prepares a loaded model for training as the strategy says, with its engine. ``drive``: folder for what DeepSpeed
    offloads to NVMe. All ranks call it together."""
    # The optimizer is made after FSDP2 has replaced the parameters by DTensors, and before DDP and DeepSpeed wrap the
    # model. Only a block's forward is compiled: FSDP2's gathering stays around it.
    trainable = step.trainable_parameters(model)
    for part in experts.models_of(model):
        step.choose_kernels(part, profile, strategy, device)
    trainee = step.Trainee(model, trainable, make_optimizer(trainable, strategy, training))
    scaler = loss_scaler(job, strategy, device)
    max_grad_norm = MAX_GRAD_NORM if training.max_grad_norm is None else training.max_grad_norm
    engine: LocalEngine
    if strategy.sharding == "fsdp":
        engine = Fsdp(trainee)
    elif strategy.sharding == "ddp":
        kind = family(profile)
        unused = job.experts == "both" or any(kind.without_gradient(name, profile.blocks) for name in trainable)
        engine = Ddp(trainee, strategy, unused, scaler)
    elif strategy.sharding.startswith("zero"):
        engine = Zero(trainee, job, strategy, DEEPSPEED, drive, max_grad_norm)
    else:
        engine = LocalEngine(trainee, scaler)
    trainee.engine = engine
    engine.parts = strategy.context_parallel
    engine.max_grad_norm = max_grad_norm
    return trainee, engine


def check_alike(trainable: dict[str, nn.Parameter], device: torch.device, copies: int) -> None:
    """Raises a VplanError on all ranks if they start with different trained weights: nothing broadcasts them. They
    are compared by the sum of their magnitudes. ``copies``: how many copies of the model there are, each split over
    neighbouring ranks. All ranks call it together."""
    weights = (parameter.detach() for parameter in trainable.values())
    shares = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights)
    total = torch.stack([share.double().abs().sum() for share in shares]).sum().to(device).reshape(1)
    totals = total.new_empty(dist.get_world_size())
    dist.all_gather_into_tensor(totals, total)
    by_copy = totals.view(copies, -1)
    if not torch.equal(by_copy, by_copy[:1].expand_as(by_copy)):
        fix = "put the same weights, and with --resume the same checkpoint, on every node, and run the command again"
        raise VplanError("the ranks have read different weights to begin with", fix, 4)


def mean_over_ranks(value: Tensor) -> Tensor:
    """The mean of a tensor over all ranks; the tensor itself in a single process."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    total = value.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def spread_like(part: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a tensor as a DTensor split like ``parameter``; the part itself if ``parameter`` is not
    split. `from_local` copies a part that is not on the mesh's kind of device."""
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip
