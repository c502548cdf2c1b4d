"""DeepSpeed ZeRO 1 to 3 as transformations of a recorded step: what a rank keeps, and the buffers the engine adds.

DeepSpeed keeps the whole module in 16 bits, an fp32 master and two Adam states of its share of the trained
parameters, and sends gradients through one flat bucket (deepspeed/runtime/zero/stage_1_and_2.py, stage3.py; defaults
of deepspeed/runtime/zero/config.py). Frozen parameters are sharded in stage 3 only.
"""

from __future__ import annotations

from planner.run import Run
from planner.strategies import gradients_leave

BUCKET_ELEMENTS = 500_000_000
"""``reduce_bucket_size``: DeepSpeed allocates it whole at every backward, however small the model."""

MAX_LIVE_ELEMENTS = 1_000_000_000
"""Stage 3 ``max_live_parameters`` and ``max_reuse_distance``: what stays gathered."""

PREFETCH_ELEMENTS = 50_000_000
SUB_GROUP_ELEMENTS = 1_000_000_000
PERSISTENT_ELEMENTS = 100_000
"""Stage 3 keeps parameters up to this size on every rank (``param_persistence_threshold``)."""


def zero(run: Run) -> None:
    """Replaces the recorded gradients' lifetimes and optimizer step by DeepSpeed's."""
    strategy = run.strategy
    if not strategy.sharding.startswith("zero"):
        return
    stage = int(strategy.sharding[-1])
    share = -(-run.trained_parameters // run.machine.world)
    offloaded = strategy.offload_optimizer != "none"
    if stage == 1 and strategy.gradient_accumulation > 1:  # reduced at the last micro-batch only
        run.add(run.load, 2 * run.trained_parameters, "gradient", "16-bit gradients")
    gradients_leave(run)
    for step in (run.optimizer_first, run.optimizer):
        run.drop(step, [event for event in step.ops if event >= 0])
    if not offloaded:
        run.add(run.load, 12 * share, "optimizer", "fp32 master and Adam states")
    if stage == 3:
        _shard_weights(run)
    backward = next(i for i, (moment, _) in enumerate(run.step.stretches) if moment.passes == "backward")
    bucket = run.add(run.step, 2 * BUCKET_ELEMENTS, "buckets", "reduce bucket", at=backward)
    run.free(run.step, [bucket])
    if not offloaded:
        _optimizer_on_gpu(run, share, backward)


def _optimizer_on_gpu(run: Run, share: int, backward: int) -> None:
    """This rank's 16-bit gradients from backward on, and their fp32 copy and one temporary during the step."""
    partition = run.add(run.step, 2 * share, "gradient", "gradient partition", at=backward)
    group = min(share, SUB_GROUP_ELEMENTS) if run.strategy.sharding == "zero-3" else share
    for step in (run.optimizer_first, run.optimizer):
        made = [run.add(step, 4 * group, "gradient", "fp32 gradients", at=0)]
        if run.strategy.optimizer_step == "foreach":
            made.append(run.add(step, 4 * group, "temporary", "foreach", at=0))
        run.free(step, [*made, partition])


def _shard_weights(run: Run) -> None:
    """Every rank keeps its share of all weights (none with ``offload_params``) and what is gathered at the moment."""
    weights = run.named("weight")
    large = [buffer for buffer in weights.values() if run.sizes[buffer] > 2 * PERSISTENT_ELEMENTS]
    total = sum(run.sizes[buffer] for buffer in large)
    run.drop(run.load, large)
    if run.strategy.offload_params == "none":
        run.add(run.load, -(-total // run.machine.world), "weight", "weight partition")
    gathered = min(total, 2 * (MAX_LIVE_ELEMENTS + PREFETCH_ELEMENTS))
    run.free(run.step, [run.add(run.step, gathered, "buckets", "gathered weights", at=0)])
