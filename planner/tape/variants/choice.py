"""Which recording answers for a configuration; where none does, a NotRecordedError says what to use instead."""

from __future__ import annotations

from planner.catalog.profiles import ModelProfile
from planner.errors import NotRecordedError, VplanError
from planner.spec.job import QUANTISED, Job, Strategy
from planner.tape.variants.precision import (
    Precision,
    on_request_precisions,
    precisions,
    trained_storage,
    unquantised_precisions,
)
from planner.tape.variants.recorded_methods import recorded_method, refuse_unrecorded_adapters
from planner.tape.variants.torch_and_card import NEWEST, TorchAndCard, attention_paths, is_older
from planner.tape.variants.variant import (
    NESTED,
    UNPAGED,
    OptimizerVariant,
    SampleVariant,
    StepVariant,
    optimizer_ways,
)

ONE_SAMPLE = (1,)
"""The batches of a model whose class takes one sample at a time."""


def step_variant(
    profile: ModelProfile,
    job: Job,
    strategy: Strategy,
    batch: int,
    runs_on: TorchAndCard = NEWEST,
) -> StepVariant:
    """The recording of a step that answers for a job and a resolved strategy.

    Checkpoints in host RAM or in 8 bits are transformations of ``full``. Partial checkpointing is composed of ``none``,
    which is returned for it, and ``full``. Raises a NotRecordedError, with what to use instead, where none answers.
    """
    precision = Precision.of(job, strategy)
    mode = {"offload": "full", "fp8": "full", "partial": "none"}.get(
        strategy.gradient_checkpointing, strategy.gradient_checkpointing
    )
    if strategy.nested_checkpointing:
        if profile.traits.stages:
            fault = f"{profile.title} checkpoints parts of its blocks already, so none are nested"
            raise NotRecordedError(fault, "leave out --nested-checkpointing")
        mode = NESTED
    if mode != "none" and not profile.traits.checkpoints:
        fault = f"diffusers' {profile.diffusers_class} has no gradient checkpointing"
        raise NotRecordedError(fault, "use --gradient-checkpointing none")
    if job.method == "sample":
        raise VplanError("method sample is not estimated yet", "use --method lora or full")
    method = recorded_method(profile, job, strategy)
    refuse_unrecorded_adapters(profile, job, strategy)
    known = precisions(profile, method)
    if precision not in known + on_request_precisions(profile, method):
        fault = f"{job.trains} of {profile.name} is not recorded with {' '.join(precision.flags)}"
        raise NotRecordedError(fault, f"use {precision.nearest(known)}")
    if strategy.gradient_checkpointing in ("offload", "fp8", "partial") and profile.traits.stages:
        fault = f"{profile.title} checkpoints parts of its blocks, for which {strategy.gradient_checkpointing}"
        raise NotRecordedError(f"{fault} is not estimated", "use --gradient-checkpointing full")
    _refuse_batch(profile, batch)
    samples = batch if profile.shape.batches and batch > 1 else None
    dropout, shared = job.method == "lora" and job.lora_dropout > 0, strategy.adapter_inputs == "shared"
    mps = runs_on.mps
    older = not mps and is_older(profile, precision, runs_on.torch)
    cudnn = runs_on.cudnn and not mps and True in attention_paths(profile, precision)
    return StepVariant(method, precision, mode, batch == 1, samples, dropout, shared, older, cudnn=cudnn, mps=mps)


def sample_variant(
    profile: ModelProfile,
    job: Job,
    strategy: Strategy,
    batch: int,
    runs_on: TorchAndCard = NEWEST,
) -> SampleVariant:
    """The recording of a forward that answers for a job. Sampling without adapters is the forward of full fine-tuning.
    Raises a NotRecordedError where none answers."""
    method = "full" if job.method == "sample" else recorded_method(profile, job, strategy)
    if profile.shape.batches == ONE_SAMPLE:
        _refuse_batch(profile, batch)
    precision = Precision.of(job, strategy)
    if job.method != "sample" and precision.weights in QUANTISED:  # its activations are those over 16 bits
        precision = precision._replace(weights="half")
    known = unquantised_precisions(method)
    if precision not in known + on_request_precisions(profile, method):
        what = "sampling" if job.method == "sample" else "validation"
        fix = f"use {precision.nearest(known)}" + (", or --validation-mode off" if what == "validation" else "")
        raise NotRecordedError(f"{what} is not recorded with {' '.join(precision.flags)}", fix)
    shared = strategy.adapter_inputs == "shared" and precision.casts_inputs
    cudnn = runs_on.cudnn and True in attention_paths(profile, precision)
    return SampleVariant(method, precision, batch == 1, shared, is_older(profile, precision, runs_on.torch), cudnn)


def optimizer_variant(profile: ModelProfile, job: Job, strategy: Strategy) -> OptimizerVariant:
    """The recording of the optimizer that answers for a job. Raises a NotRecordedError where none does."""
    method = recorded_method(profile, job, strategy)
    optimizer, how = UNPAGED.get(strategy.optimizer, strategy.optimizer), strategy.optimizer_step
    if optimizer != "adamw" and how == "loop":
        how = "foreach"
    if (optimizer, how) not in optimizer_ways(method):
        fault = f"no tape for {method} with optimizer {strategy.optimizer} ({strategy.optimizer_step})"
        raise NotRecordedError(fault, "leave --optimizer-step out")
    return OptimizerVariant(method, trained_storage(job, strategy), optimizer, how)


def _refuse_batch(profile: ModelProfile, batch: int) -> None:
    """Raises a NotRecordedError for a batch that is not among those a model is recorded at, where it lists some."""
    counts = profile.shape.batches
    if not counts or batch in counts:
        return
    fault = f"{profile.title} processes a batch sample by sample, and batch {batch} is not recorded"
    if counts == ONE_SAMPLE:
        fault = f"diffusers' {profile.diffusers_class} takes one sample at a time of {profile.title}, not {batch}"
    batches = " or ".join(map(str, counts))
    raise NotRecordedError(fault, f"use --batch-size {batches}, with --gradient-accumulation for more")
