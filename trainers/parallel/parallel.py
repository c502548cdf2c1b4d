"""Training with others: DDP, DeepSpeed's ZeRO and FSDP2 around the one step, and what a checkpoint takes out of them.

An engine is set up after the weights are loaded. `full_tensor` gives the trained weights back as they are without it,
so that weights are written and read alike under every sharding; `state` is what this rank alone has to keep.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from planner.catalog.profiles import ModelProfile
from planner.errors import VplanError
from planner.layout.sharding.zero import DEEPSPEED, ZeroSettings
from planner.spec.job import Job, Strategy
from planner.spec.training import MAX_GRAD_NORM, TrainingSettings
from trainers.families import family
from trainers.parallel import context
from trainers.parallel.engines import deepspeed_config, shard
from trainers.step import experts, step
from trainers.step.loss_scaling import LossScaler, loss_scaler
from trainers.step.optimizers import make_optimizer, take_up

LOCAL, SHAPE, DIM = "local", "whole shape", "split along"
"""Keys of one rank's share of a tensor in a state: its values, the whole tensor's shape, the dimension of the split."""

SCALER = "loss scaler"
"""Key of the loss scaler's state beside the optimizer's."""


class LocalEngine(step.Engine):
    """One process, or one that others only share gradients with: it has all weights and the whole optimizer."""

    replicated = True
    """Whether every rank has the same state, so that one of them keeps it for all."""

    averages = False
    """Whether the gradients of a step are the mean over all ranks."""

    gathers = False
    """Whether weights are split over the ranks, so that they run every forward together."""

    def __init__(self, trainee: step.Trainee, scaler: LossScaler | None = None) -> None:
        super().__init__(scaler)
        self.trainee = trainee
        self.parts = 1
        """ranks that share a sample"""
        self.plain = trainee.model
        """the model without what an engine puts around it"""
        self.parameters = dict(trainee.model.named_parameters())

    def backward(self, loss: Tensor) -> None:
        # Ranks that share a sample have each a part of its gradient: the sum is wanted. Where the engine takes the mean
        # over all ranks, the loss makes up for it.
        super().backward(loss if self.parts == 1 or not self.averages else loss * self.parts)

    def step(self, trainee: step.Trainee) -> None:
        if self.parts > 1 and not self.averages:  # nothing else adds the parts up
            context.add_up(list(trainee.trainable.values()))
        super().step(trainee)

    def full_tensor(self, name: str) -> Tensor:
        """A trained weight by its full name, unsharded, on whatever device it is. All ranks must call it together,
        because it may be gathered."""
        return self.parameters[name].detach()

    def state(self) -> dict[str, Any]:
        """This rank's optimizer state for a checkpoint: dicts and lists of plain tensors and numbers."""
        assert self.trainee.optimizer is not None
        scaling = {SCALER: self.scaler.state_dict()} if self.scaler else {}
        return {**self.trainee.optimizer.state_dict(), **scaling}

    def load_state(self, state: dict[str, Any]) -> None:
        """Loads what `state` returned on the same rank of a run with as many ranks. Removes entries from the dict while
        it loads."""
        assert self.trainee.optimizer is not None
        if self.scaler:
            self.scaler.load_state_dict(state.pop(SCALER))
        take_up(self.trainee.optimizer, state)

    def release(self) -> None:
        """Frees weights that a forward without a backward has left gathered. All ranks call it together."""

    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups, whose ``lr`` is the learning rate of the next step."""
        assert self.trainee.optimizer is not None
        return self.trainee.optimizer.param_groups


class Ddp(LocalEngine):
    """DistributedDataParallel: gradients are averaged in backward of the last micro-batch."""

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
            init_sync=False,  # every rank has read the same files; `check_alike` looks
        )

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[None]:
        # Under no_sync gradients add up on each rank; the last backward reduces the sums, once a step.
        return contextlib.nullcontext() if last else self.wrapped.no_sync()


class Fsdp(LocalEngine):
    """FSDP2: parameters are DTensors; gradients are reduced in every micro-batch and added up as shares."""

    replicated = False
    averages = True
    gathers = True

    def full_tensor(self, name: str) -> Tensor:
        parameter = self.parameters[name].detach()
        assert isinstance(parameter, DTensor)
        return parameter.full_tensor()

    def release(self) -> None:
        for module in self.plain.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def state(self) -> dict[str, Any]:
        shares: dict[str, Any] = _map_tensors(super().state(), _as_share)
        return shares

    def load_state(self, state: dict[str, Any]) -> None:
        first = next(iter(self.trainee.trainable.values()))
        assert isinstance(first, DTensor)
        super().load_state(_map_tensors(state, lambda value: _from_share(value, first)))


class Zero(LocalEngine):
    """DeepSpeed: it averages, clips and steps itself, at the last of as many micro-batches as its config says."""

    replicated = False

    def __init__(
        self,
        trainee: step.Trainee,
        job: Job,
        strategy: Strategy,
        settings: ZeroSettings,
        drive: Path | None,
        max_grad_norm: float,
    ) -> None:
        super().__init__(trainee)
        import deepspeed

        config = deepspeed_config(job, strategy, settings, drive, max_grad_norm)
        self.deepspeed, *_ = deepspeed.initialize(model=trainee.model, optimizer=trainee.optimizer, config=config)
        self.stage_3 = self.gathers = strategy.sharding == "zero-3"
        trainee.model = self.deepspeed
        self.inner = self.deepspeed.optimizer
        if self.stage_3 and self.inner.swap_optimizer:
            _keep_misplaced_gradients(self.inner.optimizer_swapper)

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        yield
        if not last:
            self.deepspeed.step()  # counts the micro-batch: it steps at the last of them alone

    def backward(self, loss: Tensor) -> None:
        # DeepSpeed would divide by its accumulation steps; the step has divided the loss already.
        self.deepspeed.backward(loss, scale_wrt_gas=False)

    def step(self, trainee: step.Trainee) -> None:
        self.deepspeed.step()

    def full_tensor(self, name: str) -> Tensor:
        parameter = self.parameters[name]
        if not self.stage_3:
            return parameter.detach()
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([parameter]):
            return parameter.detach().clone()

    def release(self) -> None:
        if not self.stage_3:
            return
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        self.inner.parameter_offload.get_param_coordinator().reset_step()  # waits for what was fetched ahead
        parameters: Iterable[Any] = self.plain.parameters()  # with what DeepSpeed adds to them
        for parameter in parameters:
            if parameter.ds_status == ZeroParamStatus.AVAILABLE and not parameter.ds_persist:
                parameter.ds_active_sub_modules.clear()
                parameter.partition()

    @property
    def masters(self) -> list[Tensor]:
        """This rank's shares of the fp32 master weights, in the order in which DeepSpeed steps them."""
        inner = self.inner
        return list(inner.fp32_partitioned_groups_flat if self.stage_3 else inner.single_partition_of_fp32_groups)

    def state(self) -> dict[str, Any]:
        saved: dict[str, Any] = {"masters": [], "states": []}
        for number, master in enumerate(self.masters):
            with self._in_host_ram(number, changed=False) as from_drive:
                state = dict(self.inner.optimizer.state[master])
                saved["masters"].append(master.detach().clone() if from_drive else master.detach())
                saved["states"].append(_map_tensors(state, _clone) if from_drive else state)
        return saved

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        masters = zip(self.masters, state["masters"], state["states"], strict=True)
        for number, (master, saved, saved_states) in enumerate(masters):
            with self._in_host_ram(number, changed=True) as from_drive:
                master.copy_(saved)
                states = self.inner.optimizer.state[master]
                for key, value in saved_states.items():
                    if from_drive and key in states and isinstance(value, Tensor) and value.ndim:
                        states[key].copy_(value)  # its buffer is what goes back to the drive
                    else:  # before the first step a drive has no states: they are taken there as those of a step are
                        states[key] = value.to(master.device) if isinstance(value, Tensor) and value.ndim else value

    @contextlib.contextmanager
    def _in_host_ram(self, number: int, changed: bool) -> Iterator[bool]:
        """A sub-group's master and states in host RAM, where DeepSpeed keeps them on a drive (stage3.py, around its own
        step); whether it does."""
        if not self.stage_3 or not self.inner._swappable_optimizer_subgroup(number):
            yield False
            return
        self.inner._optimizer_states_and_gradient_swap_in(number)
        yield True
        if changed:
            self.inner._optimizer_states_and_gradient_swap_out(number)
        else:
            self.inner._release_swap_buffers(number)

    def param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.inner.optimizer.param_groups
        return groups


