"""Published step times: the rows, how errors are summed up, and how close the estimates are today."""

import re

import pytest

import profiles
from planner.catalog import card_lookup
from planner.catalog.shapes import grids
from planner.estimate.estimate import estimate, run_seconds
from planner.evidence.accuracy import Prediction
from planner.evidence.jsonl import rows_by_id
from planner.evidence.step_times import (
    FITTED,
    JUDGING,
    StepTime,
    TimedCell,
    answer,
    compare,
    far_off,
    left_out,
    published_step_times,
    summary,
)
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy
from tests.covering import covering

CELLS = published_step_times()


def cell(seconds, told, name="a", gpu="l40s", reason=None):
    published = StepTime(
        id=name, implementation="vplan", step_seconds=seconds, job={}, strategy={}, machine={"gpu": gpu}
    )
    return TimedCell(published=published, seconds=told, left_out=reason)


def test_every_row_says_where_it_comes_from_and_what_is_left_out_why():
    rows = [row for path in (profiles.MEASUREMENTS / "step_times").glob("*.jsonl") for row in rows_by_id(path).values()]
    assert len(rows) == len(CELLS) == 390
    for row in rows:
        assert re.fullmatch("[0-9a-f]{40}", row["source"]["commit"])
        assert row["source"]["repo"] and row["source"]["where"]
        assert card_lookup.gpu(row["machine"]["gpu"])
    assert sum(one.left_out is None for one in CELLS) == 140


def test_errors_are_summed_up_over_what_is_compared():
    cells = [cell(1.0, 1.1), cell(2.0, 1.0, "b"), cell(4.0, 4.0, "c", "h100-80gb"), cell(1.0, None, "d", reason="no")]
    found = summary(cells)
    assert (found["n"], found["of"]) == (3, 4)
    assert found["median_abs_pct"] == pytest.approx(10)
    assert found["max_abs_pct"] == found["p90_abs_pct"] == pytest.approx(50)
    assert found["within_20_pct"] == pytest.approx(200 / 3)
    assert found["rank_correlation"] == pytest.approx(0.5)
    assert [one.published.id for one in far_off(cells)] == ["b"]
    assert left_out(cells) == {"no": 1}
    assert answer(cells)["by_gpu"]["h100-80gb"]["n"] == 1
    assert summary([cells[-1]])["median_abs_pct"] is None


def test_cells_with_one_published_time_have_no_rank_correlation():
    cells = [cell(2.0, told, name) for name, told in (("a", 1.9), ("b", 2.0), ("c", 2.2))]
    assert summary(cells)["rank_correlation"] is None
    assert answer(cells)["by_gpu"]["l40s"]["n"] == 3


def test_the_halves_are_told_apart_by_hash_alone():
    halves = [one.half for one in CELLS]
    assert {FITTED, JUDGING} == set(halves)
    assert 0.4 < halves.count(JUDGING) / len(halves) < 0.6


LATEST = ("st-chroma", "st-ernie", "st-lumina2", "st-ltx23", "mlperf-5.0-sd2")
"""Cells of models that came last, and had no part in the fit."""


def seconds_alone(configuration, trainer):
    """What an estimate says of a step's seconds: no memory is replayed."""
    facts = load_facts(configuration)
    shapes = grids(facts.model, configuration.job)
    seconds = max(run_seconds(lay_out(configuration, facts, shape, trainer))[0] for shape in shapes)
    unasked = dict.fromkeys(("allocated_bytes", "reserved_bytes", "device_bytes"), 0)
    return Prediction(**unasked, verdict="fits", basis="estimated", step_seconds=seconds)


TIMED = [cell for cell in CELLS if not cell.left_out]


@pytest.mark.parametrize("cell", covering(TIMED, lambda cell: [cell.implementation]), ids=lambda cell: cell.id)
def test_the_seconds_are_those_of_the_estimate(cell):
    """Of each trainer's first cell."""

    def predict(configuration, trainer):
        return Prediction.of(estimate(configuration, load_facts(configuration), trainer))

    (whole,), (alone,) = compare([cell], predict), compare([cell], seconds_alone)
    assert (alone.seconds, alone.left_out) == (whole.seconds, whole.left_out)


def test_published_steps_are_met_as_closely_as_the_documentation_says():
    every = compare(CELLS, seconds_alone)
    told = answer(every)["summary"]
    assert told["n"] == 140 and told["median_abs_pct"] < 9
    assert told["within_20_pct"] > 88 and told["rank_correlation"] > 0.97
    cells = [one for one in every if not one.published.id.startswith(LATEST)]
    found = answer(cells)
    whole, judging = found["summary"], found["halves"][JUDGING]
    assert whole["n"] == 85
    assert whole["median_abs_pct"] < 8 and judging["median_abs_pct"] < 8
    assert whole["within_20_pct"] > 95
    assert all(part["rank_correlation"] > 0.97 for part in found["by_gpu"].values() if part["n"])
    explained = ("nemo-wan14b-automodel", "st-chroma-bf16", "st-ltx23-bf16")
    assert all(one.published.id.startswith(explained) for one in far_off(every))


def test_a_step_s_arithmetic_is_what_mlperf_counts():
    """MLPerf Training v5.1's FLUX.1: 20.3 TFLOP a sample (config_common.sh, MODEL_TFLOP_PER_SAMPLE)."""
    row = next(one for one in CELLS if one.id.startswith("mlperf-5.1-flux1"))
    strategy = Strategy(gradient_checkpointing="none", sharding="ddp")
    found = Configuration.of(Job.read(row.job, row.id), strategy, Machine.read(row.machine, row.id))
    samples = row.job["batch_size"]
    assert estimate(found, load_facts(found)).flops / samples == pytest.approx(20.3e12, rel=0.02)
