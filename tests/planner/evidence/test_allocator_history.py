"""A recorded history beside its tape. No GPU is needed: the plan as it is laid out stands in for the run, in the same
file as a probe writes, with one difference planted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from planner.commands import cli
from planner.errors import VplanError
from planner.evidence.allocator_history import (
    LEAST_BYTES,
    MOST,
    AllocatorEvent,
    compare,
    compare_phase,
    on_tape,
    probed_run,
    read_history,
)
from planner.layout.run import Run
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Plan
from planner.spec.rules import resolve

JOB = Job(model="sd1.5", frames=1, height=512, width=512)
MACHINE = Machine(gpu="rtx4090")
STRATEGY = resolve(JOB, Strategy(gradient_checkpointing="full"), MACHINE)
Row = list[Any]


@pytest.fixture(scope="module")
def run() -> Run:
    return probed_run(Plan(job=JOB, strategy=STRATEGY, machine=MACHINE))


@pytest.fixture(scope="module")
def tape(run: Run) -> dict[str, list[AllocatorEvent]]:
    return on_tape(run, LEAST_BYTES)


@pytest.fixture(scope="module")
def events(run: Run) -> list[tuple[str, list[Row]]]:
    """(phase, events) of the plan as a probe goes through it: `step` repeats what follows, and no tape has it."""
    found: dict[str, list[Row]] = {}
    for phase, stage in run.stages:
        found.setdefault(phase, []).extend(
            ["alloc" if op >= 0 else "free_completed", 512 * (op if op >= 0 else ~op), run.sizes[max(op, ~op)], 0, 0]
            for op in stage.ops
        )
    found["step"] = found["train"]
    return [(phase, found[phase]) for phase in ("load", "first_step", "step", "train", "optimizer")]


def written(
    folder: Path, events: list[tuple[str, list[Row]]], change: Callable[[list[Row]], None] | None = None
) -> Path:
    """The file a probe writes, with `train` changed."""
    rows: list[Row] = []
    marks = []
    for phase, own in events:
        marks.append([phase, len(rows)])
        copied = [list(row) for row in own]
        if phase == "train":
            copied.insert(3, ["segment_alloc", 1 << 40, 20 << 20, 0, -1])  # the allocator's own business
            copied.insert(5, ["alloc", 1 << 41, 512, 0, -1])  # a scalar
            if change:
                change(copied)
        rows += copied
    plan = {part: record.to_json() for part, record in (("job", JOB), ("strategy", STRATEGY), ("machine", MACHINE))}
    data = {
        "plan": plan, "torch": "2.11.0+cu130", "gpu": "card", "phases": marks, "events": rows,
        "columns": ["action", "addr", "size", "stream", "frame"], "frames": ["unet.py:12 forward"],
    }  # fmt: skip
    path = folder / "history.json"
    path.write_text(json.dumps(data))
    return path


def large(rows: list[Row], kind: str = "alloc", skip: int = 40) -> int:
    """Where the `skip`-th large event of a kind is."""
    return [at for at, row in enumerate(rows) if row[0] == kind and row[2] >= LEAST_BYTES][skip]


def test_the_same_events_have_no_difference(events: list[tuple[str, list[Row]]], tmp_path: Path) -> None:
    found = list(compare(read_history(written(tmp_path, events))))
    assert [each.phase for each in found] == ["load", "first_step", "train", "optimizer"]
    assert all(each.differences == () and each.events == each.tape_events > 0 for each in found[:3])
    assert all(each.peak_bytes == each.tape_peak_bytes for each in found)


def grow(rows: list[Row]) -> None:
    at = large(rows)
    for row in rows[at:]:
        if row[1] == rows[at][1]:
            row[2] += 8 * LEAST_BYTES


def leave_out(rows: list[Row]) -> None:
    del rows[large(rows)]


def add(rows: list[Row]) -> None:
    rows.insert(large(rows), ["alloc", 1 << 42, 77 * LEAST_BYTES, 0, 0])


def swap(rows: list[Row]) -> None:
    at = next(at for at in range(large(rows), len(rows)) if rows[at][0] != rows[at + 1][0] and min(
        rows[at][2], rows[at + 1][2]
    ) >= LEAST_BYTES)  # fmt: skip
    rows[at : at + 2] = rows[at + 1], rows[at]


@pytest.mark.parametrize(("plant", "what"), [(grow, "size"), (leave_out, "extra"), (add, "missing"), (swap, "order")])
def test_the_first_difference_is_named(
    tape: dict[str, list[AllocatorEvent]],
    events: list[tuple[str, list[Row]]],
    tmp_path: Path,
    plant: Callable[[list[Row]], None],
    what: str,
) -> None:
    run = read_history(written(tmp_path, events, plant)).of("train", LEAST_BYTES)
    found = compare_phase("train", tape["train"], run)
    first = found.differences[0]
    assert first.what == what and not found.parted
    assert " of down_blocks" in first.module or " outside the blocks" in first.module
    if what == "size":
        assert first.run[0].nbytes - first.tape[0].nbytes == 8 * LEAST_BYTES
    if what == "missing":
        assert first.run == (AllocatorEvent("alloc", 77 * LEAST_BYTES, "unet.py:12 forward"),) and first.tape == ()
        assert found.peak_bytes > found.tape_peak_bytes


def test_histories_that_have_nothing_in_common_part() -> None:
    tape = [AllocatorEvent("alloc", size << 20, "forward of blocks.0") for size in range(1, 200)]
    run = [AllocatorEvent("alloc", (size << 20) + 512, "") for size in range(1, 200)]
    found = compare_phase("train", tape, run)
    assert found.parted and len(found.differences) == 1
    assert compare_phase("load", [], []).differences == ()
    assert compare_phase("load", [], run[:1]).differences[0].what == "missing"


def test_frees_that_follow_each_other_count_in_any_order() -> None:
    sizes = [size << 20 for size in range(1, 30)]
    made = [AllocatorEvent("alloc", size, "") for size in sizes]
    gone = [AllocatorEvent("free", size, "") for size in sizes]
    assert compare_phase("train", [*made, *gone, made[0]], [*made, *reversed(gone), made[0]]).differences == ()
    first, *others = gone
    found = compare_phase("train", [*made, *gone, made[3]], [*made, first, made[3], *reversed(others)])
    assert {each.what for each in found.differences} == {"missing", "extra"}


def test_the_comparison_stops_where_it_is_told_to() -> None:
    tape = [AllocatorEvent("alloc", size << 20, "forward of blocks.0") for size in range(1, 400)]
    run = [event._replace(nbytes=event.nbytes + 512) if at % 10 == 0 else event for at, event in enumerate(tape)]
    assert len(compare_phase("train", tape, run).differences) == MOST
    whole = compare_phase("train", tape, run, most=len(tape))
    assert len(whole.differences) == 40 and not whole.parted and {each.what for each in whole.differences} == {"size"}


def test_the_command_says_where(events: list[tuple[str, list[Row]]], tmp_path: Path) -> None:
    path = written(tmp_path, events, grow)
    done = CliRunner().invoke(cli, ["accuracy", "--history", str(path)])
    assert done.exit_code == 0, done.output
    assert "the run used torch 2.11.0+cu130, the tape 2.13.0" in done.stdout
    assert "the first difference, in train at event" in done.stdout and "different size; " in done.stdout
    answer = json.loads(CliRunner().invoke(cli, ["accuracy", "--history", str(path), "--json"]).stdout)
    assert answer["first"]["what"] == "size" and answer["first"]["phase"] == "train"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "[" * 100_000, "{}",
     '{"plan": {}, "torch": "2", "gpu": "x", "phases": [], "events": [[]], "frames": []}',
     '{"plan": {"job": 1}, "torch": "2", "gpu": "x", "phases": [], "events": [], "frames": []}'],
)  # fmt: skip
def test_what_is_no_history_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "history.json"
    path.write_text(text)
    with pytest.raises(VplanError, match=r"history\.json"):
        read_history(path)
