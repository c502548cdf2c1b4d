"""The plan with which a run continues after running out of memory: same training, same checkpoint, less memory.

The plan's own ladder comes first, but only rungs that keep the global batch, the optimizer and the sharding (`KEPT`),
so that the last checkpoint can still be loaded. Then come switches that do not affect the result: gradient
checkpointing, its offload, and half the micro-batch with twice the accumulation.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.errors import VplanError
from planner.launch.supported import supported_plan
from planner.layout.correction import SEPARATE_PHASES
from planner.spec.job import Job, Strategy
from planner.spec.plan import Estimate, Plan

KEPT = ("optimizer", "master_weights", "adapter_dtype", "weights_dtype", "compute_dtype", "autocast", "sharding", "ema")
"""Strategy fields that a checkpoint's state or the losses depend on."""

ENCODING = ("text_encoder_dtype", "vae_dtype", "vae_tiling")
"""Strategy fields that encoded samples depend on. They stay as they are: the data is encoded already, and a resumed
run continues with the samples that it started with."""

STRONGER = {
    "none": ("full", "offload"),
    "partial": ("full", "offload"),
    "full": ("offload",),
    "fp8": ("offload",),
    "offload": (),
}
"""Gradient checkpointing mode -> modes that keep less on the GPU and do not affect the result."""


def next_plan(plan: Plan, estimate: Estimate | None) -> Plan | None:
    """The plan to continue with after running out of memory; None if neither the ladder nor a switch gives one.

    ``estimate``: of the plan that ran out of GPU memory. The ladder is ordered by speed, so its remaining rungs may
    need more than the one that failed; those are left out. None: not estimated, or host RAM ran out.
    """
    for candidate in (*_ladder(plan, estimate), *_switches(plan)):
        try:
            return supported_plan(candidate, trained=True).replace(ladder=candidate.ladder, training=plan.training)
        except VplanError:  # not for this model, or not supported by training
            continue
    return None


def _ladder(plan: Plan, estimate: Estimate | None) -> Iterator[Plan]:
    """The rungs that continue the same training, and are estimated to need less memory than what ran out."""
    for place, rung in enumerate(plan.ladder):
        needs_less = estimate is None or _training_bytes(rung) < _training_bytes(estimate)
        if needs_less and _trains_alike(plan, rung):
            strategy = rung.strategy.replace(**{field: getattr(plan.strategy, field) for field in ENCODING})
            yield Plan(job=rung.job, strategy=strategy, machine=rung.machine, ladder=plan.ladder[place + 1 :])


def _trains_alike(plan: Plan, rung: Estimate) -> bool:
    """Whether a rung of the ladder gives the plan's losses, and can load its checkpoints."""
    before, after = plan.strategy, rung.strategy
    rounds_more = after.gradient_checkpointing == "fp8" and before.gradient_checkpointing != "fp8"
    return (
        not rounds_more
        and all(getattr(after, field) == getattr(before, field) for field in KEPT)
        # An optimizer inside backward has its states by parameter, and clips no gradients.
        and (after.optimizer_step == "backward") == (before.optimizer_step == "backward")
        and _global_batch(rung.job, after) == _global_batch(plan.job, before)
        and _without_batch_sizes(rung.job) == _without_batch_sizes(plan.job)
        and rung.machine == plan.machine
    )


def _training_bytes(estimate: Estimate) -> int:
    """Device bytes of an estimate's peak, without encoding that was done before training."""
    return max(peak.device_bytes for phase, peak in estimate.phases.items() if phase not in SEPARATE_PHASES)


def _global_batch(job: Job, strategy: Strategy) -> list[int]:
    """Samples of one optimizer step on one GPU, by shape."""
    return [(shape.batch_size or job.batch_size) * strategy.gradient_accumulation for shape in job.shapes]


def _without_batch_sizes(job: Job) -> Job:
    """The job with micro-batches of one sample, to compare everything else."""
    return job.replace(batch_size=1, buckets=tuple(bucket.replace(batch_size=None) for bucket in job.buckets))


def _switches(plan: Plan) -> Iterator[Plan]:
    """The plan with more checkpointing, then with half the micro-batch and twice the accumulation."""
    for mode in STRONGER[plan.strategy.gradient_checkpointing]:
        strategy = plan.strategy.replace(gradient_checkpointing=mode, checkpointed_blocks=None)
        yield Plan(job=plan.job, strategy=strategy, machine=plan.machine)
    sizes = [shape.batch_size or plan.job.batch_size for shape in plan.job.shapes]
    if any(size % 2 for size in sizes) or plan.strategy.optimizer_step == "backward":
        return
    buckets = tuple(
        bucket.replace(batch_size=bucket.batch_size // 2) if bucket.batch_size else bucket
        for bucket in plan.job.buckets
    )
    job = plan.job.replace(batch_size=max(1, plan.job.batch_size // 2), buckets=buckets)
    twice = plan.strategy.replace(gradient_accumulation=2 * plan.strategy.gradient_accumulation)
    yield Plan(job=job, strategy=twice, machine=plan.machine)


def difference(before: Plan, after: Plan) -> str:
    """The fields of job and strategy that differ between two plans, as text: "swap_blocks 0 -> 8". Omits buckets."""
    changes = [
        f"{field} {getattr(old, field)} -> {getattr(new, field)}"
        for old, new in ((before.job, after.job), (before.strategy, after.strategy))
        for field in type(old).model_fields
        if getattr(old, field) != getattr(new, field) and field != "buckets"
    ]
    return ", ".join(changes)
