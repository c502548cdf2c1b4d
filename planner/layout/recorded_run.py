"""A run as it was recorded: its tapes laid out at full depth, before any transformation.

The step, which is most of the work, is laid out apart from the optimizer: many optimizers share it.
"""

from __future__ import annotations

from planner.layout import attention_kernel
from planner.layout.run import Facts, Run, main_piece
from planner.spec.configuration import Configuration
from planner.spec.job import Machine, Strategy
from planner.tape.partial_checkpointing import partial
from planner.tape.program import Program


def step_key(configuration: Configuration, facts: Facts) -> tuple[object, ...]:
    """What tells one `recorded_step` from another: the recordings, of how many blocks each is taken, and attention's
    kernel."""
    strategy = configuration.strategy
    kernels = workspace_kernels(strategy, configuration.machine, facts)
    return id(facts.step), id(facts.checkpointed), strategy.checkpointed_blocks, kernels


def recorded_step(configuration: Configuration, facts: Facts) -> Run:
    """A run that loads and steps, and has no optimizer yet; its sizes are for `planner.tape.program.Program.bytes_of`.

    Raises a NotRecordedError where two recordings cannot be put together.
    """
    run = Run(configuration, facts)
    program: Program = run.program
    run.load = program.unfold(facts.step, "load")
    run.step = program.unfold(facts.step, main_piece(facts.step))
    if facts.checkpointed is not None:
        blocks = configuration.strategy.checkpointed_blocks
        assert blocks is not None, "partial says how many"
        checkpointed = program.unfold_beside(facts.checkpointed, "step")
        run.step, run.checkpointed = partial(program, facts.step.model, run.step, checkpointed, blocks)
    kernels = workspace_kernels(configuration.strategy, configuration.machine, facts)
    if "cudnn" in kernels:
        attention_kernel.take_masks_as_they_are(run)
    if others := [buffer for buffer, kernel in program.kernel.items() if kernel not in kernels]:
        run.drop(run.step, others)
    return run


def add_optimizer(run: Run) -> None:
    """Lays the optimizer's recording out behind a recorded step, and lets the loop's variables go.

    The batch, the loss and whatever else a step leaves die when the next one begins.
    """
    program, tape = run.program, run.facts.optimizer
    run.optimizer_first, run.optimizer = program.unfold(tape, "optimizer_first"), program.unfold(tape, "optimizer")
    # Of sampling, the next call makes its input anew, from what the scheduler made of this prediction.
    for stage in (run.step,) if run.samples_only else (run.optimizer_first, run.optimizer):
        run.free(stage, run.leftovers)


def workspace_kernels(strategy: Strategy, machine: Machine, facts: Facts) -> frozenset[str]:
    """The attention kernel that will run, and those whose recorded workspaces it takes."""
    name = attention_kernel.kernel(strategy, machine, facts.gpu, facts.step.ops)
    return frozenset((name, *attention_kernel.workspaces(name)))
