"""Strategies on one GPU, and DDP, as transformations of a Run.

Each one function, one named buffer or lifetime, one source.
"""

from __future__ import annotations

import itertools

from planner.errors import VplanError
from planner.layout.run import Run
from planner.spec.job import SPLIT
from planner.tape.program import Stage, frees
from planner.tape.variants.precision import Precision
from planner.units import MIB, power_of_two

NCCL_BYTES = 600 * MIB
"""One communicator: 544 to 688 MB on four A100 (NVIDIA/nccl#964), 512 MiB even for one rank (nccl#2363)."""

SWAP_RING_BUFFERS = 2
"""Buffers that swapped blocks come through."""


def block_swap(run: Run) -> None:
    """Block swap: the last ``swap_blocks`` of the checkpointed blocks live in pinned host RAM and stream through a ring
    of ``SWAP_RING_BUFFERS`` buffers, each as large as the largest of them (musubi-tuner, ``--block_swap_h2d_only``;
    OneTrainer docs/RamOffloading.md)."""
    count = run.strategy.swap_blocks
    if not count:
        return
    blocks, swapped = run.swappable_weights, run.swapped_blocks
    if count > len(blocks):
        fault = f"swap_blocks {count}: the model has {len(blocks)} blocks with weights to swap"
        raise VplanError(fault, f"use at most {len(blocks)}" if blocks else "use --method lora")
    largest = max(map(run.total_bytes, swapped.values()))
    gone = set(itertools.chain.from_iterable(swapped.values()))
    run.drop(run.load, gone)
    if anew := gone & run.shared(weights_made_anew):  # the ring holds them
        run.drop(run.step, anew)
    for _ in range(min(SWAP_RING_BUFFERS, count)):
        run.add(run.load, largest, "buckets", "swap ring")


def swapped_host_bytes(run: Run) -> int:
    """Host RAM, bytes, that swapped blocks wait in, registered with CUDA as they lie (trainers/memory/pinned.py). An
    engine that splits casts to 16 bits what a recording keeps in fp32."""
    if not run.strategy.swap_blocks:
        return 0
    split, rounded = run.strategy.sharding in SPLIT, run.host.swap_pins == "rounded"
    swapped = itertools.chain.from_iterable(run.swapped_blocks.values())
    if not split and not rounded:
        return run.total_bytes(swapped) + staged_bytes(run)
    cast = {run.parameters[name]: 2 * elements for name, elements in run.elements.items()} if split else {}
    sizes = (cast.get(buffer, run.sizes[buffer]) for buffer in swapped)
    return sum(map(power_of_two, sizes) if rounded else sizes) + staged_bytes(run)


def staged_bytes(run: Run) -> int:
    """Pinned buffers, bytes, that swapped blocks pass on their way: two as large as a block (musubi-tuner 30c658c
    modules/custom_offloading_utils.py ``staging_buffer_a``)."""
    if run.host.swap_pins != "staging" or not run.swapped_blocks:
        return 0
    largest = max(run.swapped_blocks.values(), key=run.total_bytes)
    return 2 * sum(power_of_two(run.sizes[buffer]) for buffer in largest)


def weights_made_anew(run: Run) -> frozenset[int]:
    """Weights that a step casts away and makes again, as layerwise casting does."""
    weights = frozenset(run.named("weight").values())
    return weights.intersection(*[itertools.chain.from_iterable(events for _, events in run.step.stretches)])


def accumulation(run: Run) -> None:
    """Gradient accumulation: a further micro-batch runs beside the gradients of the first, and each of its own
    gradients is added to them and freed within its block (torch AccumulateGrad adds in place)."""
    if run.strategy.gradient_accumulation == 1:
        return
    step = onto_gradients(run)
    run.accumulate = Stage("step", [(run.step.stretches[0][0], frees(run.leftovers)), *step.stretches])


def onto_gradients(run: Run) -> Stage:
    """The step when gradients exist already: each new one is added to the old one and freed within its block."""
    gradients = run.named("gradient").values()
    added = {buffer: run.new(run.sizes[buffer], "temporary", "new gradient") for buffer in gradients}
    stretches = []
    for moment, events in run.step.stretches:
        own = [added.get(event, event) for event in events]
        stretches.append((moment, own + [~added[event] for event in events if event in added]))
    return Stage("step", stretches)


def gradients_leave(run: Run) -> None:
    """Frees each gradient at the end of the block whose backward made it; so every micro-batch is like the first."""
    run.accumulate = None
    gradients = set(run.named("gradient").values())
    run.step.stretches = [
        (moment, [*events, *(~event for event in events if event in gradients)])
        for moment, events in run.step.stretches
    ]
    for stage in (run.optimizer_first, run.optimizer):
        run.drop(stage, gradients)


def offloaded_optimizer(run: Run) -> None:
    """Optimizer states and step in host RAM (torchao CPUOffloadOptimizer): nothing of the step is on the GPU; with
    ``offload_gradients`` each gradient leaves as soon as it is accumulated."""
    strategy = run.strategy
    if strategy.offload_optimizer == "none" or strategy.sharding.startswith("zero"):
        return
    for stage in (run.optimizer_first, run.optimizer):
        run.empty(stage)
    if strategy.offload_gradients != "none":
        gradients_leave(run)


def ddp(run: Run) -> None:
    """DistributedDataParallel's buckets: a second copy of all gradients, or, with ``gradient_as_bucket_view``, the
    gradients themselves, which then never go away (torch.nn.parallel.DistributedDataParallel)."""
    if run.strategy.sharding != "ddp":
        return
    nbytes = run.trained_experts * run.total_bytes(run.named("gradient").values())
    run.add(run.load, nbytes, "buckets", "ddp buckets")
    if run.strategy.grad_buckets == "view":
        gradients_leave(run)


def ema(run: Run) -> None:
    """A moving average of what is trained, loaded with the weights. It is updated one parameter at a time: the
    difference and its product with the decay (diffusers training_utils.EMAModel.step). On the CPU it is updated there.
    """
    if run.strategy.ema != "gpu":
        return
    run.add(run.load, ema_bytes(run), "ema", "ema")
    largest = max(run.sizes[buffer] for buffer in run.named("gradient").values())
    elements = largest // (4 if Precision.of(run.job, run.strategy).trained == "fp32" else 2)
    for stage in (run.optimizer_first, run.optimizer):
        made = [run.add(stage, EMA_BYTES * elements, "temporary", "ema update") for _ in range(2)]
        run.free(stage, made)


EMA_BYTES = 4
"""Per parameter. EMAModel clones what it is given; ours is fp32 whatever trains, because a decay of 0.9999 changes a
16-bit number by less than its last digit."""


def ema_bytes(run: Run) -> int:
    """The moving average on one rank: its share where FSDP2 splits the weights, else the whole."""
    share = run.configuration.shards if run.strategy.sharding == "fsdp" else 1
    return EMA_BYTES * -(-run.trained_parameters // share)
