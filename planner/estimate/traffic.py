"""What a strategy moves in one step for one GPU: over the link to host RAM, and to other GPUs."""

from __future__ import annotations

from collections.abc import Mapping

from planner.catalog.swapped_stacks import fetches_again
from planner.estimate.links import all_reduced
from planner.estimate.roofline import Traffic
from planner.layout.checkpoints.block_inputs import offloaded_bytes
from planner.layout.encoders_vae.component_pass import component_bytes
from planner.layout.experts import exchanged_bytes
from planner.layout.run import Run
from planner.layout.sharding import nvme
from planner.layout.sharding.collectives import reduced_share_bytes, sent_bytes
from planner.layout.sharding.zero import HALF
from planner.spec.job import SPLIT
from planner.tape.program import Block


def traffic(run: Run) -> Traffic:
    """The traffic of one optimizer step.

    Swap, checkpoint offload and gathering copy beside the kernels, the first two through one copy engine each way:
    swapped weights only ever come, while checkpoints go in forward and come back in backward. An optimizer in host RAM
    takes gradients out and weights back while nothing else runs, and DeepSpeed's stages 1 and 2 send nothing beside
    backward unless they are told to (``overlap_comm`` is on in stage 3 only, runtime/zero/config.py).
    """
    strategy, world, shards = run.strategy, run.machine.world, run.configuration.shards
    accumulation = strategy.gradient_accumulation
    gradients = run.total_bytes(run.named("gradient").values())
    coming = again = gpu = across = host_waiting = gpu_waiting = parameters = 0
    beside = 1.0
    offloaded = offloaded_bytes(run)
    if strategy.swap_blocks:  # host to GPU once in forward and once in backward: masters stay in host RAM
        blocks = _streamed_blocks(run)
        coming += sum(map(run.total_bytes, blocks.values()))
        again = _fetched_again(run)
        beside = 1.0 if offloaded else len(blocks) / run.facts.model.blocks
    split = shards if strategy.sharding in SPLIT else 1
    if strategy.offload_optimizer != "none":
        host_waiting = 2 * gradients // split
        parameters = run.trained_parameters // split
    if strategy.sharding in ("zero-1", "zero-2"):
        gpu_waiting = sent_bytes(run) * (world - 1) // world
    elif strategy.sharding in SPLIT:
        gpu = sent_bytes(run) * (shards - 1) // shards
        across = all_reduced(reduced_share_bytes(run), strategy.fsdp_replicas)
    elif world > 1:  # in the last micro-batch only
        gpu = all_reduced(gradients, world)
    if (parts := strategy.context_parallel) > 1:  # attention waits for what it is sent
        gpu_waiting += accumulation * run.work.exchanged_bytes * (parts - 1) // parts
    if strategy.offload_params != "none":
        coming += HALF * sum(run.elements.values()) // split
    if run.samples_only and strategy.group_offload != "none":
        # With a stream the weights stay in host RAM and are fetched ahead; without one they come and go, and all waits.
        weights = run.total_bytes(run.named("weight").values())
        coming += weights if strategy.group_offload_stream else 0
        host_waiting += 0 if strategy.group_offload_stream else 2 * weights
    host_waiting += exchanged_bytes(run)
    if not run.samples_only:  # what is swapped comes, encodes and is gone: its weights wait in host RAM as they are
        host_waiting += accumulation * component_bytes(run, "swapped")
    return Traffic(
        host_forward_bytes=max(coming, offloaded),
        host_backward_bytes=0 if run.samples_only else coming + again + offloaded,
        host_beside=beside,
        gpu_bytes=gpu,
        replica_bytes=across,
        host_waiting_bytes=host_waiting,
        gpu_waiting_bytes=gpu_waiting,
        host_parameters=parameters,
        disk_bytes=nvme.drive_traffic_bytes(run),
    )


def _streamed_blocks(run: Run) -> Mapping[Block, list[int]]:
    """Buffers of the blocks that come from host RAM. Layers that come one by one leave no block on the GPU; all blocks
    but one, the most that can be swapped, stand for all of them then (`planner.dialects.simpletuner.settings`)."""
    blocks = run.swappable_weights
    every = fetches_again(run.trainer) and run.strategy.swap_blocks == len(blocks) - 1
    return blocks if every else run.swapped_blocks


def _fetched_again(run: Run) -> int:
    """What comes for the recomputation of checkpointed blocks and then for their backward (`fetches_again`), bytes."""
    if not fetches_again(run.trainer) or run.strategy.gradient_checkpointing == "none":
        return 0
    blocks = _streamed_blocks(run)
    checkpointed = run.checkpointed or blocks.keys()
    return sum(run.total_bytes(buffers) for block, buffers in blocks.items() if block in checkpointed)
