"""Where gradients are in fp16, in which small ones vanish, and whether the training step scales its loss for that."""

from __future__ import annotations

from planner.spec.job import QUANTISED, SPLIT, Job, Strategy


def uses_fp16(job: Job, strategy: Strategy) -> bool:
    """Whether gradients are computed in fp16, where small ones underflow to zero: by autocast, by fp16 weights, or by
    fp16 compute with a sharded or quantised base."""
    weights = strategy.weights(job.method)
    computes = strategy.sharding in SPLIT or weights in QUANTISED
    return "fp16" in (strategy.autocast, weights) or (computes and strategy.compute_dtype == "fp16")


def scales_loss(job: Job, strategy: Strategy) -> bool:
    """Whether the step scales its loss: torch's scaler unscales fp32 gradients, after backward, alike on all ranks."""
    trained = strategy.adapter_dtype if job.method == "lora" else strategy.weights(job.method)
    after_backward = strategy.optimizer_step != "backward" and strategy.sharding not in SPLIT
    return job.method != "sample" and uses_fp16(job, strategy) and trained == "fp32" and after_backward
