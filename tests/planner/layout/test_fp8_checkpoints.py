"""Checkpoints in 8 bits, on the hand-made run and on recordings: what is rounded, when, and what is left."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from planner.catalog import card_lookup, lookup
from planner.catalog.shapes import grids
from planner.errors import NotEstimatedError
from planner.layout.checkpoints.block_inputs import block_inputs
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy
from tests.planner.hand_made import (
    ADAPTER,
    BATCH,
    BLOCKS,
    CAST,
    FACTS,
    KIB,
    LOADED,
    MODEL,
    ONE,
    SHAPE,
    STATES,
    TABLE,
    X,
    after,
    laid_out,
    peaks,
    rounded,
)

WIDTH = 512
"""Of the hand-made run, whose X is 2 bytes a number: 1 KiB a token."""

FACTS_512 = FACTS._replace(model=MODEL.replace(config={**MODEL.config, "num_attention_heads": 4}))


def test_each_input_but_the_first_is_kept_in_one_byte_a_number_beside_one_number_a_token() -> None:
    run = laid_out(facts=FACTS_512, gradient_checkpointing="fp8")
    kept = X // 2 + X // WIDTH
    # Forward of the last block: the latents, the table, block 0's input, which stays; of each further block what is
    # kept; its own input, every cast copy, its output and what it takes.
    forward = BATCH + TABLE + X + (BLOCKS - 1) * kept + X + BLOCKS * CAST + X + 2 * X
    # Its backward: the same inputs, its own again, what it takes, and its gradient.
    backward = BATCH + TABLE + X + (BLOCKS - 1) * kept + X + 2 * X + ADAPTER
    assert peaks(run)["step"] == LOADED + STATES + max(forward, backward)
    assert after(run) == LOADED + STATES


@given(SHAPE)
@settings(max_examples=50, deadline=None)
def test_between_host_ram_and_the_gpu_and_nothing_is_left(grid: dict[str, int]) -> None:
    found = {
        mode: laid_out(grid=grid, facts=FACTS_512, gradient_checkpointing=mode) for mode in ("full", "fp8", "offload")
    }
    offload, fp8, full = (peaks(found[mode])["step"] for mode in ("offload", "fp8", "full"))
    table = rounded(KIB // 2 * grid["F"] * grid["H"] * grid["W"])
    small = BLOCKS * 1024  # what is rounded up to whole blocks of the allocator
    quotient = rounded(KIB * grid["B"] * grid["F"] * grid["H"] * grid["W"])
    assert offload - table - quotient <= fp8 <= full + quotient + small
    assert after(found["fp8"]) == after(found["full"])


@pytest.mark.parametrize("name", lookup.model_names())
def test_every_recording_with_blocks_is_laid_out_or_refused_in_a_sentence(name: str) -> None:
    model = lookup.model(name)
    job = Job(
        model=name, frames=model.shape.default_frames, height=model.shape.resolutions[0][0],
        width=model.shape.resolutions[0][1],
    )  # fmt: skip
    configuration = Configuration.of(job, Strategy(gradient_checkpointing="fp8"), ONE)
    try:
        facts = load_facts(configuration, model, card_lookup.gpu(ONE.gpu))
    except NotEstimatedError as error:
        assert model.traits.stages and "fp8" in str(error)
        return
    (grid,) = grids(model, job)
    run = lay_out(configuration, facts, grid)
    made = {event for _, events in run.step.stretches for event in events if event >= 0}
    whole = {buffer for buffers in block_inputs(run).values() for buffer in buffers}
    kept = [buffer for buffer in made if run.program.op[buffer] == "checkpoint in 8 bits"]
    assert 2 * len(kept) > len(whole)
    assert 0 < run.total_bytes(kept) <= run.total_bytes(whole) / 2


def test_a_recording_of_two_samples_says_how_many_bytes_a_number_has() -> None:
    """Mochi's counts both in its coefficients. Rehearsed on a virtual H100 (torch 2.13): 29.22 GiB allocated."""
    job = Job(model="mochi-1", frames=43, height=480, width=848, batch_size=2)
    fields = {"autocast": "none", "adapter_dtype": "bf16", "optimizer_step": "fused"}
    strategy = Strategy.read({**fields, "gradient_checkpointing": "fp8"})
    model, machine = lookup.model("mochi-1"), Machine(gpu="h100")
    configuration = Configuration.of(job, strategy, machine)
    (grid,) = grids(model, job)
    run = lay_out(configuration, load_facts(configuration, model, card_lookup.gpu("h100")), grid)
    assert peaks(run)["step"] / 2**30 == pytest.approx(29.22, rel=0.01)
