"""DeepSpeed's NVMe offload (ZeRO-Infinity, stage 3): the GPU holds what it holds with `cpu`, host RAM holds buffers.

Read in deepspeed 0.19.8: runtime/swap_tensor/optimizer_utils.py (``SwapBufferManager``: pinned fp32 buffers as large as
the largest sub-group), partitioned_param_swapper.py (``buffer_count`` x ``buffer_size`` pinned), zero/stage3.py
(``grad_partitions_flat_buffer``; ``max_in_cpu``), zero/offload_config.py (the defaults).
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.errors import VplanError
from planner.layout.run import Run
from planner.layout.sharding.zero import DEEPSPEED, FULL, HALF, sub_groups, trained_elements, zero_settings

OPTIMIZER_BUFFERS = 4
"""``buffer_count`` of the optimizer: a weight, its gradient and Adam's two states at a time."""

PARAM_BUFFERS, PARAM_BUFFER_ELEMENTS, MOST_IN_CPU = 5, 100_000_000, 1_000_000_000
"""``buffer_count``, ``buffer_size`` and ``max_in_cpu`` of the parameters."""


SWAPPED_BYTES, ALIGNED = 2**20, 256
"""Smaller tensors stay in host RAM (``MIN_AIO_BYTES``), and so do gradients whose place in their sub-group is at no
multiple of so many numbers (``numel_alignment``; trainers/parallel/parallel.py ``_keep_misplaced_gradients``)."""


def check_buffers(run: Run) -> None:
    """Raises a VplanError for a parameter whose share is larger than a buffer, at which DeepSpeed stops."""
    if run.strategy.offload_params != "nvme":
        return
    largest = max(-(-elements // run.machine.world) for elements in run.elements.values())
    if largest > PARAM_BUFFER_ELEMENTS:
        fault = f"offload_params nvme: a shard has {largest:,} elements, but DeepSpeed's buffers hold 100,000,000"
        raise VplanError(fault, "use more GPUs, or --offload-params cpu")


def optimizer_host_bytes(run: Run) -> int:
    """Host RAM of one rank whose states are on the drive: gradients in 16 bits, those in fp32 that do not go there, and
    the buffers that the others pass through. 0 where they are elsewhere."""
    if run.strategy.offload_optimizer != "nvme":
        return 0
    partitions = trained_shares(run)
    sub_group = zero_settings(run).sub_group
    largest = max(sub_groups(partitions, sub_group))
    kept = gradients_in_ram(partitions, sub_group)
    return HALF * sum(partitions) + FULL * kept + OPTIMIZER_BUFFERS * FULL * largest


def gradients_in_ram(partitions: Sequence[int], sub_group: int = DEEPSPEED.sub_group) -> int:
    """How many gradient elements of a rank stay in host RAM when DeepSpeed offloads to NVMe. ``partitions``: elements
    of each partition; ``sub_group``: elements of a sub-group."""
    kept = place = 0
    for elements in partitions:
        goes = FULL * elements >= SWAPPED_BYTES and place % ALIGNED == 0
        kept += elements % ALIGNED if goes else elements
        place += elements
        if place >= sub_group:
            place = 0
    return kept


def checkpoint_host_bytes(run: Run) -> int:
    """Host RAM of one rank for its share of a checkpoint: fp32 weights and two states, read back from the drive one
    after another and written as one file (trainers/parallel/parallel.py ``Zero.state``)."""
    return 3 * FULL * sum(trained_shares(run)) if run.strategy.offload_optimizer == "nvme" else 0


def params_host_bytes(run: Run) -> int:
    """Host RAM of one rank whose weights are on the drive: the pool, and trained weights up to ``max_in_cpu``. 0 where
    they are elsewhere."""
    if run.strategy.offload_params != "nvme":
        return 0
    pool = PARAM_BUFFERS * PARAM_BUFFER_ELEMENTS
    return HALF * (pool + min(MOST_IN_CPU, sum(trained_shares(run))))


def drive_bytes(run: Run) -> int:
    """Bytes that all ranks together keep on the drive: fp32 weights, gradients and two optimizer states, and weights in
    16 bits."""
    nbytes = 0
    if run.strategy.offload_optimizer == "nvme":
        nbytes += FULL * _on_drive(run)
    if run.strategy.offload_params == "nvme":
        nbytes += HALF * sum(-(-elements // run.machine.world) for elements in run.elements.values())
    return nbytes * run.machine.gpus


def drive_traffic_bytes(run: Run) -> int:
    """What one step reads from and writes to a node's drive: all that the optimizer keeps, in and out; weights for
    forward, for backward and, those that train, back."""
    nbytes, world = 0, run.machine.world
    if run.strategy.offload_optimizer == "nvme":
        nbytes += 2 * FULL * _on_drive(run)
    if run.strategy.offload_params == "nvme":
        nbytes += 2 * run.strategy.gradient_accumulation * HALF * sum(run.elements.values()) // world
        nbytes += HALF * sum(trained_shares(run))
    return nbytes * run.machine.gpus


def _on_drive(run: Run) -> int:
    """Numbers of one rank's weights, two states, and gradients as far as they go there."""
    partitions = trained_shares(run)
    return 4 * sum(partitions) - gradients_in_ram(partitions)


def trained_shares(run: Run) -> list[int]:
    """Elements of one rank's share of each trained parameter, in stage 3."""
    return [-(-elements // run.machine.world) for elements in trained_elements(run).values()]
