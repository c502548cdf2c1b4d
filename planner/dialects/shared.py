"""What several trainers do alike."""

from __future__ import annotations

from planner.job import SPLIT
from planner.run import Run
from planner.strategies import fetched_when_needed


def swap_in_place(run: Run) -> None:
    """Block swap exchanges the weights of two blocks where they lie, over host memory that is not pinned: the blocks
    that stay are all there is on the GPU, and there is no ring (kohya-ss library/custom_offloading_utils.py
    ``swap_weight_devices_cuda``, copied by musubi-tuner and diffusion-pipe)."""
    if run.strategy.swap_blocks:
        run.drop(run.load, [buffer for buffer, op in enumerate(run.program.op) if op == "swap ring"])


def checkpoints_saved_on_cpu(run: Run) -> None:
    """All arguments of a checkpoint are copied to ordinary host memory, those too that all blocks are given alike, and
    come back when they are wanted (torch ``save_on_cpu`` without ``pin_memory``, ``tensor.cpu()``)."""
    if run.strategy.gradient_checkpointing == "offload":
        run.copies_shared_inputs = True
        fetched_when_needed(run)


def cache_emptied(run: Run) -> None:
    """The allocator's cache is emptied between loading and training."""
    run.empty_cache_after_load = True


def steps_by_itself(run: Run) -> bool:
    """Whether the trainer's own loop frees or zeroes the gradients, and not an engine, a hook or DDP's buckets."""
    strategy = run.strategy
    return (
        strategy.sharding not in SPLIT
        and not (strategy.sharding == "ddp" and strategy.grad_buckets == "view")
        and strategy.optimizer_step != "backward"
        and strategy.offload_gradients == "none"
    )
