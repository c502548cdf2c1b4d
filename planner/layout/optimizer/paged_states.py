"""Optimizer states in CUDA's managed memory."""

from __future__ import annotations

from planner.layout.run import Run
from planner.tape.variants.variant import UNPAGED


def paged_states(run: Run) -> None:
    """A paged optimizer's 8-bit states are in CUDA's managed memory, outside torch's allocator: the driver keeps them
    on the GPU where there is room and moves them to host RAM where there is not, so they count there
    (bitsandbytes ``get_paged``, cudaMallocManaged; its docs, "Paged optimizers")."""
    if run.strategy.optimizer not in UNPAGED:
        return
    paged = set(run.paged_states)
    for stage in (run.optimizer_first, run.optimizer):
        run.drop(stage, paged)
    if run.first_step is not None:
        run.drop(run.first_step, paged)
