"""What a strategy means for a job on a machine: the defaults that depend on them."""

from __future__ import annotations

from typing import NewType

from planner.spec.job import Job, Machine, Strategy

DEEPSPEED = {"weights_dtype": "bf16", "adapter_dtype": "bf16", "autocast": "none", "master_weights": "fp32"}
"""What DeepSpeed's ZeRO makes of a module: 16 bits throughout, and an fp32 master of what is trained. Context
parallelism trains the same, as its attention's backward does not run under autocast (see
`planner.layout.sharding.context_parallel`)."""


ResolvedStrategy = NewType("ResolvedStrategy", Strategy)
"""A strategy as `resolve` gives it: nothing is left open. What needs that says so in its type; a plain `Strategy` may
be as somebody typed it. Whoever replaces a field that `resolve` reads (sharding, a dtype) has to resolve again."""


def resolve(job: Job, strategy: Strategy, machine: Machine | None = None) -> ResolvedStrategy:
    """The strategy with everything that was left open filled in: storage by method, ddp for several GPUs.

    `expandable_segments` is switched off where torch cannot do it. What the user said stays as it is.
    """
    changes: dict[str, object] = {}
    exchanges = strategy.context_parallel > 1 and strategy.sharding != "fsdp" and job.method != "sample"
    if strategy.sharding.startswith("zero") or exchanges:
        changes = {field: value for field, value in DEEPSPEED.items() if field not in strategy.model_fields_set}
        trained = "adapter_dtype" if job.method == "lora" else "weights_dtype"
        if changes.get(trained, getattr(strategy, trained)) == "fp32":  # said so; a master of it is no second thing
            changes.pop("master_weights", None)
    elif strategy.weights_dtype is None:
        frozen = "fp16" if strategy.compute_dtype == "fp16" else "bf16"
        changes["weights_dtype"] = "fp32" if job.method == "full" else frozen
    if strategy.compute_dtype == "fp16" and "autocast" not in strategy.model_fields_set and "autocast" not in changes:
        changes["autocast"] = "fp16"
    if job.method == "sample" and "autocast" not in strategy.model_fields_set and strategy.weights_dtype != "fp32":
        changes["autocast"] = "none"  # diffusers' pipelines compute in the weights' own dtype
    if strategy.sharding == "fsdp" and "autocast" not in strategy.model_fields_set:
        changes["autocast"] = "none"  # weights are cast as they are gathered
    if job.experts == "both" and "inactive_expert" not in strategy.model_fields_set:
        changes["inactive_expert"] = "gpu"
    if machine is not None:
        said = strategy.model_fields_set
        if machine.world > strategy.context_parallel and "sharding" not in said and job.method != "sample":
            changes["sharding"] = "ddp"
        if machine.os == "windows" and "expandable_segments" not in said:
            changes["expandable_segments"] = False
    return ResolvedStrategy(strategy.replace(**changes) if changes else strategy)
