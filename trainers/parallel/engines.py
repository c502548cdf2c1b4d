"""The engines that split a model over GPUs, as a strategy asks for them: DeepSpeed's config, torch's ``fully_shard``.

What `planner.layout.sharding.zero` and `planner.layout.sharding.fsdp` price is what these two set up; tests/contract
reads the real bytes back.
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
"""Pinned host memory is there to be copied to a GPU."""


def deepspeed_config(
    job: Job,
    strategy: Strategy,
    settings: ZeroSettings,
    drive: Path | None = None,
    max_grad_norm: float = MAX_GRAD_NORM,
) -> dict[str, Any]:
    """DeepSpeed's configuration for a ``zero-N`` strategy with a client optimizer; what is left out is its default.

    ``drive``: the folder of what ``nvme`` offloads; ``max_grad_norm``: the norm of clipped gradients, 0 for none.
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
    """All ranks in a row, or with several copies of the model a row for each: neighbours have shares of the same copy,
    and gradients are summed down the columns. All ranks call it together."""
    world, copies = dist.get_world_size(), strategy.fsdp_replicas
    if copies == 1:
        return init_device_mesh(device.type, (world,))
    return init_device_mesh(device.type, (copies, world // copies), mesh_dim_names=("replicate", "shard"))


def shard(model: nn.Module, profile: ModelProfile, job: Job, strategy: Strategy, mesh: DeviceMesh) -> None:
    """Splits a model in place with FSDP2: one group per repeated block, one for the rest.

    The shards have the strategy's storage, weights are gathered in its compute format, and gradients are added up in
    fp32 (as torchtitan does). FSDP2 wants one format of everything it trains, so what diffusers keeps in fp32 (norms,
    tables) follows the strategy where it is trained.
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
