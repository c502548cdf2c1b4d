"""Engines that split a model over GPUs as a strategy says: DeepSpeed's config, and torch's ``fully_shard``.

`planner.layout.sharding.zero` and `planner.layout.sharding.fsdp` estimate what is set up here; tests/contract compares
them with the real bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from planner.catalog.profiles import ModelProfile
from planner.layout.run_records import ZeroSettings
from planner.spec.job import Job, Strategy
from planner.spec.training import MAX_GRAD_NORM
from trainers.step.step import DTYPES

PIN = torch.cuda.is_available()
"""Whether to pin host memory, which only serves copies to a GPU."""


def deepspeed_config(
    job: Job,
    strategy: Strategy,
    settings: ZeroSettings,
    drive: Path | None = None,
    max_grad_norm: float = MAX_GRAD_NORM,
) -> dict[str, Any]:
    """DeepSpeed's configuration for a ``zero-N`` strategy with a client optimizer; other settings have their defaults.

    ``drive``: the folder for what ``nvme`` offloads; ``max_grad_norm``: the norm that gradients are clipped to, 0 for
    no clipping.
    """
    assert strategy.sharding.startswith("zero")
    zero: dict[str, Any] = {
        "stage": int(strategy.sharding[-1]),
        "reduce_bucket_size": settings.reduce_bucket,
        "sub_group_size": settings.sub_group,
        "stage3_prefetch_bucket_size": settings.prefetch,
        "stage3_max_live_parameters": settings.max_live,
        "stage3_max_reuse_distance": settings.max_reuse,
        "stage3_param_persistence_threshold": settings.persistent,
        "stage3_gather_16bit_weights_on_model_save": True,
        **({"overlap_comm": True} if settings.overlap else {}),
    }
    for field, where in (("offload_optimizer", strategy.offload_optimizer), ("offload_param", strategy.offload_params)):
        if where != "none":
            folder = {"nvme_path": str(drive)} if where == "nvme" else {}
            zero[field] = {"device": where, "pin_memory": PIN, **folder}
    return {
        "train_micro_batch_size_per_gpu": job.batch_size,
        "gradient_accumulation_steps": strategy.gradient_accumulation,
        "gradient_clipping": max_grad_norm,
        "bf16": {"enabled": strategy.compute_dtype == "bf16"},
        "fp16": {"enabled": strategy.compute_dtype == "fp16"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def mesh_of(strategy: Strategy, device: torch.device) -> DeviceMesh:
    """The device mesh: all ranks in a row, or one row for each copy of the model. The ranks of a row have shards of the
    same copy, and gradients are summed down the columns. All ranks call it together."""
    world, copies = dist.get_world_size(), strategy.fsdp_replicas
    if copies == 1:
        return init_device_mesh(device.type, (world,))
    return init_device_mesh(device.type, (copies, world // copies), mesh_dim_names=("replicate", "shard"))


def shard(model: nn.Module, profile: ModelProfile, job: Job, strategy: Strategy, mesh: DeviceMesh) -> None:
    """Splits a model in place with FSDP2: one group per repeated block, one for the rest.

    Shards have the strategy's storage dtype, weights are gathered in its compute dtype, and gradients are reduced in
    fp32 (as torchtitan does). FSDP2 needs one dtype for all trained parameters, so those that diffusers keeps in fp32
    (norms, tables) get the strategy's dtype if they are trained.
    """
    trained = DTYPES[strategy.adapter_dtype if job.method == "lora" else strategy.weights(job.method)]
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(trained)
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[strategy.compute_dtype], reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    offloaded = strategy.offload_params == "cpu"
    offload = CPUOffloadPolicy(pin_memory=PIN) if offloaded else OffloadPolicy()
    for stack in profile.stacks:
        for block in model.get_submodule(stack.list).children():
            fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=offload)
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)
