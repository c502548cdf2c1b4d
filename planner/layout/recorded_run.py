"""A run as it was recorded: its tapes laid out at full depth, before any transformation.

The step is laid out separately from the optimizer, because it is most of the work and many optimizers share it.
"""

from __future__ import annotations

from typing import NamedTuple

from planner.layout import attention_kernel
from planner.layout.run import Facts, Run, main_piece
from planner.spec.configuration import Configuration
from planner.spec.job import Machine, Strategy
from planner.tape.partial_checkpointing import BothSteps
from planner.tape.program import Program, Stage


class Unfolded(NamedTuple):
    """The recordings of a step at full depth, for any number of checkpointed blocks and any attention kernel. It must
    not be changed."""

    program: Program
    load: Stage
    step: Stage
    both: BothSteps | None
    """of two recordings, where only some blocks are checkpointed"""


def unfolded_key(facts: Facts) -> tuple[object, ...]:
    """The key that distinguishes one `unfolded` from another."""
    return id(facts.step), id(facts.checkpointed)


def unfolded(facts: Facts) -> Unfolded:
    """Lays out the recordings of a step. Raises a NotRecordedError if two recordings cannot be combined."""
    program = Program()
    load = program.unfold(facts.step, "load")
    step = program.unfold(facts.step, main_piece(facts.step))
    both = None
    if facts.checkpointed is not None:
        checkpointed = program.unfold_beside(facts.checkpointed, "step")
        both = BothSteps(program, facts.step.model, step, checkpointed)
    if "autocast" not in facts.step.variant:
        _widen_statistics(program)
    return Unfolded(program, load, step, both)


CASTS_BEFORE = 3
"""Allocations back from a layer norm's output among which is the cast of its input, with those of weight and bias."""


def _widen_statistics(program: Program) -> None:
    """Makes the statistics that layer norms save for each row (mean and reciprocal deviation) fp32. CUDA computes them
    in fp32 whatever the input (native/cuda/layer_norm_kernel.cu, ``acc_type``). A recording on a CPU has them in the
    input's dtype, which is 16 bits without autocast, unless the input was cast to fp32 first."""
    ops, buffers, sizes = list(program.op), list(program.buffers), program.sizes
    wide: dict[int, int] = {}
    for out, (name, second, third) in enumerate(zip(ops, ops[1:], ops[2:], strict=False)):
        if not name == second == third == "native_layer_norm":
            continue
        whole, mean, deviation = (sizes[number] for number in buffers[out : out + 3])
        if isinstance(whole, int) or isinstance(mean, int) or mean != deviation:
            continue
        before = range(max(out - CASTS_BEFORE, 0), out)
        is_cast = any(ops[at] == "_to_copy" and buffers[at] == buffers[out] for at in before)
        if is_cast or whole[1].coefficient <= mean[1].coefficient:  # the second: what is copied, before the next output
            continue
        number = buffers[out + 1]
        if number not in wide:
            wide[number] = len(sizes)
            sizes.append((mean[0], mean[1]._replace(coefficient=2 * mean[1].coefficient)))
        for buffer in (out + 1, out + 2):
            program.buffers[buffer] = wide[number]


def step_key(configuration: Configuration, facts: Facts) -> tuple[object, ...]:
    """The key that distinguishes one `recorded_step` from another: the recordings, how many blocks come from each, and
    the attention kernel."""
    strategy = configuration.strategy
    kernels = workspace_kernels(strategy, configuration.machine, facts)
    return *unfolded_key(facts), strategy.checkpointed_blocks, kernels


def recorded_step(configuration: Configuration, facts: Facts, recordings: Unfolded | None = None) -> Run:
    """A run with load and step, but no optimizer yet; its sizes are for `planner.tape.program.Program.bytes_of`.
    ``recordings``: `unfolded`, if it is known already.

    Raises a NotRecordedError if two recordings cannot be combined.
    """
    program, load, step, both = recordings or unfolded(facts)
    run = Run(configuration, facts, program=program.copy() if recordings else program, load=load.copy())
    if both is not None:
        blocks = configuration.strategy.checkpointed_blocks
        assert blocks is not None, "partial says how many"
        step, run.checkpointed = both.first(blocks)
    run.step = step.copy()
    kernels = workspace_kernels(configuration.strategy, configuration.machine, facts)
    if "cudnn" in kernels:
        attention_kernel.take_masks_as_they_are(run)
        attention_kernel.keep_masks_of_numbers(run)
        attention_kernel.take_rows_as_they_are(run)
    else:
        attention_kernel.round_all_rows(run)
    if others := [buffer for buffer, kernel in program.kernel.items() if kernel not in kernels]:
        run.drop(run.step, others)
    return run


def add_optimizer(run: Run) -> None:
    """Appends the optimizer's recording to a recorded step, and frees what the training loop's variables held.

    The batch, the loss and whatever else a step leaves are freed when the next step begins.
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
