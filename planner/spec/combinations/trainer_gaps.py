"""What vplan's own training step does not apply, though it contradicts nothing; a probe runs the same step.

A probe that silently left a switch out would measure another plan. `trainers.step.step` is what applies; this is its
list, with the values of single fields that `planner.spec.job` marks as untrained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from planner.spec.combinations.combination import Combination, ModelSummary
from planner.spec.configuration import Configuration
from planner.spec.field_notes import ALL
from planner.spec.fp16 import scales_loss, uses_fp16
from planner.spec.job import NOTES, QUANTISED


@dataclass(frozen=True, slots=True)
class TrainerConfiguration(Configuration):
    """A configuration that our own trainer is asked to train or probe, with the summary of the model."""

    model: ModelSummary
    is_probe: bool
    """a few steps for a measurement, not a training"""

    @property
    def usual_references(self) -> tuple[int, ...]:
        """The numbers of reference images per sample that our training step can take for this model."""
        return (0, self.model.references, int(self.model.takes_references))

    @property
    def unscaled_fp16(self) -> bool:
        """Whether gradients are in fp16 and the step cannot scale its loss for them."""
        return uses_fp16(self.job, self.strategy) and not scales_loss(self.job, self.strategy)

    @property
    def lone_expert(self) -> bool:
        """Whether the model has two experts and the job trains only one of them."""
        return self.model.experts == 2 and not self.both_experts


def _row(applies: Callable[[TrainerConfiguration], bool], reason: str, fix: str) -> Combination[TrainerConfiguration]:
    return Combination("our trainer cannot", applies, reason, fix)


# Two experts that take turns: what is trained has its optimizer's states beside it, and buckets of DDP, so it does not
# come and go.
_EXPERTS_IN_TURN = (
    _row(
        lambda s: s.both_experts and s.splits,
        "both experts under {0.strategy.sharding}",
        "use --sharding ddp, or a run for each: --experts high",
    ),
    _row(
        lambda s: s.both_experts and s.strategy.swap_blocks > 0 and s.strategy.inactive_expert == "gpu",
        "swap_blocks beside an idle expert that stays on the GPU whole",
        "use --inactive-expert cpu",
    ),
    _row(
        lambda s: s.both_experts and s.strategy.context_parallel > 1,
        "context_parallel of both experts",
        "use --context-parallel 1, or a run for each: --experts high",
    ),
    _row(
        lambda s: s.both_experts and s.job.method == "full" and s.strategy.inactive_expert == "cpu",
        "full training of experts that wait in host RAM",
        "use --inactive-expert gpu, or a run for each",
    ),
)


def _not_lora(
    applies: Callable[[TrainerConfiguration], bool], what: str, fix: str
) -> Combination[TrainerConfiguration]:
    """A row of DoRA, whose magnitudes begin as lengths of the rows in the weights' files, and of LoKr."""
    return _row(lambda s: s.job.trains in ("dora", "lokr") and applies(s), f"{{0.job.adapter}} {what}", fix)


_NOT_LORA = (
    _not_lora(lambda s: s.weights in QUANTISED, "over a base in {0.weights}", "use --weights-dtype bf16"),
    _not_lora(lambda s: s.splits, "under {0.strategy.sharding}", "use --sharding ddp"),
    _not_lora(lambda s: s.strategy.context_parallel > 1, "under context_parallel", "use --context-parallel 1"),
    _not_lora(lambda s: s.strategy.compile != "none", "in compiled blocks", "use --compile none"),
)

_COMPILED = (
    # Compiled as a whole, a model would leave no place between its blocks where checkpoints, swap and FSDP2 do their
    # work.
    _row(
        lambda s: s.strategy.compile == "full",
        "compile full",
        "write compile = blocks, which leaves room between them for checkpoints and swap",
    ),
    _row(  # a traced layer multiplies by what was cast back already
        lambda s: s.strategy.compile == "blocks" and s.weights == "fp8",
        "compile of weights in fp8, which are cast as each layer runs,",
        "write weights_dtype = int8 or bf16",
    ),
    _row(
        lambda s: s.strategy.compile == "blocks" and s.zero,
        "compile under {0.strategy.sharding}, whose engine wraps what is inside the blocks,",
        "use --sharding ddp or fsdp, or --compile none",
    ),
)


def _says_other_than(field: str, applied: tuple[object, ...]) -> Callable[[TrainerConfiguration], bool]:
    return lambda s: getattr(s.strategy, field) not in applied


_SINGLE_VALUES = tuple(
    _row(
        _says_other_than(field, applied),
        f"{field} {{0.strategy.{field}}}",
        f"write {field} = {' or '.join(map(str, applied))}",
    )
    for field, note in NOTES.items()
    if (applied := note.trained) != ALL
)

