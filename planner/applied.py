"""What vplan's own training step applies of a plan today; whatever else a plan asks for is refused by name.

A probe that silently left a switch out would measure another plan. `trainers.step` is what applies; this is its list.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner import catalog
from planner.errors import VplanError
from planner.facts import ModelProfile
from planner.job import QUANTISED, SPLIT, Job, Machine, Strategy
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
    "swap_blocks",
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


TRAINED: dict[str, tuple[object, ...]] = {
    **{field: applied for field, applied in VALUES.items() if field != "gradient_accumulation"},
    # CAME and Muon have no checkpoint yet.
    "optimizer": ("adamw", "adamw-8bit", "adamw-8bit-paged", "adafactor", "lion", "prodigy"),
    "sharding": ("none", "ddp", "zero-1", "zero-2", "zero-3", "fsdp"),
    "offload_optimizer": ("none", "cpu"),
    "offload_params": ("none", "cpu"),
    "ema": ("none", "gpu", "cpu"),
}
"""The same of `vplan train`, which has a loop around the step, and other processes beside it."""


def settled(plan: Plan, *, trained: bool = False) -> Plan:
    """The plan's three records with open fields filled in, or a VplanError for what contradicts or is not applied.

    `trained`: by `vplan train`; else by a probe, which is one process and a few single steps.
    """
    strategy = resolve(plan.job, plan.strategy, plan.machine)
    profile = catalog.model(plan.job.model)
    check_job(profile, plan.job)
    check_blocks(profile, strategy)
    check(plan.job, strategy, plan.machine)
    if plan.trainer != "vplan":
        does = "vplan trains by" if trained else "a probe runs"
        raise VplanError(f"the plan is for {plan.trainer}; {does} vplan's own step", 'write trainer = "vplan"')
    if trained:
        for what, fix in _not_trained(profile, plan.job, strategy):
            raise VplanError(f"{what} is not applied by vplan's training yet", fix)
    else:
        for what, fix in _not_applied(profile, plan.job, strategy, plan.machine):
            raise VplanError(f"{what} is not applied by vplan's training step yet, so it cannot be measured", fix)
    return Plan(job=plan.job.replace(model=profile.name), strategy=strategy, machine=plan.machine)


def _not_applied(profile: ModelProfile, job: Job, strategy: Strategy, machine: Machine) -> Iterator[tuple[str, str]]:
    """What is asked for and not applied, and what to write instead."""
    if machine.world > 1:
        yield f"training on {machine.world} GPUs", "write gpus = 1, nodes = 1"
    yield from _neither(profile, job, strategy, VALUES)


def _neither(
    profile: ModelProfile, job: Job, strategy: Strategy, values: dict[str, tuple[object, ...]]
) -> Iterator[tuple[str, str]]:
    """What nobody applies, and values of fields that are none of those listed."""
    if job.method == "sample":
        yield "method sample", "write method = lora or full"
    if job.references not in (0, profile.shape.references):
        yield f"references {job.references}", f"write references = {profile.shape.references}"
    if job.experts == "both":
        yield "training both experts", "write experts = high or low"
    if strategy.swap_blocks and job.method == "full":
        yield "swap_blocks of weights that are trained", "write swap_blocks = 0"
    weights = strategy.weights(job.method)
    if strategy.swap_blocks and weights in QUANTISED:
        yield f"swap_blocks of weights in {weights}", "write swap_blocks = 0, or weights_dtype = bf16"
    for field, applied in values.items():
        value = getattr(strategy, field)
        if value not in applied:
            yield f"{field} {value}", f"write {field} = {' or '.join(map(str, applied))}"


def _not_trained(profile: ModelProfile, job: Job, strategy: Strategy) -> Iterator[tuple[str, str]]:
    """What training asks for beside the step's own switches."""
    yield from _neither(profile, job, strategy, TRAINED)
    alone = strategy.sharding in ("none", "ddp")
    if strategy.weights(job.method) in QUANTISED and not alone:
        fix = "use --sharding ddp, or --weights-dtype bf16"
        yield f"a base in {strategy.weights(job.method)} under {strategy.sharding}", fix
    if "fp16" in (strategy.autocast, strategy.weights(job.method)) or _computes_in_fp16(strategy):
        yield "fp16, whose gradients vanish without loss scaling,", "use bf16"
    if strategy.offload_optimizer != "none" and alone:
        yield "an optimizer in host RAM outside ZeRO and FSDP", "use --zero-stage 2, or --offload-optimizer none"
    if strategy.sharding.startswith("zero") and strategy.compute_dtype != strategy.weights(job.method):
        fix = "give the two the same format"
        yield f"weights_dtype {strategy.weights_dtype} computed in {strategy.compute_dtype} under ZeRO", fix
    if strategy.sharding == "zero-1" and strategy.offload_optimizer != "none":
        yield "offload_optimizer under zero-1", "use --zero-stage 2"
    if profile.experts == 2:
        yield "the range of noise levels that belongs to one of two experts", "train a model that is one"


def _computes_in_fp16(strategy: Strategy) -> bool:
    """Whether DeepSpeed or FSDP2 would run the model in fp16."""
    return strategy.sharding in SPLIT and strategy.compute_dtype == "fp16"