def _keep_misplaced_gradients(swapper: Any) -> None:
    """Has gradients stay in host RAM that a drive could not give back.

    DeepSpeed 0.19 reads each gradient straight to its place in a flat buffer (``_swap_in_pinned_gradients``), past the
    page cache (O_DIRECT), which takes places at multiples of 512 bytes alone. Any other is left as it was, and no error
    comes of it (csrc/aio counts what is done, not what was read): the step is then of other gradients.
    """
    adjust = swapper._adjust_for_misaligned_lengths

    def adjusted(tensors: list[Tensor], offsets: list[int]) -> Any:
        for tensor, offset in zip(tensors, offsets, strict=True):
            if offset % swapper.numel_alignment:
                tensor.swappable = False  # type: ignore[attr-defined]  # DeepSpeed's own mark
        return adjust(tensors, offsets)

    swapper._adjust_for_misaligned_lengths = adjusted


def split(model: nn.Module, profile: ModelProfile, job: Job, strategy: Strategy, device: torch.device) -> None:
    """Has ranks share a sample's tokens, or FSDP2 split the weights, as the strategy says. All ranks call it together,
    on a built model whose weights are not there yet: whole, they may not fit on one GPU."""
    context.split_tokens(model, strategy, device)
    if strategy.sharding == "fsdp":
        shard(model, profile, job, strategy, init_device_mesh(device.type, (dist.get_world_size(),)))


