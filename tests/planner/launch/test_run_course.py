"""What a run's page says of a run: its numbers against ones worked out by hand or line by line."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import VplanError
from planner.evidence.jsonl import append_lines
from planner.launch.run_course import BINS, RunCourse, course, curve, smoothed
from planner.launch.run_history import GrowingFile, RunHistory, is_run
from planner.units import GIB
from tests.planner.launch.run_folders import FORECAST, RunFolder, killed_and_resumed

LOSSES = st.lists(st.floats(-1e3, 1e3, allow_nan=False), min_size=1, max_size=3 * BINS)


def read(folder: Path) -> tuple[RunHistory, RunCourse]:
    history = RunHistory(folder)
    history.update()
    return history, course(history)


@given(LOSSES)
def test_a_curve_is_as_long_as_the_page_can_show_and_leaves_no_value_out(losses: list[float]) -> None:
    values = numpy.array(losses)
    steps = numpy.arange(1.0, len(losses) + 1)
    points = curve(steps, values)
    assert 1 <= len(points.steps) <= BINS and points.steps[-1] == len(losses)
    assert (min(points.low), max(points.high)) == (values.min(), values.max())
    begins = [0, *map(int, points.steps[:-1])]
    for begin, end, low, high, mean in zip(begins, points.steps, points.low, points.high, points.mean, strict=True):
        part = values[begin : int(end)]
        assert (low, high) == (part.min(), part.max()) and mean == pytest.approx(part.mean(), abs=1e-9)


@given(LOSSES, st.integers(1, 60))
def test_a_smoothed_value_is_the_mean_of_the_last_ones(losses: list[float], over: int) -> None:
    values, steps = numpy.array(losses), numpy.arange(1.0, len(losses) + 1)
    points = curve(steps, values)
    for step, value in zip(points.steps, smoothed(steps, values, points, over), strict=True):
        assert value == pytest.approx(values[max(0, int(step) - over) : int(step)].mean(), abs=1e-6)


def test_a_killed_and_resumed_run_shows_both_parts(tmp_path: Path) -> None:
    history, run = read(killed_and_resumed(tmp_path))
    assert [(part.first_step, part.last_step) for part in run.parts] == [(0, 40), (33, 100)]
    first, second = run.parts
    assert first.seconds == pytest.approx(45 + 33 * 2 + 3 + 7 * 2)  # three days of standing still are none of them
    assert second.began == pytest.approx(first.seconds) and second.seconds == pytest.approx(45 + 67 * 3 + 6)
    assert second.unix_seconds - first.unix_seconds == pytest.approx(first.seconds + 3 * 86_400)
    assert history.repeated == 7 and history.done == 100 and run.recent_seconds == 3.0
    assert run.seconds_left == 900 * 3.0
    phases = {entry.phase: entry for entry in run.phases}
    assert list(phases) == ["encode", "load", "train", "decode", "save"]
    assert phases["train"].times == 107 and phases["train"].peaks["device_bytes"] == 22 * GIB  # of a step done again
    assert phases["train"].seconds == pytest.approx(33 * 2 + 7 * 2 + 67 * 3)


def test_memory_is_compared_with_the_range_of_its_phase(tmp_path: Path) -> None:
    _, run = read(killed_and_resumed(tmp_path))
    phases = {entry.phase: entry for entry in run.phases}
    assert phases["train"].device_range == (
        pytest.approx(21.2 * GIB * 0.95, abs=2),  # the optimizer's, which is in a step's line too
        pytest.approx(21.2 * GIB * 1.05, abs=2),
    )
    assert phases["train"].is_inside and not phases["decode"].is_inside
    assert phases["decode"].error_share == pytest.approx(18 / 19.5 - 1)
    assert phases["save"].host_bytes == 11 * GIB
    assert {entry.predicted for entry in run.memory if entry.phase == "load"} == {phases["load"].device_range}


def test_a_long_run_has_a_bounded_page_and_every_peak(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.start(0)
    run.steps(1, 7000)
    run.metrics.append(run.step(7001, device=23.25))
    run.phase("save", 7001, 0.01, 10, 20.5, 23.4)
    run.steps(7002, 9000)
    _, made = read(run.write())
    assert len(made.memory) == BINS and len(made.loss.steps) <= BINS
    (top,) = (entry for entry in made.memory if entry.high["device_bytes"] == round(23.4 * GIB))
    assert top.phase == "train"  # which took nearly all of its time
    assert top.low["device_bytes"] == 21 * GIB
    ends = [entry.ended for entry in made.memory]
    assert ends == sorted(ends) and ends[-1] == pytest.approx(made.parts[0].seconds)


def test_a_long_phase_fills_all_its_stretches(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.start(0)
    run.steps(1, 2000)
    run.phase("decode", 2000, 4000.0, 17, 19, 19.5)
    _, made = read(run.write())
    half = [entry for entry in made.memory if entry.began > 4100]
    assert len(half) > 200 and {entry.high["device_bytes"] for entry in half} == {round(19.5 * GIB)}


def test_a_plan_that_was_stepped_down_is_compared_with_itself(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.start(0)
    run.steps(1, 3)
    run.phase("train", 4, 1.0, 23, 23.2, 23.4, failed=True)
    smaller = {name: {key: value // 2 for key, value in entry.items()} for name, entry in FORECAST["phases"].items()}
    run.forecast = {**FORECAST, "phases": smaller}
    run.phase("load", 3, 40.0, 5, 5.2, 5.5, device="cuda", missing=[], forecast=run.forecast)
    run.steps(4, 9, device=10.5)
    history, made = read(run.write())
    assert [part.failed_phase for part in made.parts] == ["train", ""] and len(history.starts) == 2
    (train,) = (entry for entry in made.phases if entry.phase == "train")
    assert train.times == 6 and train.is_inside
    of_each = {entry.predicted for entry in made.memory if entry.phase == "train"}
    assert len(of_each) == 2 and [entry.failed for entry in made.memory].count(True) == 1


def test_on_the_cpu_nothing_is_compared(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, device="cpu")
    run.start(0)
    run.steps(1, 5)
    _, made = read(run.write())
    assert all(entry.predicted is None and entry.high["device_bytes"] is None for entry in made.memory)
    assert {entry.is_inside for entry in made.phases} == {None}
    assert {entry.peaks["host_bytes"] for entry in made.phases} == {8 * GIB}


def test_a_run_that_has_just_begun_has_nothing_to_show(tmp_path: Path) -> None:
    assert not is_run(tmp_path)
    _, made = read(RunFolder(tmp_path).write())
    assert made.memory == made.phases == made.parts == () and made.recent_seconds is None
    assert is_run(tmp_path)


def test_what_is_read_is_what_was_added(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    growing = GrowingFile(path)
    assert growing.new_lines() == []
    path.write_text('{"a": 1}\n{"b"')
    assert growing.new_lines() == [{"a": 1}] and growing.is_new
    path.open("a").write(": 2}\n")
    assert growing.new_lines() == [{"b": 2}] and not growing.is_new
    other = tmp_path / "other"
    other.write_text('{"c": 3}\n')
    other.replace(path)
    assert growing.new_lines() == [{"c": 3}] and growing.is_new


def test_what_was_there_is_passed_over_also_where_a_kill_cut_its_last_line(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"b": "as long as the next two lines are"')
    growing = GrowingFile(path, skip=True)
    append_lines(path, [{"c": 3}, {"d": 4}])
    assert growing.new_lines() == [{"c": 3}, {"d": 4}] and not growing.is_new


def test_a_copy_of_a_run_that_is_replaced_whole_is_read_once(tmp_path: Path) -> None:
    history, _ = read(killed_and_resumed(tmp_path))
    before = len(history.others), len(history.starts), history.repeated
    copy = tmp_path / "copy"
    copy.write_bytes((tmp_path / "memory.jsonl").read_bytes())
    copy.replace(tmp_path / "memory.jsonl")
    assert history.update() and (len(history.others), len(history.starts), history.repeated) == before


GOOD = {"step": 1, "loss": 1.0, "learning_rate": 0.1, "unix_seconds": 1.0, "seconds": 1.0}


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ({**GOOD, "step": "x"}, "step = .*no number"), ({**GOOD, "loss": math.nan}, "loss = .*no number"),
        ({**GOOD, "seconds": -math.inf}, "seconds = .*no number"), ({**GOOD, "step": 10**400}, "step = .*no number"),
        ({**GOOD, "unix_seconds": 1e300}, "unix_seconds = .*no number"),
        ({**GOOD, "learning_rate": True}, "learning_rate = .*no number"),
        ({"step": 1, "loss": 1.0, "learning_rate": 0.1, "seconds": 1.0}, "has no unix_seconds; .*earlier versions"),
        ({"samples": []}, "has no step"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_one_clear_fault(tmp_path: Path, line: Any, fault: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(VplanError, match=fault):
        RunHistory(tmp_path).update()


@pytest.mark.parametrize("damage", [b"[1]", b"{", b"7", b"null", b"\0" * 4096, b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_line_is_passed_over(tmp_path: Path, damage: bytes) -> None:
    whole = [json.dumps({**GOOD, "step": step}).encode() for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([whole[0], damage, *whole[1:], b""]))
    history = RunHistory(tmp_path)
    assert history.update() and list(history.steps.step) == [1, 2, 3]


def test_only_names_of_samples_are_samples(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.samples(5, "one")
    strange: dict[str, Any] = {"samples": ["../../etc/passwd", "step-00000001-0.png.sh"], "prompts": ["a", "b"]}
    run.metrics.append({"step": 6, **strange, "note": None})
    history, _ = read(run.write())
    assert [path.name for path in history.sample_files()] == ["step-00000005-0.png"]
    (tmp_path / "run" / "request.json").write_text(json.dumps([]))
    with pytest.raises(VplanError, match="no JSON object"):
        course(history)


@pytest.mark.parametrize(
    ("encoding", "training", "state", "message"),
    [
        ({"outcome": "ok"}, {"outcome": "ok"}, "finished", ""),
        (
            {"outcome": "ok"},
            {"outcome": "stopped", "message": "stopped after step 3"},
            "stopped",
            "stopped after step 3",
        ),
        ({"outcome": "ok"}, {"outcome": "nan", "message": "not a number"}, "failed", "not a number"),
        ({"outcome": "ok"}, {"phase": "train", "pid": 2**22 + 1}, "stopped", ""),
        ({"outcome": "ok"}, {"phase": "train", "pid": -5}, "stopped", ""),
        ({"outcome": "refused", "message": "no clips"}, None, "failed", "no clips"),
        ({"outcome": "ok"}, None, "stopped", ""),
    ],
)
def test_the_state_is_what_the_last_process_reported(
    tmp_path: Path, encoding: dict[str, Any], training: dict[str, Any] | None, state: str, message: str
) -> None:
    for folder, facts in (("prepare", encoding), ("run", training)):
        if facts is not None:
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "result-00000.json").write_text(json.dumps(facts))
    found = RunHistory(tmp_path).state()
    assert (found.name, found.message) == (state, message)


def test_a_start_that_ended_while_encoding_is_not_the_earlier_runs_end(tmp_path: Path) -> None:
    for folder, facts, time in (
        ("prepare", {"outcome": "refused", "message": "x"}, 200),
        ("run", {"outcome": "ok"}, 100),
    ):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "result-00000.json"
        path.write_text(json.dumps(facts))
        os.utime(path, (time, time))
    assert RunHistory(tmp_path).state().name == "failed"
