"""The shipped measurements against the estimates: the tolerances are promises, not fits."""

from __future__ import annotations

import statistics

import pytest

import profiles
from planner.accuracy import Compared, Prediction, compare
from planner.estimate import after_step_bytes, estimate
from planner.evidence import read_rows
from planner.job import Job, Machine, Strategy
from planner.library import facts

KNOWN_MISSES = {
    "cvx-001": "the size of the card it ran on is printed (16 GB, RTX 4080), which the run needed not to fill",
    "cvxf-114": "full fine-tune at batch 4: AdamW's states find less of the activations' holes, cause unknown",
    "cvxf-139": "full fine-tune at batch 4 under ZeRO-2 with the optimizer on the CPU: CogVideoX 5B is met, 2B is not",
}
"""Rows off by more than 5 %, each with its cause as far as we know it. A new one fails the suite."""


@pytest.fixture(scope="module")
def compared() -> list[Compared]:
    def predict(job: Job, strategy: Strategy, machine: Machine, trainer: str) -> Prediction:
        return Prediction.of(estimate(job, strategy, machine, facts(job, strategy, machine), trainer))

    def after_step(job: Job, strategy: Strategy, machine: Machine, trainer: str) -> int:
        return after_step_bytes(job, strategy, machine, facts(job, strategy, machine), trainer)

    files = sorted(profiles.MEASUREMENTS.glob("*.jsonl"))
    rows = [row for path in files for row in read_rows(path, expandable_segments=False)[0]]
    return compare(rows, predict, after_step)


def test_peaks_of_other_trainers(compared: list[Compared]) -> None:
    rows = [entry for entry in compared if entry.row.implementation != "diffusers"]
    assert not [entry.row.id for entry in rows if entry.unsupported]
    found = {entry.row.id: abs(entry.error_pct) for entry in rows if entry.error_pct is not None}
    assert len(found) >= 7 and max(found.values()) <= 10 and statistics.median(found.values()) <= 1
    assert all(error <= 1 for row, error in found.items() if row.startswith("stm-")), found


def errors(compared: list[Compared], *counters: str) -> dict[str, float]:
    return {
        entry.row.id: entry.error_pct
        for entry in compared
        if entry.row.implementation == "diffusers" and entry.counter in counters and entry.error_pct is not None
    }


def test_reserved_peaks_of_diffusers_trainers(compared: list[Compared]) -> None:
    found = errors(compared, "reserved")
    assert len(found) >= 66
    assert statistics.median(map(abs, found.values())) <= 1.0
    assert {row for row, error in found.items() if abs(error) > 5} <= KNOWN_MISSES.keys()


def test_allocated_and_what_stays_after_a_step(compared: list[Compared]) -> None:
    found = errors(compared, "allocated", "allocated_after_step")
    assert found
    assert all(abs(error) <= 1.5 for error in found.values()), found


def test_no_verdict_is_wrong(compared: list[Compared]) -> None:
    assert not [entry.row.id for entry in compared if entry.judges and entry.missed]
