"""Host RAM and disk of a run: budgets of their own, because a run can die in either."""

from __future__ import annotations

from planner import experts
from planner.job import Machine
from planner.run import Run
from planner.units import GIB

PROCESS_BYTES = 3 * GIB
"""One training process: Python, torch and CUDA libraries, a few decoded clips. Assumed; the measured rows will tell."""


OFFLOADED_BYTES = 16
"""Per parameter whose optimizer runs in host RAM: fp32 weight, gradient and two Adam states (DeepSpeed's own estimator
``estimate_zero2_model_states_mem_needs``; torchao CPUOffloadOptimizer keeps the same four for fp32 weights)."""


def power_of_two(nbytes: int) -> int:
    """Pinned memory is handed out in powers of two (torch's CachingHostAllocator)."""
    return 1 << max(0, nbytes - 1).bit_length()


def ram_bytes(run: Run, machine: Machine) -> int:
    """Host RAM of all processes on one node."""
    strategy = run.strategy
    zero = strategy.sharding.startswith("zero")
    found = PROCESS_BYTES
    if strategy.gradient_checkpointing == "offload":
        found += sum(power_of_two(run.sizes[buffer]) for inputs in run.block_inputs.values() for buffer in inputs)
        found += run.facts.model.blocks * sum(power_of_two(run.sizes[buffer]) for buffer in run.shared_inputs)
    if strategy.swap_blocks:
        blocks_in_order = list(run.frozen_block_weights.values())
        swapped = blocks_in_order[len(blocks_in_order) - strategy.swap_blocks :]
        found += sum(power_of_two(run.sizes[buffer]) for buffers in swapped for buffer in buffers)
    if strategy.offload_optimizer == "cpu":
        found += OFFLOADED_BYTES * run.trained_parameters // (machine.world if zero else 1)
    if strategy.offload_params == "cpu":
        found += sum(run.sizes[buffer] for buffer in run.named("weight").values()) // machine.world
    found += experts.host_bytes(run)
    return found * machine.gpus


def disk_bytes(run: Run) -> int:
    """One checkpoint: the trained weights and the optimizer's states; under ZeRO fp32 master and states as well."""
    if run.strategy.sharding.startswith("zero"):
        return 14 * run.trained_parameters
    gradients = run.named("gradient")
    states = sum(run.sizes[buffer] for buffer in run.named("optimizer").values())
    return run.trained_experts * (sum(run.sizes[buffer] for buffer in gradients.values()) + states)
