"""What a strategy moves in one step for one GPU: over the link to host RAM, and to other GPUs."""

from __future__ import annotations

from planner.run import Run
from planner.timing import Traffic


def traffic(run: Run) -> Traffic:
    """The traffic of one optimizer step. Swap and checkpoint offload copy beside the kernels; an optimizer in host RAM
    takes gradients out and weights back while nothing else runs."""
    strategy, world = run.strategy, run.machine.world
    accumulation = strategy.gradient_accumulation
    gradients = sum(run.sizes[buffer] for buffer in run.named("gradient").values())
    host = gpu = parameters = 0
    if strategy.swap_blocks:  # host to GPU once in forward and once in backward: masters stay in host RAM
        blocks = list(run.frozen_block_weights.values())
        swapped = blocks[len(blocks) - strategy.swap_blocks :]
        host += 2 * accumulation * sum(run.sizes[buffer] for block in swapped for buffer in block)
    if strategy.gradient_checkpointing == "offload":
        inputs = (buffer for kept in run.block_inputs.values() for buffer in kept)
        host += accumulation * sum(run.sizes[buffer] for buffer in inputs)
        host += accumulation * run.facts.model.blocks * sum(run.sizes[buffer] for buffer in run.shared_inputs)
    if strategy.offload_optimizer != "none":
        host += 2 * gradients
        parameters = run.trained_parameters // (world if strategy.sharding.startswith("zero") else 1)
    share = (world - 1) / world
    weights = sum(run.sizes[buffer] for buffer in run.named("weight").values())
    if world > 1:  # all-reduce, or reduce-scatter of gradients and all-gather of the new weights
        gpu += int(2 * gradients * share)
    if strategy.sharding == "zero-3":  # gathered for forward and again for backward
        gpu += int(2 * accumulation * weights * share)
    if strategy.offload_params != "none":
        host += 2 * accumulation * weights // world
    overlapped = strategy.offload_optimizer == "none"
    return Traffic(host_bytes=host, gpu_bytes=gpu, overlapped=overlapped, host_parameters=parameters)
