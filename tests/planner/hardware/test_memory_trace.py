"""A probe's trace: few points that keep the peaks, through a file and back, laid over the replayed step."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import VplanError
from planner.estimate.timeline import Mark, Point, Timeline, thin
from planner.hardware.memory_trace import POINTS, MemoryTrace, PhaseTrace, Thinned, laid_over, trace_of
from planner.units import GIB, MIB
from tests.planner.search.searching import question

TIMELINE = Timeline(
    ("weights",), (Point(0, (GIB,), GIB),), (Mark(0, "forward"), Mark(40, "backward"), Mark(80, "optimizer")), 100,
    Point(0, (GIB,), GIB), "forward", MIB,
)  # fmt: skip


@given(st.lists(st.integers(0, 10**6), max_size=700))
def test_few_points_keep_the_order_and_the_peaks(samples: list[int]) -> None:
    thinned = Thinned()
    for sample in samples:
        thinned.add(sample)
    kept = thinned.take()
    assert len(kept) <= POINTS and max(kept, default=0) == max(samples, default=0)
    each = -(-len(samples) // max(len(kept), 1)) or 1
    each = 1 << (each - 1).bit_length()
    assert kept == [max(samples[first : first + each]) for first in range(0, len(samples), each)]
    assert thinned.take() == []


def test_a_trace_lies_over_the_stretches_of_its_phases() -> None:
    phases = {
        "step": PhaseTrace(seconds=9, device_mib=(7,)),
        "train": PhaseTrace(seconds=3, device_mib=(1000, 2000, 3000, 1500), allocated_mib=(900, 2900, 1000)),
        "optimizer": PhaseTrace(seconds=1, device_mib=(1800,)),
    }
    row = json.loads(json.dumps({"id": "a", "details": {"trace": MemoryTrace(phases=phases).to_json()}}))
    found = trace_of(row)
    assert found == MemoryTrace(phases=phases)
    over = laid_over(TIMELINE, found, "a")
    assert over.device == tuple(
        (at, mib * MIB) for at, mib in ((10, 1000), (30, 2000), (50, 3000), (70, 1500), (90, 1800))
    )
    assert over.allocated == ((0, 80, 2900 * MIB),)


def test_what_is_no_trace_is_named() -> None:
    assert trace_of({"id": "a"}) is None and trace_of({"id": "a", "details": {"trace": None}}) is None
    with pytest.raises(VplanError, match="the trace of a: phases"):
        trace_of({"id": "a", "details": {"trace": {"schema": 1, "phases": {"train": {"seconds": -1}}}}})
    many = {"seconds": 1, "device_mib": [1] * (POINTS + 1)}
    with pytest.raises(VplanError):
        trace_of({"id": "a", "details": {"trace": {"schema": 1, "phases": {"train": many}}}})


def test_a_simulated_probe_gives_one_too() -> None:
    from planner.probe.simulated import SimulatedRunner
    from planner.spec.plan import Plan
    from tests.planner.search.searching import SCREEN

    asks = question("80GB", batch_size=4)
    strategy = asks.strategy.replace(gradient_checkpointing="none")
    plan = Plan(job=asks.job, strategy=strategy, machine=asks.machine.replace(host_ram=64 * GIB))
    row = SimulatedRunner(0, SCREEN.facts, SCREEN.run_cache.lay_out, 0.0).run(plan, steps=3, time_limit=1e6)
    assert row.measured.outcome == "ok" and row.measured.device_bytes is not None
    trace = trace_of(row.to_json())
    assert trace is not None and set(trace.phases) == {"train", "optimizer"}
    train = trace.phases["train"]
    assert max(train.device_mib) == row.measured.device_bytes // MIB and train.allocated_mib is not None
    assert row.measured.allocated_bytes is not None and train.allocated_mib[1] == row.measured.allocated_bytes // MIB


def test_a_thinned_line_keeps_its_ends_and_both_peaks() -> None:
    line = [(at, at * 7919 % 501, at * 104729 % 503) for at in range(1000)]
    for points in (4, 7, 50):
        kept = thin(line, points)
        assert len(kept) <= points and kept == sorted(kept) and set(kept) <= set(line)
        assert kept[0] == line[0] and kept[-1] == line[-1]
        assert max(point[1] for point in kept) == max(point[1] for point in line)
        assert max(point[2] for point in kept) == max(point[2] for point in line)
    assert thin(line, 10_000) == line and thin([], 4) == []
