"""What vplan's own training step applies of a plan today; whatever else a plan asks for is refused by name.

A probe that silently left a switch out would measure another plan. `trainers.step.step` is what applies; this is its
list.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.catalog import lookup
from planner.catalog.profiles import ModelProfile
from planner.catalog.shapes import check_blocks, check_job
from planner.errors import VplanError
from planner.spec.job import QUANTISED, SPLIT, Job, Machine, Strategy
from planner.spec.plan import Plan
from planner.spec.rules import check, resolve

VALUES: dict[str, tuple[object, ...]] = {
    "weights_dtype": ("fp32", "bf16", "fp16", "fp8", "int8", "nf4"),
    "master_weights": ("none", "fp32"),
    "optimizer": ("adamw", "adamw-8bit", "adamw-8bit-paged", "adafactor", "lion", "prodigy", "came", "muon"),
    "optimizer_step": ("foreach", "fused", "loop", "backward"),
    "ema": ("none", "gpu", "cpu"),
    "sharding": ("none", "ddp", "zero-1", "zero-2", "zero-3", "fsdp"),
    "offload_optimizer": ("none", "cpu", "nvme"),
    "offload_gradients": ("none", "cpu", "nvme"),
    "offload_params": ("none", "cpu"),
    "text_encoder": ("cached",),
    "vae": ("cached",),
    "validation_mode": ("off", "on", "offload"),
    "group_offload": ("none", "block", "leaf"),
    "attention": ("sdpa", "flash", "cudnn", "efficient"),
    "compile": ("none", "blocks"),
    "inactive_expert": ("absent", "gpu", "cpu"),
}
"""Strategy fields of which only some values are applied, by training and by a probe, which sets up the same."""

EVERY_VALUE = frozenset({
    "adapter_dtype",
    "autocast",
    "gradient_checkpointing",
    "checkpointed_blocks",
    "expandable_segments",
    "swap_blocks",
    "gradient_accumulation",
    "context_parallel",
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


def settled(plan: Plan, *, trained: bool = False) -> Plan:
    """The plan's three records with open fields filled in, or a VplanError for what contradicts or is not applied.

    `trained`: by `vplan train`; else by a probe, which is a few steps on one computer.
    """
    strategy = resolve(plan.job, plan.strategy, plan.machine)
    profile = lookup.model(plan.job.model)
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
        check_computers(plan.machine)
        for what, fix in _not_applied(profile, plan.job, strategy):
            raise VplanError(f"{what} is not applied by vplan's training step yet, so it cannot be measured", fix)
    return Plan(job=plan.job.replace(model=profile.name), strategy=strategy, machine=plan.machine)


def check_computers(machine: Machine) -> None:
    """A VplanError where a plan is for more than the one computer that a probe runs on."""
    if machine.nodes > 1:
        fault = f"the plan is for {machine.nodes} computers, and what is measured is one of them"
        raise VplanError(fault, "write nodes = 1: there each GPU takes as much (ddp), or more (what shards)")


def _not_applied(profile: ModelProfile, job: Job, strategy: Strategy) -> Iterator[tuple[str, str]]:
    """What is asked for and not applied, and what to write instead."""
    yield from _neither(profile, job, strategy)
    yield from _not_set_up(profile, job, strategy)
    if strategy.validation_mode != "off":
        yield from _not_sampled(profile, job, strategy)


def _neither(profile: ModelProfile, job: Job, strategy: Strategy) -> Iterator[tuple[str, str]]:
    """What nobody applies, and values of fields that are none of those listed."""
    if job.method == "sample":
        yield "method sample", "write method = lora or full"
    if job.references not in (0, profile.shape.references, int(profile.shape.takes_references)):
        yield f"references {job.references}", f"write references = {profile.shape.references}"
    if strategy.inactive_expert != "absent" and job.experts != "both":
        yield f"inactive_expert {strategy.inactive_expert} of one that is not trained", "write inactive_expert = absent"
    if job.experts == "both":
        yield from _not_in_turn(job, strategy)
    weights = strategy.weights(job.method)
    if strategy.swap_blocks and job.method == "full" and strategy.ema != "none":
        yield "ema of trained weights that swap_blocks moves", "write ema = none, or swap_blocks = 0"
    yield from _compiled(strategy, weights)
    for field, applied in VALUES.items():
        value = getattr(strategy, field)
        if value not in applied:
            yield f"{field} {value}", f"write {field} = {' or '.join(map(str, applied))}"


def _compiled(strategy: Strategy, weights: str) -> Iterator[tuple[str, str]]:
    """What torch.compile cannot take in. Compiled as a whole, a model would leave no place between its blocks where
    checkpoints, swap and FSDP2 do their work."""
    if strategy.compile == "full":
        yield "compile full", "write compile = blocks, which leaves room between them for checkpoints and swap"
    if strategy.compile == "blocks" and weights == "fp8":  # a traced layer multiplies by what was cast back already
        yield "compile of weights in fp8, which are cast as each layer runs,", "write weights_dtype = int8 or bf16"
    if strategy.compile == "blocks" and strategy.sharding.startswith("zero"):
        fix = "use --sharding ddp or fsdp, or --compile none"
        yield f"compile under {strategy.sharding}, whose engine wraps what is inside the blocks,", fix


def _not_trained(profile: ModelProfile, job: Job, strategy: Strategy) -> Iterator[tuple[str, str]]:
    """What training asks for beside the step's own switches."""
    yield from _neither(profile, job, strategy)
    yield from _not_set_up(profile, job, strategy)
    if strategy.validation_mode != "off":
        yield from _not_sampled(profile, job, strategy)
    if profile.experts == 2 and job.experts is None:
        yield "one of two experts that is not named", "write experts = both, or high or low: a run each"
    if profile.experts == 2 and profile.training.boundary is None:
        yield "one of two experts without the noise level between them", "write boundary into its profile"


