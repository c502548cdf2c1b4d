"""On a Mac a plan fits, swaps or fails, and the answer says which."""

from __future__ import annotations

from typing import Any

import pytest

from planner.catalog import card_lookup, lookup
from planner.catalog.shapes import job_for
from planner.errors import NotEstimatedError
from planner.estimate.estimate import Assessment, assess
from planner.estimate.working_set import FAILS, MAY_SWAP, SWAPS, headline
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.spec.configuration import Configuration
from planner.spec.job import Machine, Strategy
from planner.units import GIB

MODEL = "wan2.1-t2v-1.3b"


def told(card: str, frames: int = 21, host_ram: int | None = None, **strategy: Any) -> Assessment:
    gpu = card_lookup.gpu(card)
    usable = card_lookup.default_host_ram(gpu, 1) if host_ram is None else host_ram
    machine = Machine(gpu=card, unified=True, host_ram=usable)
    fields = {"optimizer_step": "loop", "expandable_segments": False, "gradient_checkpointing": "full", **strategy}
    job = job_for(lookup.model(MODEL), {"frames": frames})
    configuration = Configuration.of(job, Strategy.read(fields), machine)
    return assess(configuration, load_facts(configuration))


@pytest.mark.parametrize(
    ("card", "frames", "verdict", "begins", "says"),
    [
        ("m4max-64gb", 21, "fits", "", ""),
        ("m4max-36gb", 21, "tight", MAY_SWAP, "macOS recommends 27.0 GiB"),
        ("m4-24gb", 21, "no", SWAPS, "does not fail below 27.2 GiB"),
        ("m4-16gb", 21, "no", FAILS, "stops at 18.1 GiB, 1.7 times the 10.7 GiB"),
        ("m4max-64gb", 81, "no", FAILS, "one tensor has 48.0 GiB, and Metal's longest buffer is below 36.0 GiB"),
    ],
)
def test_what_becomes_of_a_plan(card: str, frames: int, verdict: str, begins: str, says: str) -> None:
    found = told(card, frames).estimate
    assert (found.verdict, found.limit) == (verdict, "gpu" if verdict == "no" else None)
    said = headline(found.assumptions)
    assert said.startswith(begins) and says in said and bool(said) is bool(begins)


def test_the_process_needs_a_part_of_the_same_memory() -> None:
    found = told("m4max-64gb", host_ram=26 * GIB).estimate
    assert found.verdict == "no"
    assert "of the process it is more than the 26.0 GiB" in headline(found.assumptions)


def test_the_range_holds_what_others_take_and_nothing_is_said_of_seconds() -> None:
    found = told("m4max-64gb").estimate
    assert found.high_bytes > 1.6 * found.peak.device_bytes > found.low_bytes
    assert found.to_json()["step_seconds"] is None
    assert found.attention_kernel == "math"
    assert any("no run on a Mac was compared" in note for note in found.assumptions)


def test_the_heaps_hold_the_tensors_and_nothing_is_cuda_s() -> None:
    run, played, found, _ = told("m4max-64gb")
    assert "encode" not in found.phases
    for entry in played:
        assert entry.replayed.allocated_peak_bytes <= entry.replayed.reserved_peak_bytes
    workspaces = {run.program.op[at] for at, kind in enumerate(run.program.category) if kind == "workspace"}
    assert workspaces == {"_safe_softmax"}


def test_whole_scores_are_what_a_clip_needs() -> None:
    """Of 12 heads, 9,360 tokens each way, in fp32: two of them and the softmax's copy beside the mask of rows."""
    tokens = 6 * 30 * 52
    scores = 12 * tokens**2
    played = told("m4max-64gb").played
    peak = max(entry.replayed.allocated_peak_bytes for entry in played)
    assert 13 * scores < peak < 13 * scores + 8 * GIB


def test_other_trainers_are_refused_there() -> None:
    configuration = told("m4max-64gb").estimate.configuration
    facts = load_facts(configuration)
    with pytest.raises(NotEstimatedError, match="what simpletuner does on Apple M4 Max with 64 GB is not known"):
        lay_out(configuration, facts, {"B": 1}, "simpletuner")
