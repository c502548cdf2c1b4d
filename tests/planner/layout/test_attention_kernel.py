"""What attention's backward takes beside its outputs, by the kernel of the card."""

from __future__ import annotations

import pytest

from planner.catalog import shapes
from planner.layout.attention_kernel import copies_of_shared_masks, keep_shared_masks
from planner.layout.inputs import load_facts
from planner.layout.recorded_run import recorded_step
from planner.layout.run import Run
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy
from planner.tape.format import Monomial
from planner.tape.program import Moment, Program, Stage

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


@pytest.mark.parametrize("outlived", [False, True])
def test_a_shared_mask_stays_where_no_block_copies_it(outlived: bool) -> None:
    """Two blocks attend with a mask of numbers, of which memory-efficient attention keeps two copies with padded rows:
    cuDNN keeps the mask, until the last of their backwards."""
    job = Job(model="flux.1-dev", method="lora", frames=1, height=512, width=512, batch_size=1, lora_rank=16)
    configuration = Configuration.of(job, Strategy(gradient_checkpointing="none"), Machine(gpu="h100-80gb"))
    facts = load_facts(configuration)
    one, square = (tuple(power * (atom == "T") for atom in facts.step.atoms) for power in (1, 2))
    mask, copy = Monomial(2, square), Monomial(2, one, -8, 1, one)
    sizes = [mask, copy, Monomial(2, one), copy, Monomial(2, one)]
    ops = ["mul", *["constant_pad_nd", "_scaled_dot_product_efficient_attention"] * 2]
    program = Program()
    program.sizes += [(facts.step, size) for size in sizes]
    program.buffers += range(5)
    program.op += ops
    step = [[0], [1, 2], [3, 4], [] if outlived else [~0], [~4, ~3], [~2, ~1], [~0] if outlived else []]
    moments = [Moment("step", "", "", -1)] * len(step)
    run = Run(configuration, facts, program=program, load=Stage("load", []))
    run.step = Stage("step", list(zip(moments, step, strict=True)))
    keep_shared_masks(run)
    after = [[0], [2], [4], [], [~4], [~2], [~0]] if outlived else [[0], [2], [4], [], [~4], [~2, ~0], []]
    assert [events for _, events in run.step.stretches] == after


def test_a_mask_that_attention_makes_is_no_shared_one() -> None:
    attention = "_scaled_dot_product_efficient_attention"
    assert copies_of_shared_masks(["where", "constant_pad_nd", attention, "add", "constant_pad_nd", attention]) == [4]
    assert copies_of_shared_masks(["add", "constant_pad_nd", "_scaled_dot_product_flash_attention"]) == []
