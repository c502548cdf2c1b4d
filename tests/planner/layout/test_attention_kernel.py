"""What attention's backward takes beside its outputs, by the kernel of the card."""

from __future__ import annotations

import pytest

from planner.catalog import shapes
from planner.layout.inputs import load_facts
from planner.layout.recorded_run import recorded_step
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy

HEADS, HEAD_SIZE = 24, 128
"""Of FLUX.1's attention."""


def accumulators(gpu: str, height: int, width: int) -> set[int]:
    """Bytes of what FLUX.1's attention takes inside backward at a size, 512 text tokens."""
    job = Job(
        model="flux.1-dev",
        frames=1,
        batch_size=1,
        height=height,
        width=width,
        text_tokens=512,
        lora_rank=16,
        method="lora",
    )
    configuration = Configuration.of(job, Strategy(gradient_checkpointing="none"), Machine(gpu=gpu))
    facts = load_facts(configuration)
    run = recorded_step(configuration, facts)
    values = facts.step.values(shapes.grid(facts.model, job))
    sizes = [
        run.program.sizes[run.program.buffers[buffer]] for buffer, name in run.program.kernel.items() if name == "flash"
    ]
    return {size[1].value(values) for size in sizes if not isinstance(size, int)}


@pytest.mark.parametrize(("gpu", "rows"), [("h100-80gb", 516), ("rtx-4090", 640)])
def test_flash_rounds_rows_up_and_cudnn_does_not(gpu: str, rows: int) -> None:
    """An image of 32x32 pixels is four tokens: with the text 516, of which flash makes five times 128."""
    per_row = 4 * HEADS
    assert accumulators(gpu, 32, 32) == {per_row * rows, per_row * rows * HEAD_SIZE}
