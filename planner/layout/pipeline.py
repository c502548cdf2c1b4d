"""Lays a run out: unfolds the recordings and applies the strategy's transformations in a fixed order.

`lay_out` is the entry point, and `TRANSFORMS` the order, with its reasons. To add a strategy field, write a function on
a Run that changes its stages in place, and put it into `TRANSFORMS`.
"""

from __future__ import annotations

from planner.layout import trainer_terms
from planner.layout.adapters import adapters_as_named
from planner.layout.checkpoints.fp8 import fp8_checkpoints
from planner.layout.checkpoints.offload import checkpoint_offload
from planner.layout.cublas import cublas_workspace, kept_workspaces, workspaces_at_use
from planner.layout.experts import experts, waiting_gradients
from planner.layout.gradient_sums import gradient_sums
from planner.layout.optimizer.fp32_masters import masters
from planner.layout.optimizer.paged_states import paged_states
from planner.layout.optimizer.reduction_workspace import reduction_workspaces
from planner.layout.optimizer.update_in_backward import step_in_backward
from planner.layout.optimizer.zero_starts import zero_starts
from planner.layout.partial_training import freeze_unmatched
from planner.layout.phases import residents, saving, validation
from planner.layout.recorded_run import add_optimizer, recorded_step
from planner.layout.run import Facts, Run, Transform
from planner.layout.sampling import sampling
from planner.layout.sharding.context_parallel import context_parallel
from planner.layout.sharding.fsdp import fsdp
from planner.layout.sharding.nvme import check_buffers
from planner.layout.sharding.zero import zero
from planner.layout.single_gpu import (
    accumulation,
    block_swap,
    ddp,
    ema,
    offloaded_optimizer,
)
from planner.layout.stored_positions import stored_positions, stored_positions_in_validation
from planner.layout.trainer_terms.kohya_lora import inputs_as_they_are
from planner.layout.unpriced import (
    refuse_attention_of_others,
    refuse_trainers_of_cuda,
    refuse_uncast_inputs,
    refuse_unpriced,
)
from planner.spec.configuration import Configuration

TRANSFORMS: tuple[Transform, ...] = (
    refuse_attention_of_others,
    # First what the recorded step itself is: what comes later copies it, or weaves into it, as it stands by then.
    stored_positions,
    context_parallel,
    adapters_as_named,
    freeze_unmatched,  # from here on `run.named("gradient")` is what trains
    # What is loaded beside the weights. The order is that of loading: some add before what is there, some behind it.
    cublas_workspace,
    residents,
    experts,  # weighs the weights as they were recorded; zero and fsdp give them other sizes
    # What leaves the step for host RAM, before further forms of the step are made of it.
    checkpoint_offload,
    fp8_checkpoints,
    block_swap,
    gradient_sums,
    # Further forms of the step, and what becomes of the optimizer's stages.
    reduction_workspaces,
    step_in_backward,  # takes the optimizer's stages apart as they were recorded
    accumulation,
    masters,  # its casts are a part of the step that the next one takes off the GPU
    offloaded_optimizer,
    paged_states,
    zero_starts,
    ddp,  # like offloaded gradients, gradients in buckets make every micro-batch alike: they undo `accumulation`
    waiting_gradients,  # so this comes behind both
    # Engines that split replace gradients and step. zero-1 keeps what `accumulation` made, the others make their own.
    check_buffers,
    zero,
    fsdp,
    ema,  # adds to the optimizer's stages, which offload and engines have emptied
    # The phases behind training, which find the weights where the above left them.
    validation,  # gathers what zero-3 and fsdp hand over
    stored_positions_in_validation,
    sampling,
    saving,
)
"""Our own transformations. Each does nothing where the strategy does not ask for it."""


def transforms(trainer: str) -> tuple[Transform, ...]:
    """All transformations of a recorded run for a trainer, in order."""
    # A trainer's terms correct ours (no ring, no fetching ahead), so they find them done. The workspaces come last:
    # they make the first step one of its own, and what changed the step behind them would miss it.
    return (*trainer_terms.first_terms(trainer), *TRANSFORMS, *trainer_terms.terms(trainer), workspaces_at_use)


ON_THE_CARD = frozenset({gradient_sums, reduction_workspaces, inputs_as_they_are, workspaces_at_use})
"""Transformations that change nothing but when the GPU's memory is allocated: host RAM is the same without them."""


def host_transforms(trainer: str) -> tuple[Transform, ...]:
    """Those of `transforms` that affect a run's host RAM."""
    return tuple(transform for transform in transforms(trainer) if transform not in ON_THE_CARD)


def has_plain_validation(configuration: Configuration, facts: Facts, trainer: str) -> bool:
    """Whether no transformation looks into the denoising or the decode of a validation sample: they may then be laid
    out as their peaks (`Run.peaks_only`)."""
    products_have_workspaces = not kept_workspaces(facts.gpu, configuration.machine.torch)
    changed = products_have_workspaces or facts.model.traits.stored_positions
    return not (changed or trainer_terms.change_samples(trainer))


def lay_out(configuration: Configuration, facts: Facts, grid: dict[str, int], trainer: str = "vplan") -> Run:
    """The run of a configuration at the shape of ``grid``, as ``trainer`` runs it."""
    refuse_unpriced(configuration)
    refuse_trainers_of_cuda(facts.gpu, trainer)
    refuse_uncast_inputs(configuration, trainer.partition("@")[0])
    run = recorded_step(configuration, facts.trained_by(trainer))
    add_optimizer(run)
    run.grid, run.sizes, run.trainer = grid, run.program.bytes_of(grid), trainer
    for transform in transforms(trainer):
        transform(run)
    return run
