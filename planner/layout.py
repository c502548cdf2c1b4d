"""Lays a run out: unfolds the recordings and applies the strategy's transformations, in a fixed order."""

from __future__ import annotations

from planner import attention, dialects
from planner.job import Job, Machine, Strategy
from planner.run import Facts, Run, Term
from planner.strategies import block_swap, checkpoint_offload, cublas_workspace, ddp, offloaded_optimizer, residents
from planner.zero import zero

TRANSFORMS: tuple[Term, ...] = (
    cublas_workspace,
    residents,
    checkpoint_offload,
    block_swap,
    offloaded_optimizer,
    ddp,
    zero,
)


def lay_out(
    job: Job, strategy: Strategy, machine: Machine, facts: Facts, grid: dict[str, int], trainer: str = "vplan"
) -> Run:
    """The run of a job at the shape of ``grid`` under a resolved strategy, as ``trainer`` would do it."""
    run = Run(job, strategy, machine, facts)
    run.load = run.program.unfold(facts.step, "load")
    run.step = run.program.unfold(facts.step, "step")
    run.optimizer_first = run.program.unfold(facts.optimizer, "optimizer_first")
    run.optimizer = run.program.unfold(facts.optimizer, "optimizer")
    run.sizes = run.program.bytes_of(grid)
    choose_kernels(run)
    end_of_step(run)
    for transform in (*TRANSFORMS, *dialects.terms(trainer)):
        transform(run)
    return run


def choose_kernels(run: Run) -> None:
    """Drops the workspaces of attention kernels that will not run."""
    kernels = {"any", *attention.workspaces(attention.kernel(run.strategy, run.machine, run.facts.gpu))}
    others = [buffer for buffer, kernel in enumerate(run.program.kernel) if kernel not in kernels]
    if others:
        run.drop(run.step, others)


def end_of_step(run: Run) -> None:
    """The loop's variables: the batch, the loss and whatever else a step leaves die when the next one begins."""
    alive: dict[int, None] = {}
    for event in run.step.ops:
        if event >= 0:
            alive[event] = None
        else:
            alive.pop(~event, None)
    gradients = set(run.named("gradient").values())
    left = [buffer for buffer in alive if buffer not in gradients]
    run.free(run.optimizer_first, left)
    run.free(run.optimizer, left)
