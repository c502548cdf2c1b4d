"""Which variants of a model are recorded: by default, and only when somebody asks for them by name.

What is recorded by default is shipped. Of what is recorded on request, some is shipped where models or published
measurements need it; the docstrings say which.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from planner.catalog.profiles import ModelProfile
from planner.spec.job import QUANTISED
from planner.tape.variants.choice import ONE_SAMPLE
from planner.tape.variants.precision import PLAIN_FP32, PrecisionChoice, on_request_precisions, precisions
from planner.tape.variants.recorded_methods import methods, on_request_methods
from planner.tape.variants.torch_and_card import ages, attention_paths
from planner.tape.variants.trainer_models import CHECKPOINTING, OWN_CODE
from planner.tape.variants.variant import NESTED, OptimizerVariant, SampleVariant, StepVariant, optimizer_ways

Variant = StepVariant | SampleVariant | OptimizerVariant


def default_variants(profile: ModelProfile) -> Iterator[Variant]:
    """All variants of a model that are recorded by default."""
    return itertools.chain(step_variants(profile), sample_variants(profile), optimizer_variants(profile))


def requested_variants(profile: ModelProfile) -> Iterator[Variant]:
    """All variants of a model that are recorded only when somebody names them."""
    return itertools.chain(
        step_variants_on_request(profile),
        sample_variants_on_request(profile),
        optimizer_variants_on_request(profile),
    )


def step_variants(profile: ModelProfile) -> Iterator[StepVariant]:
    """The steps that are recorded by default."""
    return _steps_of(profile, methods(profile))


def step_variants_on_request(profile: ModelProfile) -> Iterator[StepVariant]:
    """Steps that are recorded only when somebody names them, in this order:

    - DoRA and LoKr.
    - LoRA in fp32 without autocast; shipped for ai-toolkit's models.
    - Dropout; shipped for LoRA where a published measurement needs it.
    - Adapters that share their layer's input; shipped on the usual layers over a base in 16 bits.
    - Nested checkpoints; shipped together with those.
    - Other trainers' own models, see `step_variants_in_own_code`.
    - All of these, and those of `step_variants`, as MPS runs them, over a base in 16 or 32 bits.
    """
    others = tuple(_requested_steps_on_cuda(profile))
    yield from others
    for known in (*step_variants(profile), *others):
        if not (known.code or known.older or known.cudnn or known.precision.weights in QUANTISED):
            yield known._replace(mps=True)


def sample_variants(profile: ModelProfile) -> Iterator[SampleVariant]:
    """The forwards that are recorded by default."""
    return _samples_of(profile, methods(profile))


def sample_variants_on_request(profile: ModelProfile) -> Iterator[SampleVariant]:
    """Forwards that are recorded on request only: DoRA and LoKr, LoRA in fp32 without autocast, and adapters that share
    their layer's input."""
    kinds = on_request_methods(profile)
    yield from _samples_of(profile, kinds)
    yield from _samples_of(profile, (*methods(profile), *kinds), on_request_precisions)
    yield from (known._replace(shared=True) for known in sample_variants(profile) if known.precision.casts_inputs)


def optimizer_variants(profile: ModelProfile) -> Iterator[OptimizerVariant]:
    """The optimizer steps that are recorded by default."""
    return _optimizers_of(methods(profile))


def optimizer_variants_on_request(profile: ModelProfile) -> Iterator[OptimizerVariant]:
    """Optimizer steps that are recorded on request only: of DoRA and LoKr; and, shipped, of other trainers' own models
    that give a gradient to some adapters only."""
    yield from _optimizers_of(on_request_methods(profile))
    ways = (("adamw", "foreach"), ("adamw", "fused"), ("adamw-8bit", "foreach"))
    own = {(step.method, step.precision.trained, step.code): None for step in step_variants_in_own_code(profile)}
    for (method, trained, code), (optimizer, how) in itertools.product(own, ways):
        if OWN_CODE[code].with_gradient:
            yield OptimizerVariant(method, trained, optimizer, how, code)


def step_variants_in_own_code(profile: ModelProfile) -> Iterator[StepVariant]:
    """Steps of other trainers' own models. They are shipped, but recorded only where that trainer's code is."""
    for trainer, own in OWN_CODE.items():
        name = trainer.partition("@")[0]
        if not (profile.trained_with(name, "own-code") and profile.trained_with(name, own.trait)):
            continue
        choices = itertools.product(own.recorded, own.checkpointing, own.one_sample)
        for (method, precision), mode, one in choices:
            if method in methods(profile) and precision in precisions(profile, method):
                yield StepVariant(method, precision, mode, one_sample=one, code=trainer)


def _requested_steps_on_cuda(profile: ModelProfile) -> Iterator[StepVariant]:
    kinds = on_request_methods(profile)
    others = (
        *_steps_of(profile, kinds),
        *_steps_of(profile, (*methods(profile), *kinds), on_request_precisions),
    )
    yield from others
    dropping = (known for known in (*step_variants(profile), *others) if known.method.startswith(("lora", "dora")))
    yield from (known._replace(dropout=True) for known in dropping)
    shared = [known._replace(shared=True) for known in step_variants(profile) if known.precision.casts_inputs]
    yield from shared
    if not profile.traits.stages:
        checkpointed = (known for known in (*step_variants(profile), *shared, *others) if known.checkpointing == "full")
        yield from (known._replace(checkpointing=NESTED) for known in checkpointed)
    yield from step_variants_in_own_code(profile)


def _steps_of(
    profile: ModelProfile, methods: Sequence[str], choose: PrecisionChoice = precisions
) -> Iterator[StepVariant]:
    """The steps of some methods, in the precisions that ``choose`` gives for each."""
    for method in methods:
        larger = tuple(batch for batch in profile.shape.batches if batch > 1)
        batches = larger if profile.shape.batches else (None,)
        modes = CHECKPOINTING if profile.traits.checkpoints else ("none",)
        for precision, mode in itertools.product(choose(profile, method), modes):
            for older, cudnn in itertools.product(ages(profile, precision), attention_paths(profile, precision)):
                one = StepVariant(method, precision, mode, one_sample=True, older=older, cudnn=cudnn)
                yield one
                yield from (one._replace(one_sample=False, samples=samples) for samples in batches)


def _samples_of(
    profile: ModelProfile, methods: Sequence[str], choose: PrecisionChoice = precisions
) -> Iterator[SampleVariant]:
    """The forwards of some methods, in the precisions that ``choose`` gives for each, without quantised ones."""
    for method in methods:
        sampled = (each for each in choose(profile, method) if not (each.weights in QUANTISED or each == PLAIN_FP32))
        alone = (True,) if profile.shape.batches == ONE_SAMPLE else (True, False)
        for precision, one in itertools.product(sampled, alone):
            ways = itertools.product(ages(profile, precision), attention_paths(profile, precision))
            yield from (SampleVariant(method, precision, one, older=older, cudnn=cudnn) for older, cudnn in ways)


def _optimizers_of(methods: Sequence[str]) -> Iterator[OptimizerVariant]:
    for method, trained in itertools.product(methods, ("fp32", "half")):
        for optimizer, how in optimizer_ways(method):
            yield OptimizerVariant(method, trained, optimizer, how)