def set_up(
    model: nn.Module, profile: ModelProfile, job: Job, strategy: Strategy, training: TrainingSettings,
    device: torch.device, settings: ZeroSettings = DEEPSPEED, drive: Path | None = None,
) -> tuple[step.Trainee, LocalEngine]:  # fmt: skip
    """A loaded model made ready to train as the strategy says, and the engine that does it; all ranks call together."""
    # FSDP2 has replaced parameters by DTensors, of which the optimizer is made; DDP and DeepSpeed wrap a model whose
    # optimizer is there. Only a block's forward is compiled: FSDP2's gathering stays around it.
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
        engine = Zero(trainee, job, strategy, settings, drive, max_grad_norm)
    else:
        engine = LocalEngine(trainee, scaler)
    trainee.engine = engine
    engine.parts = strategy.context_parallel
    engine.max_grad_norm = max_grad_norm
    return trainee, engine


def check_alike(trainable: dict[str, nn.Parameter], device: torch.device) -> None:
    """Refuses ranks that begin with different trained weights, which nothing broadcasts. All ranks call it together,
    and all of them raise the VplanError."""
    total = torch.stack([parameter.detach().double().abs().sum() for parameter in trainable.values()]).sum()
    ends = torch.stack([total, -total]).to(device)
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    if ends[0] != -ends[1]:
        fix = "put the same weights, and with --resume the same checkpoint, on every node, and run the command again"
        raise VplanError("the ranks have read different weights to begin with", fix, 4)


def mean_over_ranks(value: Tensor) -> Tensor:
    """The mean of a tensor over all ranks; the tensor itself in a single process."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    total = value.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def split_like(unsplit: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a whole tensor, cut as a parameter is; the tensor itself where nothing is cut."""
    if not isinstance(parameter, DTensor):
        return unsplit
    from torch.distributed.tensor import distribute_tensor

    cut = distribute_tensor(
        unsplit.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )
    return cut.to_local()


def join_like(part: Tensor, parameter: Tensor) -> Tensor:
    """The whole tensor that the ranks' parts make up; it is split as ``parameter`` is. The inverse of `split_like`."""
    if not isinstance(parameter, DTensor):
        return part
    spread = DTensor.from_local(
        part.to(parameter.device), parameter.device_mesh, parameter.placements, run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip
    return spread.full_tensor()


def _map_tensors(value: Any, change: Any) -> Any:
    """A nested state with every tensor, or share of one, changed."""
    if isinstance(value, dict) and LOCAL not in value:  # a dict with LOCAL in it is a share
        return {key: _map_tensors(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_map_tensors(inner, change) for inner in value]
    return change(value)


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _as_share(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    (placement,) = value.placements
    return {LOCAL: value.to_local(), SHAPE: list(value.shape), DIM: getattr(placement, "dim", None)}


def _from_share(value: Any, like: DTensor) -> Any:
    if not isinstance(value, dict):
        return value
    shape = torch.Size(value[SHAPE])
    stride = torch.empty(shape, device="meta").stride()
    placement = Replicate() if value[DIM] is None else Shard(value[DIM])
    local = value[LOCAL].to(like.to_local().device)
    return DTensor.from_local(local, like.device_mesh, [placement], run_check=False, shape=shape, stride=stride)
