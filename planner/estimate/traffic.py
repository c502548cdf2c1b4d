"""Bytes that one GPU moves in a step: over the link to host RAM, to other GPUs, and to drives."""

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

    Block swap, checkpoint offload and gathering overlap with kernels. The first two use one copy engine per direction:
    swapped weights only travel to the GPU, while checkpoints leave in forward and return in backward. An optimizer in
    host RAM receives gradients and returns weights while nothing else runs. DeepSpeed's stages 1 and 2 do not overlap
    communication with backward by default (``overlap_comm`` is on in stage 3 only, runtime/zero/config.py).
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
    if (parts := strategy.context_parallel) > 1:  # attention waits for its inputs from other GPUs
        gpu_waiting += accumulation * run.work.exchanged_bytes * (parts - 1) // parts
    if strategy.offload_params != "none":
        coming += HALF * sum(run.elements.values()) // split
    if run.samples_only and strategy.group_offload != "none":
        # With a stream the weights are prefetched from host RAM; without one they move both ways, and the GPU waits.
        weights = run.total_bytes(run.named("weight").values())
        coming += weights if strategy.group_offload_stream else 0
        host_waiting += 0 if strategy.group_offload_stream else 2 * weights
    host_waiting += exchanged_bytes(run)
    if not run.samples_only:  # a swapped encoder is copied to the GPU only: host RAM keeps its unchanged weights
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
    """Buffers of the blocks that come from host RAM. A trainer that streams single layers keeps no block on the GPU;
    its settings are read as all blocks but one, the most that can be swapped (`planner.dialects.simpletuner.settings`),
    and here that means all of them."""
    blocks = run.swappable_weights
    every = fetches_again(run.trainer) and run.strategy.swap_blocks == len(blocks) - 1
    return blocks if every else run.swapped_blocks


def _fetched_again(run: Run) -> int:
    """Bytes of checkpointed blocks' weights that are fetched a second time, for backward after the recomputation
    (`fetches_again`)."""
    if not fetches_again(run.trainer) or run.strategy.gradient_checkpointing == "none":
        return 0
    blocks = _streamed_blocks(run)
    checkpointed = run.checkpointed or blocks.keys()
    return sum(run.total_bytes(buffers) for block, buffers in blocks.items() if block in checkpointed)
