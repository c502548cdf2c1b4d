"""Errors and verdicts by hand-written predictions, and how rows of both forms are read."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import profiles
from planner import terminal
from planner.commands import cli
from planner.commands._shared.accuracy import render_accuracy
from planner.errors import VplanError
from planner.estimate.estimate import estimate_on_card
from planner.evidence.accuracy import (
    Comparison,
    Predict,
    Prediction,
    answer,
    by_grid,
    compare,
    only,
    summary,
    worst_first,
)
from planner.evidence.published import DEFAULTS, Row, read_rows
from planner.layout.recordings import load_facts
from planner.schema import choices
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import PhaseName, PhasePeak, Verdict
from planner.units import GIB, gib

WAN = {"model": "wan2.1-t2v-1.3b", "frames": 81, "height": 480, "width": 832}


def line(**fields: Any) -> dict[str, Any]:
    """A published row: 20 to 22 GiB reserved, on an A100."""
    measured = {"outcome": "measured", "counter": "reserved", "phase": "train", "printed": 21, "printed_unit": "GB"}
    return {
        "id": "a-1",
        "job": WAN,
        "strategy": {"autocast": "bf16"},
        "machine": {"gpu": "a100-80gb", "gpus": 1},
        "measured": {**measured, "low_gib": 20.0, "high_gib": 22.0, **fields.pop("measured", {})},
        "implementation": "diffusers",
        "source": {"repo": "somebody/something"},
        **fields,
    }


def own(outcome: str = "ok", **measured: Any) -> dict[str, Any]:
    """A row as our probes write it: 10, 11 and 12 GiB."""
    counters = {"allocated_bytes": 10 * GIB, "reserved_bytes": 11 * GIB, "device_bytes": 12 * GIB}
    return {
        "id": "own-1",
        "job": WAN,
        "strategy": {"gradient_checkpointing": "full"},
        "machine": {"gpu": "24GB", "host_ram": 64 * GIB},
        "measured": {"outcome": outcome, "phase": "train", **counters, "step_seconds": 2.0, "retries": 0, **measured},
        "env": {"gpu": "RTX 4090", "torch": "2.13"},
    }


def write(folder: Path, *rows: dict[str, Any], tail: str = "") -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return path


def read(folder: Path, *rows: dict[str, Any], **options: Any) -> list[Row]:
    return read_rows(write(folder, *rows), **options)[0]


def predictor(
    allocated: float = 17.0,
    reserved: float = 18.0,
    device: float = 19.0,
    verdict: Verdict = "fits",
    allowed: tuple[float, float] = (0.975, 1.05),
) -> Predict:
    """Predicts the same GiB for everything."""
    prediction = Prediction(
        allocated_bytes=round(allocated * GIB),
        reserved_bytes=round(reserved * GIB),
        device_bytes=round(device * GIB),
        verdict=verdict,
        basis="recorded",
        low=allowed[0],
        high=allowed[1],
    )
    return lambda configuration, trainer: prediction


def refuse(configuration: Configuration, trainer: str) -> Prediction:
    raise VplanError(f"no tape of {configuration.job.model}", "record one")


def after_step(configuration: Configuration, trainer: str) -> int:
    return 5 * GIB


def judged(folder: Path, *rows: dict[str, Any], **predicted: Any) -> list[Comparison]:
    return compare(read(folder, *rows), predictor(**predicted), after_step)


# ---- errors


@pytest.mark.parametrize(
    ("reserved", "error"), [(18.0, -10.0), (19.0, -5.0), (20.0, 0.0), (21.3, 0.0), (22.0, 0.0), (24.2, 10.0)]
)
def test_error_is_the_distance_to_the_nearer_bound(tmp_path: Path, reserved: float, error: float) -> None:
    (entry,) = judged(tmp_path, line(), reserved=reserved, device=30.0)
    assert entry.error_pct == pytest.approx(error)
    assert entry.predicted_gib == pytest.approx(reserved)


@pytest.mark.parametrize(
    ("counter", "predicted"), [("allocated", 17.0), ("reserved", 18.0), ("device", 19.0), ("allocated_after_step", 5.0)]
)
def test_each_counter_is_compared_with_its_own_prediction(tmp_path: Path, counter: str, predicted: float) -> None:
    (entry,) = judged(tmp_path, line(measured={"counter": counter, "low_gib": 20.0, "high_gib": 20.0}))
    assert entry.predicted_gib == predicted
    assert entry.error_pct == pytest.approx((predicted / 20 - 1) * 100)


@pytest.mark.parametrize(
    ("low", "high", "nearest", "error"),
    [
        (10.0, 15.0, 17.0, 13.3333),  # below the allocated prediction
        (10.0, 17.5, 17.5, 0.0),  # overlaps under the reserved one
        (17.5, 18.5, 18.0, 0.0),
        (18.5, 30.0, 18.5, 0.0),
        (20.0, 30.0, 19.0, -5.0),  # above the device one
    ],
)
def test_unknown_compares_two_intervals(tmp_path: Path, low: float, high: float, nearest: float, error: float) -> None:
    (entry,) = judged(tmp_path, line(measured={"counter": "unknown", "low_gib": low, "high_gib": high}))
    assert entry.predicted_gib == nearest
    assert entry.error_pct == pytest.approx(error, abs=1e-4)


# ---- verdicts


@pytest.mark.parametrize(
    ("outcome", "verdict", "missed"),
    [
        ("oom", "fits", "under"),
        ("oom", "tight", None),
        ("oom", "no", None),
        ("fits", "fits", None),
        ("fits", "tight", None),
        ("fits", "no", "false_refusal"),
        ("measured", "no", "false_refusal"),
    ],
)
def test_verdict_against_outcome(tmp_path: Path, outcome: str, verdict: Verdict, missed: str | None) -> None:
    bounds = {} if outcome == "measured" else {"low_gib": None, "high_gib": None, "printed": None}
    (entry,) = judged(tmp_path, line(measured={"outcome": outcome, "counter": "device", **bounds}), verdict=verdict)
    assert entry.missed == missed
    assert (entry.error_pct is None) == (outcome != "measured")
    found = summary([entry])["verdict"]
    assert found == {"n": 1, "under": int(missed == "under"), "false_refusal": int(missed == "false_refusal")}


def test_own_row_gives_one_number_per_counter_and_one_verdict(tmp_path: Path) -> None:
    entries = judged(tmp_path, own(), allocated=10.0, reserved=12.1, device=9.0, verdict="no")
    assert [(entry.counter, round(entry.error_pct or 0, 6)) for entry in entries] == [
        ("allocated", 0),
        ("reserved", 10),
        ("device", -25),
    ]
    assert summary(entries)["verdict"] == {"n": 1, "under": 0, "false_refusal": 1}
    assert {entry.row.implementation for entry in entries} == {"vplan"}


def test_own_row_without_a_counter_compares_the_others(tmp_path: Path) -> None:
    entries = judged(tmp_path, own(device_bytes=None, reserved_bytes=0))
    assert [entry.counter for entry in entries] == ["allocated"]


@pytest.mark.parametrize("outcome", ["oom", "host-oom"])
def test_own_oom_row_is_judged_by_its_verdict_alone(tmp_path: Path, outcome: str) -> None:
    (entry,) = judged(tmp_path, own(outcome), verdict="fits")
    assert (entry.measured, entry.error_pct, entry.missed) == (None, None, "under")
    assert entry.to_json()["predicted_gib"] == 19.0


def test_crash_says_nothing_about_memory(tmp_path: Path) -> None:
    (entry,) = judged(tmp_path, own("crash"))
    assert entry.unsupported == "outcome crash says nothing about memory"
    assert summary([entry])["verdict"]["n"] == 0


# ---- what cannot be predicted


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"job": {**WAN, "model": "nobodys-model"}}, "'nobodys-model' is not known"),
        ({"job": {**WAN, "frames": 80}}, "frames 80 is not 4n+1"),
        ({"machine": {"gpu": "tpu-v5"}}, "'tpu-v5' is neither a card"),
        ({"strategy": {"swap_blocks": 40, "gradient_checkpointing": "full"}}, "swap_blocks 40 of the 30"),
        ({"strategy": {"offload_params": "cpu"}}, "offload_params needs zero-3"),
        ({"strategy": {"optimizer": "sophia"}}, "optimizer 'sophia' is not in the vocabulary"),
    ],
)
def test_what_we_do_not_know_is_a_row_and_no_error(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    (entry,) = judged(tmp_path, line(**changes))
    assert entry.unsupported is not None
    assert reason in entry.unsupported
    found = answer([entry])
    assert found["summary"]["unsupported"] == 1
    assert found["summary"]["reserved"]["n"] == 0
    row = found["rows"][0]
    assert (row["predicted_gib"], row["error_pct"], row["verdict"], row["basis"]) == (None, None, None, None)
    assert (row["low_gib"], row["high_gib"]) == (20.0, 22.0)


def test_an_estimator_that_refuses_says_why(tmp_path: Path) -> None:
    entries = compare(read(tmp_path, own()), refuse, after_step)
    assert [entry.unsupported for entry in entries] == ["no tape of wan2.1-t2v-1.3b"] * 3


# ---- what the estimator is asked


def asked(folder: Path, row: dict[str, Any], **options: Any) -> tuple[Job, Strategy, Machine]:
    questions = []

    def predict(configuration: Configuration, trainer: str) -> Prediction:
        questions.append((configuration.job, configuration.strategy, configuration.machine))
        return predictor()(configuration, trainer)

    compare(read(folder, row, **options), predict, after_step)
    (question,) = questions
    return question


def test_missing_fields_are_the_trainers_not_ours(tmp_path: Path) -> None:
    _, strategy, _ = asked(tmp_path, line())
    assert (strategy.expandable_segments, strategy.grad_buckets) == (False, "copy")
    job, strategy, _ = asked(tmp_path, line(implementation="diffsynth"))
    assert job.lora_rank == 32
    assert job.lora_targets == ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")
    assert (strategy.adapter_dtype, strategy.text_encoder, strategy.gradient_checkpointing) == (
        *("bf16", "resident"),
        "full",
    )
    flux = {"model": "flux.1-dev", "frames": 1, "height": 1024, "width": 1024}
    job, strategy, _ = asked(tmp_path, line(implementation="diffsynth", job=flux))
    assert (job.lora_targets, strategy.gradient_checkpointing) == (None, "none")


def test_what_a_row_says_stays(tmp_path: Path) -> None:
    said = {"expandable_segments": True, "grad_buckets": "view", "adapter_dtype": "fp32", "compute_dtype": "fp32"}
    _, strategy, _ = asked(tmp_path, line(implementation="diffsynth", strategy=said), expandable_segments=False)
    assert {field: getattr(strategy, field) for field in said} == said


@pytest.mark.parametrize("expandable", [True, False])
def test_allocator_of_rows_that_do_not_say(tmp_path: Path, expandable: bool) -> None:
    _, strategy, _ = asked(tmp_path, line(), expandable_segments=expandable)
    assert strategy.expandable_segments == expandable
    _, strategy, _ = asked(tmp_path, own(), expandable_segments=False)
    assert strategy.expandable_segments  # our own trainer's default is what ran


@pytest.mark.parametrize(
    ("said", "computed"),
    [
        ({"weights_dtype": "fp32", "autocast": "fp16"}, "fp16"),
        ({"weights_dtype": "fp16", "autocast": "none"}, "fp16"),
        ({"weights_dtype": "fp8", "autocast": "bf16"}, "bf16"),
        ({"weights_dtype": "nf4", "autocast": "none"}, "bf16"),
    ],
)
def test_compute_dtype_is_the_mixed_precision(tmp_path: Path, said: dict[str, str], computed: str) -> None:
    assert asked(tmp_path, line(strategy=said))[1].compute_dtype == computed


def test_own_rows_have_our_defaults_and_names_are_looked_up(tmp_path: Path) -> None:
    row = {**own(), "job": {**WAN, "model": "Wan-AI/Wan2.1-T2V-1.3B"}, "machine": {"gpu": "2x4090"}}
    job, strategy, machine = asked(tmp_path, row)
    assert job.model == "wan2.1-t2v-1.3b"
    assert (machine.gpu, machine.gpus, machine.host_ram) == ("rtx4090", 2, 64 * GIB)
    assert (strategy.expandable_segments, strategy.sharding, strategy.weights_dtype) == (True, "ddp", "bf16")


def test_defaults_are_fields_and_values_of_our_vocabulary() -> None:
    for default in DEFAULTS:
        record = Job if default.field in Job.model_fields else Strategy
        assert default.source
        values = choices(record, default.field)
        assert not values or default.value in values


@pytest.mark.parametrize(
    ("source", "changes", "seen"),
    [
        ({"repo": "somebody/something"}, {}, 40.0),
        ({"repo": "a-r-r-o-w/cogvideox-factory", "where": "metrics.sh"}, {}, 30.0),
        ({"repo": "a-r-r-o-w/cogvideox-factory", "where": "metrics.sh"}, {"batch_size": 4}, 20.0),
        ({"repo": "a-r-r-o-w/cogvideox-factory", "where": "metrics.sh"}, {"method": "full"}, 20.0),
    ],
)
def test_a_publisher_saw_the_phases_its_counter_ran_in(
    tmp_path: Path, source: dict[str, str], changes: dict[str, Any], seen: float
) -> None:
    phases: dict[PhaseName, float] = {"load": 40.0, "first_step": 20.0, "train": 30.0, "optimizer": 10.0, "save": 50.0}
    peaks = {
        phase: PhasePeak(**dict.fromkeys(PhasePeak.model_fields, round(peak * GIB))) for phase, peak in phases.items()
    }

    def predict(configuration: Configuration, trainer: str) -> Prediction:
        return replace(predictor()(configuration, trainer), phases=peaks)

    (entry,) = compare(read(tmp_path, line(source=source, job={**WAN, **changes})), predict, after_step)
    assert entry.predicted_gib == seen


def test_a_peak_with_validation_is_kept_apart_from_those_of_training(tmp_path: Path) -> None:
    def predict(configuration: Configuration, trainer: str) -> Prediction:
        peaks = {"first_step": 20.0, "train": 30.0, "decode": 36.0}
        phases = {
            name: PhasePeak(**dict.fromkeys(PhasePeak.model_fields, round(peak * GIB))) for name, peak in peaks.items()
        }
        return replace(predictor()(configuration, trainer), phases=phases)

    rows = [
        line(id=counter, measured={"outcome": "measured", "counter": counter, "low_gib": 32.0, "high_gib": 32.0})
        for counter in ("reserved", "reserved_with_validation")
    ]
    compared = compare(read(tmp_path, *rows), predict, after_step)
    assert [entry.predicted_gib for entry in compared] == [30.0, 36.0]
    found = summary(compared)
    assert found["reserved"]["max_abs_pct"] == pytest.approx(100 * 2 / 32)
    assert found["reserved_with_validation"]["max_abs_pct"] == pytest.approx(100 * 4 / 32)
    assert found["verdict"]["n"] == found["coverage"]["n"] == found["coverage_with_validation"]["n"] == 1


def test_a_run_of_one_step_is_priced_as_one(tmp_path: Path) -> None:
    source = {"repo": "a-r-r-o-w/cogvideox-factory", "where": "metrics.sh", "version": "2024-10 (3a519f5)"}
    short, long = read(
        tmp_path, line(id="short", source=source, job={**WAN, "batch_size": 4}), line(id="long", source=source)
    )
    assert (short.trainer, long.trainer) == ("diffusers@2024-10-one-step", "diffusers@2024-10")


# ---- reading


def test_blank_lines_and_a_torn_last_line(tmp_path: Path) -> None:
    rows, notes = read_rows(write(tmp_path, line(), tail="\n  \r\n" + json.dumps(own()) + '\n\n{"id": "b", "jo'))
    assert [row.id for row in rows] == ["a-1", "own-1"]
    assert notes == ["rows.jsonl:6 is incomplete and skipped"]


def test_a_last_line_without_newline_counts_when_it_is_whole(tmp_path: Path) -> None:
    rows, notes = read_rows(write(tmp_path, tail=json.dumps(line())))
    assert (len(rows), notes) == (1, [])


def test_no_rows_is_an_answer(tmp_path: Path) -> None:
    found = answer(judged(tmp_path))
    assert found["rows"] == []
    assert found["summary"]["device"] == {"n": 0, "mean_abs_pct": None, "median_abs_pct": None, "max_abs_pct": None}


@pytest.mark.parametrize(
    "text",
    ['{"id": ', "[1, 2]", "null", "\x00\x00", '{"id": 1e999999, "x": ' + "9" * 5000 + "}", "[" * 100_000, "\\xff"],
)
def test_a_damaged_line_is_named(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, line(), tail=f"{text}\n")
    with pytest.raises(VplanError, match=r"^rows\.jsonl:2 is damaged") as caught:
        read_rows(path)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"id": ""}, "id"),
        ({"id": None}, "id"),
        ({"job": [1]}, "job"),
        ({"job": {**WAN, "framse": 1}}, "framse"),
        ({"job": {**WAN, "frames": "81"}}, "frames"),
        ({"job": {key: value for key, value in WAN.items() if key != "width"}}, "width is missing"),
        ({"strategy": {"swap_blocks": -1}}, "swap_blocks"),
        ({"strategy": {"optimiser": "adamw"}}, "did you mean optimizer"),
        ({"machine": {}}, "gpu is missing"),
        ({"machine": {"gpu": "24GB", "gpus": 0}}, "gpus"),
        ({"measured": {"outcome": "exploded"}}, "outcome"),
        ({"measured": {"counter": "nvml"}}, "counter"),
        ({"measured": {"low_gib": 23.0}}, "not an interval"),
        ({"measured": {"low_gib": None}}, "not an interval"),
        ({"measured": {"low_gib": 0}}, "low_gib"),
        ({"measured": {"high_gib": float("inf")}}, "high_gib"),
        ({"measured": {"high_gib": float("nan")}}, "high_gib"),
        ({"implementation": ""}, "implementation"),
    ],
)
def test_a_wrong_field_is_named_with_its_line(tmp_path: Path, change: dict[str, Any], fault: str) -> None:
    path = write(tmp_path, own(), {**line(**change)})
    with pytest.raises(VplanError) as caught:
        read_rows(path)
    assert str(caught.value).startswith("rows.jsonl:2: ")
    assert fault in str(caught.value)


def test_own_row_of_an_unknown_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VplanError, match=r"rows\.jsonl:1: optimizer 'sophia' is not known"):
        read(tmp_path, {**own(), "strategy": {"optimizer": "sophia"}})


@pytest.mark.parametrize("name", ["missing.jsonl", "", "a\x00b"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(VplanError, match="cannot read"):
        read_rows(f"{tmp_path}/{name}")


def test_shipped_rows_are_all_read() -> None:
    rows = [row for path in profiles.MEASUREMENTS.glob("*.jsonl") for row in read_rows(path)[0]]
    assert len(rows) >= 38
    entries = compare(rows, predictor(), after_step)
    reasons = {entry.unsupported for entry in entries if entry.unsupported}
    assert all("is not known" in reason for reason in reasons)


# ---- summing up


def many(folder: Path) -> list[Comparison]:
    """Errors -10, 0 and +20 % reserved, +100 % after the step, one oom missed, one unknown model."""
    return judged(
        folder,
        line(id="low"),
        line(id="hit", measured={"low_gib": 18.0, "high_gib": 18.0}),
        line(id="high", measured={"low_gib": 15.0, "high_gib": 15.0}, implementation="musubi-tuner"),
        line(id="after", measured={"counter": "allocated_after_step", "low_gib": 2.0, "high_gib": 2.5}),
        line(id="oom", measured={"outcome": "oom", "low_gib": None, "high_gib": None}),
        line(id="who", job={**WAN, "model": "nobodys-model"}),
    )


def test_each_grid_has_its_own_numbers(tmp_path: Path) -> None:
    """Two runs of one grid, 2 and 4 GiB under 10 allocated; one of another that ran out where it was said to fit."""
    rows = [{**own(), "id": "a", "grid": "one"}, {**own(), "id": "b", "grid": "one"}, own()]
    rows.append({**own("oom"), "id": "c", "grid": "two"})
    compared = judged(tmp_path, *rows[:1], allocated=8.0) + judged(tmp_path, *rows[1:], allocated=6.0)
    found = by_grid(compared)
    assert list(found) == ["one", "two"]
    assert found["one"]["allocated"] == {"n": 2, "mean_abs_pct": 30.0, "median_abs_pct": 30.0, "max_abs_pct": 40.0}
    assert found["one"]["verdict"]["n"] == 2
    assert found["two"]["verdict"] == {"n": 1, "under": 1, "false_refusal": 0} and found["two"]["coverage"]["n"] == 0


def test_summary(tmp_path: Path) -> None:
    found = summary(many(tmp_path))
    assert found["reserved"]["n"] == 3
    assert found["reserved"]["mean_abs_pct"] == pytest.approx(10)
    assert found["reserved"]["median_abs_pct"] == pytest.approx(10)
    assert found["reserved"]["max_abs_pct"] == pytest.approx(20)
    assert found["allocated_after_step"]["median_abs_pct"] == pytest.approx(100)
    ours = found["by_implementation"]["diffusers"]
    assert (ours["n"], ours["median_abs_pct"]) == (2, pytest.approx(5))  # peaks only
    assert ours["reserved"]["n"] == 2
    assert ours["allocated_after_step"]["n"] == 1
    assert found["by_implementation"]["musubi-tuner"]["max_abs_pct"] == pytest.approx(20)
    assert found["verdict"] == {"n": 5, "under": 1, "false_refusal": 0}
    assert found["unsupported"] == 1


@pytest.mark.parametrize(
    ("counter", "low", "high", "inside"),
    [
        ("reserved", 10.0, 17.54, False),  # predicted 18 GiB, low..high 17.55..18.9
        ("reserved", 10.0, 17.56, True),
        ("reserved", 18.89, 25.0, True),
        ("reserved", 18.91, 25.0, False),
        ("allocated", 17.84, 17.84, True),  # 17 GiB: 16.575..17.85
        ("allocated", 17.86, 17.86, False),
        ("unknown", 10.0, 16.57, False),  # 17 to 19 GiB: 16.575..19.95
        ("unknown", 10.0, 16.58, True),
        ("unknown", 19.94, 25.0, True),
        ("unknown", 19.96, 25.0, False),
    ],
)
def test_inside_low_and_high(tmp_path: Path, counter: str, low: float, high: float, inside: bool) -> None:
    (entry,) = judged(tmp_path, line(measured={"counter": counter, "low_gib": low, "high_gib": high}))
    assert entry.inside is inside


def test_coverage_counts_measured_peaks_alone(tmp_path: Path) -> None:
    found = summary(many(tmp_path))["coverage"]  # 20..22, 18 and 15 GiB against 17.55..18.9
    assert found == {"n": 3, "inside_pct": pytest.approx(100 / 3), "median_width_pct": pytest.approx(7.5)}
    wider = judged(tmp_path, line(id="1"), line(id="2"), allowed=(0.9, 1.2))
    found = summary([*many(tmp_path), *wider, *wider])["coverage"]
    assert found == {"n": 7, "inside_pct": pytest.approx(500 / 7), "median_width_pct": pytest.approx(30)}
    assert summary(judged(tmp_path, own("oom")))["coverage"] == {"n": 0, "inside_pct": None, "median_width_pct": None}


def test_coverage_can_be_checked_from_the_rows_alone(tmp_path: Path) -> None:
    entries = [entry for entry in many(tmp_path) if entry.inside is not None]
    for entry in entries:
        row = entry.to_json()
        meets = row["predicted_low_gib"] <= row["high_gib"] and row["low_gib"] <= row["predicted_high_gib"]
        assert meets == entry.inside
    assert {entry.inside for entry in entries} == {True, False}


def test_json_has_exactly_the_promised_names(tmp_path: Path) -> None:
    found = json.loads(json.dumps(answer(many(tmp_path)), allow_nan=False))
    assert set(found) == {"rows", "summary"}
    assert all(
        list(row)
        == [
            *("id", "counter", "predicted_gib", "predicted_low_gib", "predicted_high_gib", "low_gib", "high_gib"),
            *("error_pct", "outcome", "verdict", "implementation", "basis", "unsupported"),
        ]
        for row in found["rows"]
    )
    counters = {"allocated", "reserved", "device", "unknown", "allocated_after_step", "reserved_with_validation"}
    assert set(found["summary"]) == counters | {
        *("by_implementation", "verdict", "coverage", "coverage_with_validation", "measured_peaks", "unsupported")
    }
    assert list(found["summary"]["coverage"]) == ["n", "inside_pct", "median_width_pct"]


def test_a_cards_size_is_no_peak_and_figures_are_given_without_it(tmp_path: Path) -> None:
    printed = {"repo": "zai-org/CogVideo (THUDM/CogVideo)", "where": "finetune/README.md + finetune/configs/*.yaml"}
    sizes = {"card": (15.5, 16.5), "other": (16.6, 17.6)}
    rows = [
        line(id=name, source=printed, measured={"counter": "reserved", "low_gib": low, "high_gib": high})
        for name, (low, high) in sizes.items()
    ]
    found = summary(judged(tmp_path, *rows, line(id="elsewhere", measured={"counter": "reserved", "low_gib": 16.0})))
    assert found["reserved"]["n"] == 3
    assert list(found["measured_peaks"]["left_out"]) == ["card"]
    assert "16 GB, NVIDIA 4080" in found["measured_peaks"]["left_out"]["card"]
    assert found["measured_peaks"]["by_implementation"]["diffusers"]["reserved"]["n"] == 2


def test_worst_first(tmp_path: Path) -> None:
    assert [entry.row.id for entry in worst_first(many(tmp_path))] == ["oom", "after", "high", "low", "hit"]


def test_only_by_id_or_model(tmp_path: Path) -> None:
    rows = read(tmp_path, line(id="x-1"), line(id="y-2", job={**WAN, "model": "ltx-video-2b"}))
    assert [row.id for row in only(rows, "X-1")] == ["x-1"]
    assert [row.id for row in only(rows, "LTX")] == ["y-2"]
    with pytest.raises(VplanError, match=r"no row has 'ltx-vidoe-2b'.*did you mean ltx-video-2b"):
        only(rows, "ltx-vidoe-2b")


# ---- the command


def test_command_reads_files_and_prints_one_object(tmp_path: Path) -> None:
    """Measured: from a ninth more than is estimated."""
    (row,) = read(tmp_path, line())
    configuration = Configuration.of(row.job, row.strategy, row.machine)
    phases = estimate_on_card(configuration, load_facts(configuration), row.trainer).phases
    expected = gib(max(phases[name].reserved_bytes for name in ("first_step", "train", "optimizer")))
    path = write(tmp_path, line(measured={"low_gib": expected / 0.9, "high_gib": expected / 0.8}), tail='{"id"')
    done = CliRunner().invoke(cli, ["accuracy", str(path), str(path), "--json"])
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert [row["error_pct"] for row in found["rows"]] == pytest.approx([-10.0, -10.0])
    assert "rows.jsonl:2 is incomplete" in done.stderr


def test_command_without_files_reads_what_is_shipped() -> None:
    """Of all files: these ids are in two of them."""
    done = CliRunner().invoke(cli, ["accuracy", "--json", "--only", "cvxf-00", "--allocator", "expandable"])
    ids = {row["id"] for row in json.loads(done.stdout)["rows"]}
    assert ids == {"cvxf-001", "cvxf-007", "cvxf-001-validation", "cvxf-007-validation"}


def test_command_refuses_in_one_object(tmp_path: Path) -> None:
    path = write(tmp_path, tail="{}\n")
    done = CliRunner().invoke(cli, ["accuracy", str(path), "--json"], standalone_mode=False)
    assert done.return_value == 1
    assert json.loads(done.stdout)["error"]["message"] == "rows.jsonl:1: id is missing"


def test_terminal_fits_80_columns(tmp_path: Path) -> None:
    hostile = line(id="[/bold]" + "x" * 60, measured={"counter": "allocated_after_step", "low_gib": 100.123456})
    hostile["measured"]["high_gib"] = 110.0
    entries = [*many(tmp_path), *judged(tmp_path, hostile, line(measured={"counter": "unknown"}))]
    screen = io.StringIO()
    console = terminal.console(width=80)
    console.file = screen
    render_accuracy.print_rows(console, entries)
    render_accuracy.print_summary(console, entries, summary(entries))
    text = screen.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    for part in (
        "diffusers",
        "-10.0 %",
        "ran out",
        "missed",
        "17.00..19.00",
        "after step",
        "wan models",
        "nobodys-model",
    ):
        assert part in text
    assert "unsupported rows: 1\nwho: model 'nobodys-model' is not known\n" in text
    assert "verdicts of 7 runs: 1 said to fit but ran out, 0 said not to fit but ran\n" in text
    assert "low..high of 4 peaks: 25.0 % contain the measured value, median width 7.5 %\n" in text
