"""Tapes of one model that are played one after the other: what a step leaves is what the optimizer's step takes."""

from __future__ import annotations

import pytest

from planner import catalog
from planner.library import tape
from planner.program import Program
from planner.variants import OPTIMIZERS, PRECISIONS, OptimizerVariant, StepVariant, methods

UNRECORDED = {"wan2.1-vace-14b", "wan2.2-animate-14b"}
"""Profiles without tapes so far: their blocks are unlike each other and are recorded whole, which takes long."""


@pytest.mark.parametrize("name", sorted(set(catalog.model_names()) - UNRECORDED))
def test_every_gradient_of_a_step_is_freed_by_the_optimizer(name: str) -> None:
    """An optimizer skips parameters that no gradient reaches, and a tape of it must skip the same."""
    for method in methods(catalog.model(name)):
        precision = PRECISIONS[method.removesuffix("-wide")][0]
        optimizer = OptimizerVariant(method, precision.trained, *OPTIMIZERS[0])
        program = Program()
        step = tape(name, StepVariant(method, precision, "full", one_sample=True).name)
        program.unfold(step, "load")
        program.unfold(step, "step")
        made = set(program.named["gradient"].values())
        assert made
        freed = {~event for event in program.unfold(tape(name, optimizer.name), "optimizer").ops if event < 0}
        assert made <= freed, f"{method}: {len(made - freed)} gradients stay"