_NOBODY = (
    _row(lambda s: s.job.method == "sample", "method sample", "write method = lora or full"),
    _row(
        lambda s: s.job.references not in s.usual_references,
        "references {0.job.references}",
        "set references = {0.model.references}",
    ),
    _row(
        lambda s: s.strategy.inactive_expert != "absent" and not s.both_experts,
        "inactive_expert {0.strategy.inactive_expert} of one that is not trained",
        "write inactive_expert = absent",
    ),
    *_EXPERTS_IN_TURN,
    _row(
        lambda s: s.strategy.swap_blocks > 0 and s.job.method == "full" and s.strategy.ema != "none",
        "ema of trained weights that swap_blocks moves",
        "write ema = none, or swap_blocks = 0",
    ),
    *_COMPILED,
    *_NOT_LORA,
    *_SINGLE_VALUES,
)


_ENGINES = (
    _row(
        lambda s: s.weights in QUANTISED and s.strategy.sharding not in ("none", "ddp"),
        "a base in {0.weights} under {0.strategy.sharding}",
        "use --sharding ddp, or --weights-dtype bf16",
    ),
    _row(
        lambda s: s.unscaled_fp16 and s.strategy.optimizer_step == "backward",
        "fp16 with the optimizer inside backward, where gradients are scaled,",
        "use bf16",
    ),
    _row(
        lambda s: s.unscaled_fp16 and s.strategy.optimizer_step != "backward" and s.splits,
        "fp16 under {0.strategy.sharding}",
        "use bf16",
    ),
    _row(
        lambda s: s.unscaled_fp16 and s.strategy.optimizer_step != "backward" and not s.splits,
        "fp16 of trained weights that are not fp32",
        "use bf16",
    ),
    _row(
        lambda s: s.zero and s.strategy.compute_dtype != s.weights,
        "weights_dtype {0.strategy.weights_dtype} computed in {0.strategy.compute_dtype} under ZeRO",
        "give the two the same format",
    ),
    _row(
        lambda s: s.strategy.sharding == "zero-1" and s.strategy.offload_optimizer != "none",
        "offload_optimizer under zero-1",
        "use --zero-stage 2",
    ),
)


def _split_samples(
    applies: Callable[[TrainerConfiguration], bool], reason: str, fix: str
) -> Combination[TrainerConfiguration]:
    """A row of ranks that share a sample: their shares of a gradient are added up when all of it is there."""
    return _row(lambda s: s.strategy.context_parallel > 1 and applies(s), reason, fix)


_SPLIT_SAMPLES = (
    _split_samples(
        lambda s: not s.model.splits_tokens,
        "context_parallel of {0.model.title}, whose tokens diffusers cannot split,",
        "use --context-parallel 1",
    ),
    _split_samples(
        lambda s: s.strategy.optimizer_step == "backward",
        "context_parallel with the optimizer inside backward",
        "use --optimizer-step foreach",
    ),
    _split_samples(
        lambda s: s.strategy.offload_gradients != "none",
        "context_parallel with offload_gradients",
        "leave out --offload-gradients",
    ),
    _split_samples(
        lambda s: s.strategy.compile != "none",
        "context_parallel of compiled blocks",
        "use --compile none",
    ),
)


def _validating(
    applies: Callable[[TrainerConfiguration], bool], reason: str, fix: str
) -> Combination[TrainerConfiguration]:
    """A row of samples that cannot be made while training."""
    return _row(lambda s: s.strategy.validation_mode != "off" and applies(s), reason, fix)


_VALIDATION = (
    _validating(
        lambda s: (
            s.weights == "int8" and (s.strategy.validation_mode == "offload" or s.strategy.group_offload != "none")
        ),
        "sending weights in int8 away for a sample",
        "use --validation-mode on, without group_offload",
    ),
    _validating(
        lambda s: s.lone_expert,
        "a sample where one of two experts is there, and it goes through both,",
        "use --validation-mode off",
    ),
    _validating(
        lambda s: s.both_experts and s.strategy.group_offload != "none",
        "group_offload of both experts",
        "use --inactive-expert cpu, with which they take turns in samples too",
    ),
    _validating(
        lambda s: s.model.has_sound,
        "a sample of {0.model.title}, whose pipeline is not from diffusers and detects faces first,",
        "use --validation-mode off",
    ),
)

# A probe of a model with two experts measures whichever it is given; a training has to know the noise it is for.
_TRAINING_ALONE = (
    _row(
        lambda s: not s.is_probe and s.model.experts == 2 and s.job.experts is None,
        "one of two experts that is not named",
        "write experts = both, or high or low: a run each",
    ),
    _row(
        lambda s: not s.is_probe and s.model.experts == 2 and not s.model.expert_boundary,
        "one of two experts without the noise level between them",
        "write boundary into its profile",
    ),
)

TRAINER_GAPS = (*_NOBODY, *_ENGINES, *_SPLIT_SAMPLES, *_VALIDATION, *_TRAINING_ALONE)
