"""Runs of several shapes on one allocator: what stays has one number, whatever comes and goes beside it."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.catalog import lookup
from planner.catalog.shapes import grids, job_for
from planner.dialects.ai_toolkit.models import ARCHES
from planner.errors import NotRecordedError
from planner.estimate.common_numbers import common_numbers
from planner.estimate.stages import replay_stages
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.layout.run import STRATEGY_MOMENT, Facts, Run
from planner.spec.configuration import Configuration
from planner.spec.job import Bucket, Job, Machine, Strategy
from planner.spec.rules import resolve
from planner.units import MIB
from tests.planner.hand_made import GRID, laid_out

SMALLER = {**GRID, "H": GRID["H"] // 2}
MACHINE = Machine(gpu="h200-141gb")


def with_more(grid: dict[str, int], passing: int, kept: tuple[int, ...]) -> Run:
    """A run at a shape in which some buffers come and go with each step, and others are loaded behind them."""
    run = laid_out(grid=grid)
    for _ in range(passing):
        buffer = run.new(MIB, "temporary", "output of an adapter")
        run.step.stretches.append((STRATEGY_MOMENT, [buffer, ~buffer]))
    for nbytes in kept:
        run.add(run.load, nbytes, "buckets", "ring")
    return run


COUNTS = st.tuples(st.integers(0, 3), st.integers(0, 3))


@given(counts=COUNTS, kept=st.lists(st.sampled_from([MIB, 8 * MIB]), min_size=1, max_size=3))
def test_what_comes_and_goes_at_one_shape_alone_changes_nothing_of_what_stays(
    counts: tuple[int, int], kept: list[int]
) -> None:
    large, small = (with_more(grid, count, tuple(kept)) for grid, count in zip((GRID, SMALLER), counts, strict=True))
    left = replay_stages(large, small)[-1].allocated_after_bytes
    assert (
        left == replay_stages(large)[-1].allocated_after_bytes == replay_stages(small, large)[-1].allocated_after_bytes
    )


def test_what_is_live_is_told_in_the_numbers_of_each_run() -> None:
    large, small = with_more(GRID, 0, (MIB, 2 * MIB)), with_more(SMALLER, 2, (MIB, 2 * MIB))
    rings = [[at for at, name in enumerate(run.program.op) if name == "ring"] for run in (large, small)]
    common = common_numbers(large, small)
    assert rings[0] != rings[1]
    assert [common.renamed[ring] for ring in rings[1]] == rings[0]
    assert common.own(rings[0]) == rings[1]
    assert [common.sizes[ring] for ring in rings[0]] == [MIB, 2 * MIB]
    assert common_numbers(large, large).renamed == {}
    for entry in replay_stages(large, small):
        if entry.run is small:
            assert set(rings[1]) <= set(entry.before)


def recorded(job: Job, typed: dict[str, object]) -> tuple[Configuration, Facts]:
    """As it trains, without autocast, or as the nearest that is recorded."""
    for autocast in ("none", "bf16"):
        strategy = Strategy.read({**typed, "autocast": autocast})
        configuration = Configuration.of(job, resolve(job, strategy, MACHINE), MACHINE)
        with contextlib.suppress(NotRecordedError):
            return configuration, load_facts(configuration)
    raise AssertionError(job.model)


@pytest.mark.parametrize("model", sorted(ARCHES))
def test_ai_toolkit_offloads_layers_at_any_two_resolutions(model: str) -> None:
    """At 512 pixels an image has as many tokens as a prompt in some models, and its products take the same bytes."""
    profile = lookup.model(model)
    frames = 1 if profile.kind == "image" else 9
    sides = [(frames, 512), (frames, 768)]
    buckets = tuple(Bucket(frames=frames, height=side, width=side) for frames, side in sides)
    wanted = {"model": model, "frames": frames, "height": 768, "width": 768, "buckets": buckets}
    job = job_for(profile, {**wanted, "method": "lora"})
    quantised = "bf16" if profile.traits.stages else "fp8"  # a U-Net is recorded in 16 bits
    typed = {"weights_dtype": quantised, "adapter_dtype": "fp32", "text_encoder": "cached"}
    swaps = {**typed, "gradient_checkpointing": "full", "swap_blocks": profile.blocks // 3}
    configuration, facts = recorded(job, swaps)
    runs = [lay_out(configuration, facts, shape, "ai-toolkit") for shape in grids(profile, job)]
    assert len(runs) == 2
    kept = {replay_stages(*order, cached=False)[-1].allocated_after_bytes for order in (runs, runs[::-1])}
    assert kept == {replay_stages(run, cached=False)[-1].allocated_after_bytes for run in runs}
