"""The shipped measurements against the estimates: the tolerances are promises, not fits."""

from __future__ import annotations

import statistics

import pytest

import profiles
from planner.allocator.caching import CachingAllocator
from planner.catalog.shapes import grid
from planner.estimate.estimate import estimate
from planner.evidence.accuracy import PEAKS, Comparison, Prediction, compare, coverage, estimated_after_step
from planner.evidence.published import Row, read_rows
from planner.evidence.published_rehearsals import rehearsed_peaks
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.layout.run import Run
from planner.spec.configuration import Configuration
from planner.units import GIB, MIB

KNOWN_MISSES = {
    "cvx-001": "the memory of the card is printed (16 GB, RTX 4080), see planner.evidence.published.CARD_SIZES",
    "cvxf-114": "full fine-tune at batch 4: 33.38 GiB in a rehearsal: most likely misprinted (docs/accuracy)",
    "cvxf-031": "LoRA of rank 256 at batch 4: 20.99 GiB in a rehearsal, so holes of the process that was measured",
    "cvxf-061": "the same plan with another optimizer",
    "cvxf-091": "the same plan with its optimizer in host RAM",
    "cvxf-121": "full fine-tune at batch 4 with 8-bit states: 26.19 GiB in a rehearsal, so holes as well",
    "cvxf-129": "the same plan with its optimizer in host RAM",
}
"""Rows off by more than 5 %, each with its cause as far as we know it. A new one fails the suite."""


OUTSIDE_WITH_VALIDATION = {
    "cvxf-114-validation": "most likely misprinted like its training",
    "cvxf-061-validation": "the peak is that of its training",
    "cvxf-091-validation": "the peak is that of its training",
    "cvxf-129-validation": "the peak is that of its training",
    "cvxt-2b-full-b1-cpu-validation": "not explained: 1.5 GiB more than estimated",
}
"""The same for the 63 peaks with validation."""


REHEARSALS_MISSED = {
    "ds-001": 4.5,
    "cvxf-139": 12.0,
    "cvxf-139-validation": 12.0,  # the peak is that of its training
    "cvx-001": 11.0,
    # Predicted as printed, with T5 in fp16; rehearsed in bf16, as the script's configuration says.
    "cvxf-105-validation": 3.2,
    "cvxt-2b-lora-r256-b1-zero2-validation": 8.2,
    "cvxt-5b-lora-r256-b1-zero2-validation": 7.0,
    "cvxt-2b-full-b1-zero2-validation": 8.5,
    # diffusers of October 2024 pads before it convolves.
    "cvxt-2b-lora-r16-b1-adamw-validation": 2.3,
    "cvxt-2b-lora-r64-b1-8bit-validation": 2.3,
    "cvxt-2b-lora-r64-b1-cpu-validation": 2.3,
}
"""Rehearsals of published rows that are off by more than 1.5 % -> by how many per cent at most. The causes are in
docs/accuracy/published-runs.md, "Rehearsals that are not met"."""


@pytest.fixture(scope="module")
def compared() -> list[Comparison]:
    def predict(configuration: Configuration, trainer: str) -> Prediction:
        return Prediction.of(estimate(configuration, load_facts(configuration), trainer))

    files = sorted(profiles.MEASUREMENTS.glob("*.jsonl"))
    rows = [row for path in files for row in read_rows(path, expandable_segments=False)[0]]
    return compare(rows, predict, estimated_after_step)


def test_peaks_of_other_trainers(compared: list[Comparison]) -> None:
    rows = [entry for entry in compared if entry.row.implementation != "diffusers"]
    assert not [entry.row.id for entry in rows if entry.unsupported]
    found = {entry.row.id: abs(entry.error_pct) for entry in rows if entry.error_pct is not None}
    assert len(found) >= 7 and max(found.values()) <= 10 and statistics.median(found.values()) <= 1
    assert all(error <= 1 for row, error in found.items() if row.startswith("stm-")), found


def errors(compared: list[Comparison], *counters: str) -> dict[str, float]:
    return {
        entry.row.id: entry.error_pct
        for entry in compared
        if entry.row.implementation == "diffusers" and entry.counter in counters and entry.error_pct is not None
    }


def test_reserved_peaks_of_diffusers_trainers(compared: list[Comparison]) -> None:
    found = errors(compared, "reserved")
    assert len(found) >= 66
    assert statistics.median(map(abs, found.values())) <= 1.0
    assert {row for row, error in found.items() if abs(error) > 5} <= KNOWN_MISSES.keys()


