"""Lays a run out: unfolds the recordings and applies the strategy's transformations, in a fixed order."""

from __future__ import annotations

from planner.layout import attention_kernel, trainer_terms
from planner.layout.context_parallel import context_parallel
from planner.layout.experts import experts, waiting_gradients
from planner.layout.fp32_masters import masters
from planner.layout.partial_training import freeze_unmatched
from planner.layout.phases import residents, saving, validation
from planner.layout.run import Facts, Run, Transform, unfold_recording
from planner.layout.sampling import sampling
from planner.layout.sharding.fsdp import fsdp
from planner.layout.sharding.nvme import check_buffers
from planner.layout.sharding.zero import zero
from planner.layout.single_gpu import (
    accumulation,
    block_swap,
    checkpoint_offload,
    cublas_workspace,
    ddp,
    ema,
    offloaded_optimizer,
    paged_states,
    step_in_backward,
    workspaces_at_first_use,
)
from planner.layout.stored_positions import stored_positions, stored_positions_in_validation
from planner.layout.unpriced import refuse_unpriced
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy

TRANSFORMS: tuple[Transform, ...] = (
    stored_positions,
    context_parallel,
    freeze_unmatched,
    cublas_workspace,
    residents,
    experts,
    checkpoint_offload,
    block_swap,
    step_in_backward,
    accumulation,
    masters,
    offloaded_optimizer,
    paged_states,
    ddp,
    waiting_gradients,
    check_buffers,
    zero,
    fsdp,
    ema,
    validation,
    stored_positions_in_validation,
    sampling,
    saving,
)


def transforms(trainer: str) -> tuple[Transform, ...]:
    """All that is applied to a recorded run, in order, as ``trainer`` would run it."""
    return (*TRANSFORMS, *trainer_terms.terms(trainer), workspaces_at_first_use)


def lay_out(
    job: Job, strategy: Strategy, machine: Machine, facts: Facts, grid: dict[str, int], trainer: str = "vplan"
) -> Run:
    """The run of a job at the shape of ``grid`` under a resolved strategy, as ``trainer`` would do it."""
    refuse_unpriced(job, strategy, machine)
    run = Run(Configuration(job, strategy, machine), facts, grid)
    run.load, run.step, run.checkpointed = unfold_recording(run.program, facts, strategy)
    run.optimizer_first = run.program.unfold(facts.optimizer, "optimizer_first")
    run.optimizer = run.program.unfold(facts.optimizer, "optimizer")
    run.sizes = run.program.bytes_of(grid)
    drop_other_workspaces(run)
    free_leftovers(run)
    for transform in transforms(trainer):
        transform(run)
    return run


def workspace_kernels(strategy: Strategy, machine: Machine, facts: Facts) -> frozenset[str]:
    """The attention kernels whose workspaces will be taken."""
    return frozenset(attention_kernel.workspaces(attention_kernel.kernel(strategy, machine, facts.gpu, facts.step.ops)))


def drop_other_workspaces(run: Run) -> None:
    """Drops the workspaces of attention kernels that will not run."""
    chosen = workspace_kernels(run.strategy, run.machine, run.facts)
    others = [buffer for buffer, kernel in run.program.kernel.items() if kernel not in chosen]
    if others:
        run.drop(run.step, others)


def free_leftovers(run: Run) -> None:
    """The loop's variables: the batch, the loss and whatever else a step leaves die when the next one begins."""
    if run.samples_only:  # the next call makes its input anew, from what the scheduler made of this prediction
        run.free(run.step, run.leftovers)
        return
    run.free(run.optimizer_first, run.leftovers)
    run.free(run.optimizer, run.leftovers)
