"""Strategies on one GPU, and DDP, as transformations of a Run.

Each one function, one named buffer or lifetime, one source.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.errors import VplanError
from planner.run import Run
from planner.units import KIB, MIB


def cublas_workspace(run: Run) -> None:
    """cuBLAS takes a workspace per handle from the caching allocator: one for the thread that runs forward, one for
    autograd's. 4096 KiB x 2 + 16 KiB x 8, on Hopper 32 MiB (aten/src/ATen/cuda/CublasHandlePool.cpp)."""
    nbytes = 32 * MIB if run.facts.gpu.capability[0] >= 9 else (4096 * 2 + 16 * 8) * KIB
    run.add(run.load, nbytes, "workspace", "cublas")
    run.add(run.load, nbytes, "workspace", "cublas")


def residents(run: Run) -> None:
    """Text encoders and VAE that stay on the GPU instead of being cached: their weights, loaded before the model."""
    strategy, model = run.strategy, run.facts.model
    size = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "nf4": 0.5, "int4": 0.5}
    if strategy.vae == "resident":
        run.add(run.load, int(model.vae.parameters * size[strategy.vae_dtype]), "residents", "vae", at=0)
    if strategy.text_encoder == "resident":
        for encoder in model.text_encoders:
            nbytes = int(encoder.parameters * size[strategy.text_encoder_dtype])
            run.add(run.load, nbytes, "residents", encoder.name, at=0)


def checkpoint_offload(run: Run) -> None:
    """``save_on_cpu`` around each checkpoint: block inputs go to host RAM in forward and come back, block by block, in
    backward (torch.autograd.graph.save_on_cpu). Tensors that every block takes come back once per block."""
    if run.strategy.gradient_checkpointing != "offload":
        return
    saved = saved_block_inputs(run)
    for position in reversed(range(len(run.step.stretches))):
        moment, events = run.step.stretches[position]
        block = (moment.module_list, moment.block)
        if block not in saved.own:
            continue
        own = saved.own[block]
        if moment.passes == "forward":
            events += [~buffer for buffer in own]
        else:
            copies = [run.program.buffer(run.sizes[buffer], "activation", "from host") for buffer in saved.shared]
            run.sizes += [run.sizes[buffer] for buffer in saved.shared]
            kept = [event for event in events if event >= 0 or ~event not in own]
            freed = [~buffer for buffer in [*own, *copies]]
            run.step.stretches[position] = (moment, [*own, *copies, *kept, *freed])


@dataclass(frozen=True)
class SavedInputs:
    """What the checkpoints of all blocks keep: buffers that only one block needs, and buffers that all of them take."""

    own: dict[tuple[str, int], list[int]]
    shared: list[int]


def saved_block_inputs(run: Run) -> SavedInputs:
    """Finds the checkpoints' inputs: made in forward, freed in the backward of a block."""
    made: dict[int, int] = {}
    own: dict[tuple[str, int], list[int]] = {}
    order = [(m.module_list, m.block) for m, _ in run.step.stretches if m.passes == "forward" and m.block >= 0]
    first = order[0] if order else None
    shared: list[int] = []
    for position, (moment, events) in enumerate(run.step.stretches):
        block = (moment.module_list, moment.block)
        for event in events:
            if event >= 0:
                if moment.passes == "forward":
                    made[event] = position
            elif ~event in made and moment.passes == "backward" and moment.block >= 0:
                prologue = run.step.stretches[made[~event]][0].block < 0
                (shared if block == first and prologue else own.setdefault(block, [])).append(~event)
    # The first block's own input comes from the prologue too: it has the size of the others' inputs.
    if first is not None and len(order) > 1:
        second = own.get(order[1], [])
        wanted = sorted(run.sizes[buffer] for buffer in second)
        for nbytes in wanted:
            match = next((buffer for buffer in shared if run.sizes[buffer] == nbytes), None)
            if match is not None:
                shared.remove(match)
                own.setdefault(first, []).append(match)
    return SavedInputs(own, shared)


def block_swap(run: Run) -> None:
    """Block swap: the last ``swap_blocks`` blocks live in pinned host RAM and stream through a ring of two buffers,
    each as large as the largest of them (musubi-tuner, ``--block_swap_h2d_only``; OneTrainer
    docs/RamOffloading.md)."""
    count = run.strategy.swap_blocks
    if not count:
        return
    blocks = run.frozen_block_weights()
    if count > len(blocks):
        raise VplanError(f"swap_blocks {count}: the model has {len(blocks)} blocks", f"use at most {len(blocks)}")
    swapped = list(blocks)[len(blocks) - count :]
    largest = max(sum(run.sizes[buffer] for buffer in blocks[block]) for block in swapped)
    run.drop(run.load, [buffer for block in swapped for buffer in blocks[block]])
    for _ in range(min(2, count)):
        run.add(run.load, largest, "buckets", "swap ring")


def gradients_leave(run: Run) -> None:
    """Each gradient is freed at the end of the block whose backward made it."""
    gradients = set(run.named("gradient").values())
    for _, events in run.step.stretches:
        events += [~event for event in events if event in gradients]
    for stage in (run.optimizer_first, run.optimizer):
        run.drop(stage, gradients)


def offloaded_optimizer(run: Run) -> None:
    """Optimizer states and step in host RAM (torchao CPUOffloadOptimizer): nothing of the step is on the GPU; with
    ``offload_gradients`` each gradient leaves as soon as it is accumulated."""
    strategy = run.strategy
    if strategy.offload_optimizer == "none" or strategy.sharding.startswith("zero"):
        return
    for stage in (run.optimizer_first, run.optimizer):
        run.drop(stage, [event for event in stage.ops if event >= 0])
    if strategy.offload_gradients != "none":
        gradients_leave(run)


def ddp(run: Run) -> None:
    """DistributedDataParallel's buckets: a second copy of all gradients, or, with ``gradient_as_bucket_view``, the
    gradients themselves, which then never go away (torch.nn.parallel.DistributedDataParallel)."""
    if run.strategy.sharding != "ddp":
        return
    nbytes = sum(run.sizes[buffer] for buffer in run.named("gradient").values())
    run.add(run.load, nbytes, "buckets", "ddp buckets")
    if run.strategy.grad_buckets == "view":
        gradients_leave(run)
