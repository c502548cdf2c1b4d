"""Host RAM and disk of a run: budgets of their own, because a run can die in either."""

from __future__ import annotations

from planner import experts
from planner.job import Machine
from planner.run import Run
from planner.strategies import ema_bytes
from planner.units import GIB
from planner.variants import UNPAGED, trained_storage

PROCESS_BYTES = 3 * GIB
"""One training process: Python, torch and CUDA libraries, a few decoded clips. Assumed; the measured rows will tell."""


OFFLOADED_BYTES = 16
"""Per parameter whose optimizer runs in host RAM: fp32 weight, gradient and two Adam states (torchao
CPUOffloadOptimizer keeps these four for fp32 weights)."""

ZERO_OFFLOADED_BYTES = 18
"""DeepSpeed keeps beside them, of its share, the new weights in 16 bits on their way back (stages 1 and 2:
``param_buffer_of_bit16_for_cpu_offload_groups``) or the gradients in 16 bits (stage 3:
``grad_partitions_flat_buffer``)."""


def power_of_two(nbytes: int) -> int:
    """Pinned memory is handed out in powers of two (torch's CachingHostAllocator)."""
    return 1 << max(0, nbytes - 1).bit_length()


def ram_bytes(run: Run, machine: Machine) -> int:
    """Host RAM of all processes on one node."""
    strategy = run.strategy
    zero = strategy.sharding.startswith("zero")
    found = PROCESS_BYTES + run.host_bytes
    taken = power_of_two if run.pinned else int
    if strategy.gradient_checkpointing == "offload":
        found += sum(taken(run.sizes[buffer]) for inputs in run.block_inputs.values() for buffer in inputs)
        found += run.facts.model.blocks * sum(taken(run.sizes[buffer]) for buffer in run.shared_inputs)
    if strategy.swap_blocks:
        blocks_in_order = list(run.swappable_weights.values())
        swapped = blocks_in_order[len(blocks_in_order) - strategy.swap_blocks :]
        found += sum(taken(run.sizes[buffer]) for buffers in swapped for buffer in buffers)
    if strategy.offload_optimizer == "cpu" and strategy.sharding != "fsdp":
        parameter = ZERO_OFFLOADED_BYTES if zero else OFFLOADED_BYTES
        found += parameter * run.trained_parameters // (machine.world if zero else 1)
    if strategy.optimizer in UNPAGED:
        found += sum(run.sizes[buffer] for buffer in run.paged_states)
    if strategy.offload_params == "cpu":
        split = 2 * sum(run.elements.values())
        if strategy.sharding == "fsdp":  # with the gradients and two states of what is trained
            split += 4 * trained_bytes(run) - 2 * run.trained_parameters
        found += split // machine.world
    if strategy.ema == "cpu":
        found += ema_bytes(run)
    found += experts.host_bytes(run)
    return found * machine.gpus


def trained_bytes(run: Run) -> int:
    """What is trained, in the storage it is trained in."""
    return (4 if trained_storage(run.job, run.strategy) == "fp32" else 2) * run.trained_parameters


def disk_bytes(run: Run) -> int:
    """One checkpoint: the trained weights and the optimizer's states; under ZeRO fp32 master and states as well."""
    if run.strategy.sharding.startswith("zero"):
        return 14 * run.trained_parameters
    if run.strategy.sharding == "fsdp":
        return 3 * trained_bytes(run)
    gradients = run.named("gradient")
    states = sum(run.sizes[buffer] for buffer in run.named("optimizer").values())
    return run.trained_experts * (sum(run.sizes[buffer] for buffer in gradients.values()) + states)
