"""What attention's backward takes beside its outputs, by the kernel of the card."""

from __future__ import annotations

import pytest

from planner.catalog import lookup, shapes
from planner.errors import NotEstimatedError
from planner.estimate.estimate import estimate
from planner.layout.attention_kernel import (
    copies_of_masks_of_numbers,
    keep_masks_of_numbers,
    round_all_rows,
    take_rows_as_they_are,
)
from planner.layout.recorded_run import recorded_step
from planner.layout.recordings import Library, load_facts
from planner.layout.run import Run
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy
from planner.tape.format import Monomial, Tape
from planner.tape.program import Moment, Program, Stage
from planner.tape.variants.choice import step_variant

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


@pytest.mark.parametrize(("gpu", "rows"), [("h100-80gb", [9, 128]), ("rtx-4090", [128, 128])])
def test_cudnn_gives_way_to_flash_above_65_535_samples(gpu: str, rows: list[int]) -> None:
    """Of a motion module, which attends over nine frames at each of T pixels, in one head."""
    run = made_by_hand(gpu, ["_scaled_dot_product_flash_attention_backward"], [])
    facts, program = run.facts, run.program
    one = tuple(int(atom == "T") for atom in facts.step.atoms)
    program.sizes.append((facts.step, Monomial(4, one, 128, 9, (0,) * len(one), 4 * 65_535)))
    program.kernel[0] = "flash"
    (take_rows_as_they_are if gpu == "h100-80gb" else round_all_rows)(run)
    grid = shapes.grid(facts.model, run.job)
    taken = [program.bytes_of({**grid, "T": pixels}) for pixels in (65_535, 65_536)]
    assert taken == [[4 * 65_535 * rows[0]], [4 * 65_536 * rows[1]]]


def made_by_hand(gpu: str, ops: list[str], step: list[list[int]]) -> Run:
    """A run of buffers whose sizes stand in its program's table in the same order."""
    job = Job(model="flux.1-dev", method="lora", frames=1, height=512, width=512, batch_size=1, lora_rank=16)
    configuration = Configuration.of(job, Strategy(gradient_checkpointing="none"), Machine(gpu=gpu))
    program = Program()
    program.buffers += range(len(ops))
    program.op += ops
    run = Run(configuration, load_facts(configuration), program=program, load=Stage("load", []))
    run.step = Stage("step", [(Moment("step", "", "", -1), events) for events in step])
    return run


@pytest.mark.parametrize("outlived", [False, True])
def test_a_shared_mask_stays_where_no_block_copies_it(outlived: bool) -> None:
    """Two blocks attend with a mask of numbers, of which memory-efficient attention keeps two copies with padded rows:
    cuDNN keeps the mask, until the last of their backwards."""
    step = [[0], [1, 2], [3, 4], [] if outlived else [~0], [~4, ~3], [~2, ~1], [~0] if outlived else []]
    attention = "_scaled_dot_product_efficient_attention"
    run = made_by_hand("h100-80gb", ["mul", *["constant_pad_nd", attention] * 2], step)
    tape = run.facts.step
    one, square = (tuple(power * (atom == "T") for atom in tape.atoms) for power in (1, 2))
    copy, output = Monomial(2, one, -8, 1, one), Monomial(2, one)
    run.program.sizes += [(tape, size) for size in (Monomial(2, square), copy, output, copy, output)]
    keep_masks_of_numbers(run)
    after = [[0], [2], [4], [], [~4], [~2], [~0]] if outlived else [[0], [2], [4], [], [~4], [~2, ~0], []]
    assert [events for _, events in run.step.stretches] == after


