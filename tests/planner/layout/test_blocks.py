"""What is asked of blocks, on recorded models: what their checkpoints keep, and which are swapped."""

from __future__ import annotations

import pytest

from planner.catalog import lookup
from planner.catalog.shapes import grid
from planner.layout.checkpoints.block_inputs import block_inputs
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy


@pytest.mark.parametrize("name", ["wan2.1-t2v-14b", "wan2.2-animate-14b"])
def test_a_block_keeps_its_input_alone(name: str) -> None:
    """Wan Animate's face adapter stands behind every fifth block, with activations of its own, and no checkpoint."""
    model = lookup.model(name)
    job = Job(model=name, frames=9, height=480, width=832)
    configuration = Configuration.of(job, Strategy(gradient_checkpointing="offload"), Machine(gpu="h100-80gb"))
    run = lay_out(configuration, load_facts(configuration), grid(model, job), "vplan")
    inputs = block_inputs(run)
    assert set(inputs) == {("blocks", block) for block in range(1, model.blocks)}  # the first one's comes from outside
    tokens = 3 * (480 // 16) * (832 // 16)
    of_reference = (480 // 16) * (832 // 16) if "animate" in name else 0
    assert {run.total_bytes(kept) for kept in inputs.values()} == {(tokens + of_reference) * 5120 * 2}


def test_the_blocks_that_run_last_are_swapped() -> None:
    """VACE's own blocks run before the others, and are loaded behind them."""
    model = lookup.model("wan2.1-vace-1.3b")
    job = Job(model=model.name, frames=9, height=480, width=832)
    strategy = Strategy(gradient_checkpointing="full", swap_blocks=22)
    configuration = Configuration.of(job, strategy, Machine(gpu="h100-80gb"))
    run = lay_out(configuration, load_facts(configuration), grid(model, job), "vplan")
    assert list(run.swapped_blocks) == [("blocks", block) for block in range(8, 30)]