def test_allocated_and_what_stays_after_a_step(compared: list[Comparison]) -> None:
    found = errors(compared, "allocated", "allocated_after_step")
    assert found
    assert all(abs(error) <= 1.5 for error in found.values()), found


def test_no_verdict_is_wrong(compared: list[Comparison]) -> None:
    assert not [entry.row.id for entry in compared if entry.judges and entry.missed]


@pytest.mark.parametrize(
    "files", [["published.jsonl"], sorted(path.name for path in profiles.MEASUREMENTS.glob("*.jsonl"))]
)
def test_intervals_hold_what_they_promise(compared: list[Comparison], files: list[str]) -> None:
    ids = {row.id for name in files for row in read_rows(profiles.MEASUREMENTS / name)[0]}
    found = coverage([entry for entry in compared if entry.row.id in ids and entry.counter in PEAKS])
    assert found["n"] >= 36 and found["inside_pct"] >= 90 and found["median_width_pct"] <= 8, found


def test_reserved_peaks_with_validation(compared: list[Comparison]) -> None:
    entries = [entry for entry in compared if entry.counter == "reserved_with_validation"]
    found = errors(compared, "reserved_with_validation")
    assert len(found) == 63 and statistics.median(map(abs, found.values())) <= 1.75
    assert {row for row, error in found.items() if abs(error) > 5} <= OUTSIDE_WITH_VALIDATION.keys()
    covered = coverage(entries)
    assert covered["inside_pct"] >= 95 and covered["median_width_pct"] <= 9, covered


def test_rehearsals_of_published_runs_are_met(compared: list[Comparison]) -> None:
    """What is printed for some of these runs is off by up to 17 %; what their own code takes is not."""
    peaks = rehearsed_peaks()
    found = {
        entry.row.id: 100 * (entry.predicted.of_rehearsal / peaks[entry.row.id] - 1)
        for entry in compared
        if entry.row.id in peaks and entry.predicted is not None
    }
    assert found.keys() == peaks.keys()
    assert statistics.median(map(abs, found.values())) <= 0.5, found
    missed = {row: abs(error) for row, error in found.items() if abs(error) > 1.5}
    assert missed.keys() == REHEARSALS_MISSED.keys(), found
    assert all(error <= REHEARSALS_MISSED[row] for row, error in missed.items()), missed


SPARE_SEGMENTS = ((), (262,), (530, 1042), (66, 400, 2100))
"""MiB that lie free before the first step, in a cache that is really empty: other holes for all that comes."""


def first_step(run: Run, spare: tuple[int, ...]) -> tuple[float, float]:
    """GiB reserved by the first forward and backward, and by the optimizer's step behind them."""
    allocator = CachingAllocator(expandable_segments=False)
    for stage in (run.load, run.phases.unload):
        assert stage is not None
        allocator.run(stage.ops, run.sizes)
        allocator.empty_cache()
    sizes = [*run.sizes, *(MIB * size for size in spare)]
    numbers = range(len(run.sizes), len(sizes))
    allocator.run([*numbers, *(~number for number in numbers)], sizes)
    stages = (run.first_step or run.step, run.optimizer_first)
    passes, step = (allocator.run(stage.ops, sizes).reserved_peak_bytes / GIB for stage in stages)
    return passes, step


def laid_out(row: Row) -> Run:
    configuration = Configuration.of(row.job, row.strategy, row.machine)
    facts = load_facts(configuration)
    return lay_out(configuration, facts, grid(facts.model, row.job), row.trainer)


def test_no_holes_explain_the_open_row() -> None:
    """Whatever holes there are, AdamW's first step at batch 4 ends within 0.2 GiB of the same; 38.281 is printed."""
    files = sorted(profiles.MEASUREMENTS.glob("*.jsonl"))
    rows = {row.id: row for path in files for row in read_rows(path, expandable_segments=False)[0]}
    for row, low, high in (("cvxf-114", 33.2, 33.4), ("cvxf-109", 33.85, 34.25)):
        run = laid_out(rows[row])
        found = [first_step(run, spare) for spare in SPARE_SEGMENTS]
        assert len({passes for passes, _ in found}) > 1
        assert all(low <= step <= high for _, step in found), (row, found)