@pytest.mark.parametrize("tokens", [64, 67])
def test_a_mask_that_each_block_makes_stays_until_its_backward(tokens: int) -> None:
    """As Chroma's: where rows need no padding, the recording has no size for the masks and counts their copies."""
    step = [[0, 1, 2], [~0], [3, 4, 5], [~3], [~5, ~4], [~2, ~1]]
    attention = "_scaled_dot_product_efficient_attention"
    run = made_by_hand("h100-80gb", ["mul", "constant_pad_nd", attention] * 2, step)
    tape = run.facts.step
    one = tuple(int(atom == "T") for atom in tape.atoms)
    mask, copy, output = Monomial(2, one, -8, 1, one), Monomial(2, one, 8, 1, one), Monomial(2, one)
    run.program.sizes += [(tape, size) for size in (mask, copy, output) * 2]
    keep_masks_of_numbers(run)
    assert [events for _, events in run.step.stretches] == [[0, 2], [], [3, 5], [], [~5, ~3], [~2, ~0]]
    sizes = run.program.bytes_of(dict.fromkeys(tape.atoms, 1) | {"T": tokens})
    assert sizes[0] == sizes[3] == 2 * tokens * -(-tokens // 8) * 8


def test_a_mask_that_attention_makes_is_no_mask_of_numbers() -> None:
    attention = "_scaled_dot_product_efficient_attention"
    assert copies_of_masks_of_numbers(["where", "constant_pad_nd", attention, "add", "constant_pad_nd", attention]) == [
        4
    ]
    assert copies_of_masks_of_numbers(["add", "constant_pad_nd", "_scaled_dot_product_flash_attention"]) == []


@pytest.mark.parametrize(
    ("gpu", "attention", "ending"),
    [("h100-80gb", "sdpa", "-cudnn"), ("rtx-4090", "sdpa", ""), ("rtx-4090", "cudnn", "-cudnn")],
)
def test_a_model_that_attends_by_card_is_answered_by_the_recording_of_the_cards_way(
    gpu: str, attention: str, ending: str
) -> None:
    """No bundled model does: one is taken for such."""
    usual = lookup.model("wan2.1-t2v-1.3b")
    by_card = usual.replace(traits=usual.traits.replace(attends_by_card=True))
    asked = Strategy(attention=attention, validation_mode="off")
    configuration = Configuration.of(shapes.job_for(usual, {}), asked, Machine(gpu=gpu))
    wanted, library = step_variant(usual, configuration.job, configuration.strategy, 1).name, _Names()
    load_facts(configuration, by_card, library=library)
    assert library.asked[0] == f"{wanted}{ending}"


def test_one_library_keeps_both_ways_apart() -> None:
    usual = lookup.model("wan2.1-t2v-1.3b")
    by_card = usual.replace(traits=usual.traits.replace(attends_by_card=True))
    library = _Names()
    for gpu in ("h100-80gb", "rtx-4090", "h100-80gb"):
        configuration = Configuration.of(shapes.job_for(usual, {}), Strategy(validation_mode="off"), Machine(gpu=gpu))
        load_facts(configuration, by_card, library=library)
    steps = [name for name in library.asked if name.startswith("step")]
    assert [name.endswith("-cudnn") for name in steps] == [True, False]


@pytest.mark.parametrize("attention", ["flash", "flash-3", "efficient"])
def test_kernels_that_take_no_grouped_mask_are_refused(attention: str) -> None:
    usual = lookup.model("wan2.1-t2v-1.3b")
    by_card = usual.replace(traits=usual.traits.replace(attends_by_card=True))
    configuration = Configuration.of(shapes.job_for(usual, {}), Strategy(attention=attention), Machine(gpu="h100-80gb"))
    with pytest.raises(NotEstimatedError, match="fewer heads of keys than of queries"):
        load_facts(configuration, by_card)


@pytest.mark.parametrize(("trainer", "gpu", "refused"), [
    ("simpletuner", "h100-80gb", False),
    ("simpletuner", "l40s", True),  # it is written for Hopper
    ("vplan", "h100-80gb", True),
])  # fmt: skip
def test_flash_attention_3_is_of_a_trainer_that_has_it_and_of_hopper(trainer: str, gpu: str, refused: bool) -> None:
    model = lookup.model("wan2.1-t2v-1.3b")
    configuration = Configuration.of(shapes.job_for(model, {}), Strategy(attention="flash-3"), Machine(gpu=gpu))
    facts = load_facts(configuration)
    if refused:
        with pytest.raises(NotEstimatedError, match="attention flash-3 is not estimated yet"):
            estimate(configuration, facts, trainer)
        return
    usual = Configuration.of(configuration.job, Strategy(), configuration.machine)
    third, cudnn = (estimate(one, facts, trainer) for one in (configuration, usual))
    assert third.attention_kernel == "flash-3" and cudnn.attention_kernel == "cudnn"
    assert third.step_seconds < cudnn.step_seconds
    assert third.peak.allocated_bytes == pytest.approx(cudnn.peak.allocated_bytes, rel=0.01)


class _Names(Library):
    """A library that notes which recordings it is asked for, and gives the usual ones for those of cuDNN."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def tapes(self, model: str, *variants: str) -> list[Tape]:
        self.asked += variants
        return super().tapes(model, *(variant.removesuffix("-cudnn") for variant in variants))
