"""How far holes move the reserved peak."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.catalog import lookup
from planner.catalog.shapes import job_for
from planner.estimate.estimate import estimate, replay
from planner.estimate.fragmentation import reserved_range, widen
from planner.estimate.stages import replay_stages
from planner.layout import margin
from planner.layout.recordings import load_facts
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy
from planner.spec.rules import resolve
from planner.units import GIB, MIB

MODEL = lookup.model("cogvideox-2b")
MACHINE = Machine(gpu="h100-80gb", host_ram=256 * GIB)


def asked(expandable: bool) -> tuple[Job, Strategy]:
    job = job_for(MODEL, {"model": MODEL.name, "method": "full", "batch_size": 4})
    strategy = Strategy(gradient_checkpointing="full", expandable_segments=expandable)
    return job, resolve(job, strategy, MACHINE)


@pytest.mark.parametrize("expandable", [True, False])
def test_the_estimate_is_within_and_the_interval_is_around(expandable: bool) -> None:
    job, strategy = asked(expandable)
    configuration = Configuration.of(job, strategy, MACHINE)
    known = load_facts(configuration)
    _, played = replay(configuration, known)
    found = estimate(configuration, known)
    lowest, highest = reserved_range(played)
    assert reserved_range(played) == (lowest, highest)
    assert lowest <= found.peak.reserved_bytes <= highest
    assert (lowest == highest) is expandable
    less, more = found.peak.reserved_bytes - lowest, highest - found.peak.reserved_bytes
    low, high = margin.interval(found.peak.device_bytes)
    assert found.low_bytes == pytest.approx(low - (1 - 0.02) * less, abs=8)
    assert found.high_bytes == pytest.approx(high + (1 + 0.04) * more, abs=8)


def test_what_lies_free_is_there_once_and_needs_no_more_tensors() -> None:
    job, strategy = asked(False)
    configuration = Configuration.of(job, strategy, MACHINE)
    run, plain = replay(configuration, load_facts(configuration))
    spare = [64 * MIB, 300 * MIB]
    other = replay_stages(run, spare=spare)
    assert [entry.stage for entry in other] == [entry.stage for entry in plain]
    begins = next(index for index, entry in enumerate(plain) if entry.stage is run.first_pass)
    assert [entry.replayed.reserved_peak_bytes for entry in other[:begins]] == [
        entry.replayed.reserved_peak_bytes for entry in plain[:begins]
    ]
    assert other[begins].replayed.reserved_peak_bytes != plain[begins].replayed.reserved_peak_bytes
    assert [entry.allocated_after_bytes for entry in other] == pytest.approx(
        [entry.allocated_after_bytes for entry in plain], abs=16 * MIB
    )


@given(
    st.tuples(st.floats(0, 0.5), st.floats(0, 0.5)),
    st.integers(GIB, 80 * GIB),
    st.floats(0, 0.2),
    st.floats(0, 0.2),
)
def test_the_margin_is_asked_of_both_ends(sides: margin.Sides, device: int, less: float, more: float) -> None:
    low, high = margin.interval(device, sides=widen(sides, device, round(device * less), round(device * more)))
    assert low == pytest.approx(margin.interval(round(device * (1 - less)), sides=sides)[0], abs=4)
    assert high == pytest.approx(margin.interval(round(device * (1 + more)), sides=sides)[1], abs=4)
