"""Fills in what a strategy leaves open: the defaults that depend on the job and the machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, NewType

from planner.spec.job import Job, Machine, Strategy

DEEPSPEED = {"weights_dtype": "bf16", "adapter_dtype": "bf16", "autocast": "none", "master_weights": "fp32"}
"""What DeepSpeed's ZeRO makes of a module: 16 bits throughout, and an fp32 master of what is trained. Context
parallelism trains the same, as its attention's backward does not run under autocast (see
`planner.layout.sharding.context_parallel`)."""


class Dependent(NamedTuple):
    """A strategy field that refines one value of another field, and has no effect beside its other values."""

    field: str
    idle: Any
    """its value where it says nothing"""
    of: str
    beside: frozenset[Any]
    """the values of `of` that it says more about"""


CHECKPOINTED = frozenset({"full", "offload", "fp8", "partial"})
"""Values of `gradient_checkpointing` that recompute anything."""

DEPENDENTS = (
    Dependent("checkpointed_blocks", None, "gradient_checkpointing", frozenset({"partial"})),
    Dependent("nested_checkpointing", False, "gradient_checkpointing", CHECKPOINTED),
    Dependent("group_offload_stream", False, "group_offload", frozenset({"block", "leaf"})),
    Dependent("fsdp_replicas", 1, "sharding", frozenset({"fsdp"})),
)
"""Fields that contradict another field's new value and have to go with its old one."""


ResolvedStrategy = NewType("ResolvedStrategy", Strategy)
"""A strategy as `resolve` gives it: nothing is left open. What needs that says so in its type; a plain `Strategy` may
be as somebody typed it. Whoever replaces a field that `resolve` reads (sharding, a dtype) has to resolve again."""


def resolve(job: Job, strategy: Strategy, machine: Machine | None = None) -> ResolvedStrategy:
    """The strategy with all open fields filled in: storage formats by method, ddp for several GPUs.

    `expandable_segments` is switched off if torch cannot use them. What the user set stays as it is.
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


def left_behind(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Field -> its idle value, for the `DEPENDENTS` that have no effect beside these fields' values.

    Use it when a field is replaced: the fields that refined its old value are reset with it. Fields that are absent are
    left absent.
    """
    return {
        row.field: row.idle
        for row in DEPENDENTS
        if fields.get(row.field, row.idle) != row.idle and row.of in fields and fields[row.of] not in row.beside
    }