def _not_in_turn(job: Job, strategy: Strategy) -> Iterator[tuple[str, str]]:
    """What two experts that take turns cannot do. What is trained has its optimizer's states beside it, and buckets of
    DDP, so it does not come and go."""
    if strategy.sharding in SPLIT:
        yield f"both experts under {strategy.sharding}", "use --sharding ddp, or a run for each: --experts high"
    if strategy.swap_blocks and strategy.inactive_expert == "gpu":
        yield "swap_blocks beside an idle expert that stays on the GPU whole", "use --inactive-expert cpu"
    if strategy.context_parallel > 1:
        yield "context_parallel of both experts", "use --context-parallel 1, or a run for each: --experts high"
    if job.method == "full" and strategy.inactive_expert == "cpu":
        yield "full training of experts that wait in host RAM", "use --inactive-expert gpu, or a run for each"


def _not_set_up(profile: ModelProfile, job: Job, strategy: Strategy) -> Iterator[tuple[str, str]]:
    """What the engines behind sharding are not set up for."""
    alone = strategy.sharding in ("none", "ddp")
    if strategy.weights(job.method) in QUANTISED and not alone:
        fix = "use --sharding ddp, or --weights-dtype bf16"
        yield f"a base in {strategy.weights(job.method)} under {strategy.sharding}", fix
    if uses_fp16(job, strategy) and not scales_loss(job, strategy):
        how = "under " + strategy.sharding if strategy.sharding in SPLIT else "of trained weights that are not fp32"
        if strategy.optimizer_step == "backward":
            how = "with the optimizer inside backward, where gradients are scaled,"
        yield f"fp16 {how}", "use bf16"
    if strategy.sharding.startswith("zero") and strategy.compute_dtype != strategy.weights(job.method):
        fix = "give the two the same format"
        yield f"weights_dtype {strategy.weights_dtype} computed in {strategy.compute_dtype} under ZeRO", fix
    if strategy.sharding == "zero-1" and strategy.offload_optimizer != "none":
        yield "offload_optimizer under zero-1", "use --zero-stage 2"
    if strategy.context_parallel > 1:
        yield from _split_tokens(profile, strategy)


def _split_tokens(profile: ModelProfile, strategy: Strategy) -> Iterator[tuple[str, str]]:
    """What ranks that share a sample cannot do: their shares of a gradient are added up when all of it is there."""
    if profile.traits.split is None:
        yield f"context_parallel of {profile.title}, whose tokens diffusers cannot split,", "use --context-parallel 1"
    if strategy.optimizer_step == "backward":
        yield "context_parallel with the optimizer inside backward", "use --optimizer-step foreach"
    if strategy.offload_gradients != "none":
        yield "context_parallel with offload_gradients", "leave out --offload-gradients"
    if strategy.compile != "none":
        yield "context_parallel of compiled blocks", "use --compile none"


def uses_fp16(job: Job, strategy: Strategy) -> bool:
    """Whether gradients go through fp16, where small ones vanish."""
    weights = strategy.weights(job.method)
    computes = strategy.sharding in SPLIT or weights in QUANTISED
    return "fp16" in (strategy.autocast, weights) or (computes and strategy.compute_dtype == "fp16")


def scales_loss(job: Job, strategy: Strategy) -> bool:
    """Whether the step scales its loss: torch's scaler unscales fp32 gradients, behind backward, alike on all ranks."""
    trained = strategy.adapter_dtype if job.method == "lora" else strategy.weights(job.method)
    behind = strategy.optimizer_step != "backward" and strategy.sharding not in SPLIT
    return job.method != "sample" and uses_fp16(job, strategy) and trained == "fp32" and behind


def _not_sampled(profile: ModelProfile, job: Job, strategy: Strategy) -> Iterator[tuple[str, str]]:
    """Ways in which samples cannot be made while training."""
    moves = strategy.validation_mode == "offload" or strategy.group_offload != "none"
    if strategy.weights(job.method) == "int8" and moves:
        yield "sending weights in int8 away for a sample", "use --validation-mode on, without group_offload"
    if profile.experts == 2 and job.experts != "both":
        yield "a sample where one of two experts is there, and it goes through both,", "use --validation-mode off"
    if job.experts == "both" and strategy.group_offload != "none":
        yield "group_offload of both experts", "use --inactive-expert cpu, with which they take turns in samples too"
    if profile.inputs.get("sound"):
        fault = f"a sample of {profile.title}, whose pipeline is not diffusers' and finds the face in a picture first,"
        yield fault, "use --validation-mode off"
