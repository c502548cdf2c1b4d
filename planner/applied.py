"""What vplan's own training step applies of a plan today; whatever else a plan asks for is refused by name.

A probe that silently left a switch out would measure another plan. `trainers.step` is what applies; this is its list.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner import catalog
from planner.errors import VplanError
from planner.job import Job, Machine, Strategy
from planner.plan import Plan
from planner.rules import check, resolve
from planner.shapes import check_blocks, check_job

VALUES: dict[str, tuple[object, ...]] = {
    "weights_dtype": ("fp32", "bf16", "fp16", "fp8", "int8", "nf4"),
    "master_weights": ("none", "fp32"),
    "optimizer": ("adamw", "adamw-8bit", "adamw-8bit-paged", "adafactor", "lion", "prodigy", "came", "muon"),
    "optimizer_step": ("foreach", "fused", "loop", "backward"),
    "gradient_accumulation": (1,),
    "ema": ("none",),
    "sharding": ("none",),
    "offload_optimizer": ("none",),
    "offload_gradients": ("none",),
    "offload_params": ("none",),
    "swap_blocks": (0,),
    "text_encoder": ("cached",),
    "vae": ("cached",),
    "validation_mode": ("off",),
    "group_offload": ("none",),
    "attention": ("sdpa",),
    "compile": ("none",),
    "context_parallel": (1,),
    "inactive_expert": ("absent",),
}
"""Strategy fields of which only some values are applied."""

EVERY_VALUE = frozenset({
    "adapter_dtype",
    "autocast",
    "gradient_checkpointing",
    "checkpointed_blocks",
    "expandable_segments",
    # What these act on is refused above, so no value of theirs means anything yet.
    "grad_buckets",
    "text_encoder_dtype",
    "vae_dtype",
    "vae_tiling",
    "vae_slicing",
    "group_offload_stream",
    # The step's inputs have autocast's dtype (without autocast the weights'), as in the published trainers.
    "compute_dtype",
})  # fmt: skip
"""Strategy fields that may say anything."""


def settled(plan: Plan) -> Plan:
    """The plan's three records with open fields filled in, or a VplanError for what contradicts or is not applied."""
    strategy = resolve(plan.job, plan.strategy, plan.machine)
    profile = catalog.model(plan.job.model)
    check_job(profile, plan.job)
    check_blocks(profile, strategy)
    check(plan.job, strategy, plan.machine)
    if plan.trainer != "vplan":
        raise VplanError(f"the plan is for {plan.trainer}; a probe runs vplan's own step", 'write trainer = "vplan"')
    for what, fix in _not_applied(plan.job, strategy, plan.machine, profile.shape.references):
        raise VplanError(f"{what} is not applied by vplan's training step yet, so it cannot be measured", fix)
    return Plan(job=plan.job.replace(model=profile.name), strategy=strategy, machine=plan.machine)


def _not_applied(job: Job, strategy: Strategy, machine: Machine, references: int) -> Iterator[tuple[str, str]]:
    """What is asked for and not applied, and what to write instead. The model's step takes ``references`` images."""
    if machine.world > 1:
        yield f"training on {machine.world} GPUs", "write gpus = 1, nodes = 1"
    if job.method == "sample":
        yield "method sample", "write method = lora or full"
    if job.references not in (0, references):
        yield f"references {job.references}", f"write references = {references}"
    if job.experts == "both":
        yield "training both experts", "write experts = high or low"
    for field, values in VALUES.items():
        value = getattr(strategy, field)
        if value not in values:
            yield f"{field} {value}", f"write {field} = {' or '.join(map(str, values))}"
