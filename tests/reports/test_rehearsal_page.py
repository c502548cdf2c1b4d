"""The page of a rehearsal: what it shows of an answer, and that nothing of the program becomes HTML."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("elftools")

from planner.rehearsal.answer import RehearsalAnswer
from planner.rehearsal.live_memory import MemoryCourse, read_histories
from reports import charts, page, write_rehearsal
from reports.data import Fact
from reports.rehearsal_data import RehearsalPage
from tests.planner.rehearsal.test_answer import GIB, OOM, OWN, answer

HOSTILE = "<script>alert(1)</script>"
COURSE = {
    "events": 101,
    "cut": False,
    "peak": 100,
    "points": [[0, GIB, 2 * GIB], [50, 8 * GIB, 9 * GIB], [100, 22 * GIB, 22 * GIB]],
    "phases": [[0, "load"], [0, "first_step"], [60, "optimizer"]],
}


def ended(folder: Path, **changes: Any) -> RehearsalAnswer:
    """A run that ended in the optimizer, with what torch's history says of it."""
    site = {**OWN, "source": HOSTILE}
    stacks = [{"frames": [0], "bytes": 20 * GIB, "blocks": 3}, {"frames": [], "bytes": 2 * GIB, "blocks": 1}]
    history = {"device": 0, "at_error": True, "frames": [site], "stacks": stacks, "course": COURSE, **changes}
    (folder / "history-7.json").write_text(json.dumps(history))
    oom = {**OOM, "frames": [site], "moment": HOSTILE}
    made = answer(folder, "failed", oom=oom, ooms=1, end="exit")
    return dataclasses.replace(made, outcome=dataclasses.replace(made.outcome, histories=read_histories(folder)))


def test_the_page_says_where_it_ended_and_who_holds_what(tmp_path: Path) -> None:
    write_rehearsal(tmp_path / "page.html", ended(tmp_path), None, command="vplan rehearse", created="now")
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "It does not fit" in html and "with no room for 1.0 GiB" in html
    assert "/home/me/train.py:12" in html and "20.00" in html
    assert html.index("/home/me/train.py:12</strong> <code>") < html.index("<strong>backward")  # the largest first
    assert re.findall(r'<rect class="phase-(\w+)" x', html) == ["first_step", "optimizer"]


def test_nothing_of_the_program_is_html(tmp_path: Path) -> None:
    html = page.render(RehearsalPage(ended(tmp_path), None, (Fact(HOSTILE, HOSTILE),), HOSTILE))
    assert HOSTILE not in html and "&lt;script&gt;alert(1)" in html
    assert html.count("<script") == 2  # the chart's numbers, and the page's own


def test_without_a_history_there_is_no_chart(tmp_path: Path) -> None:
    html = page.render(RehearsalPage(answer(tmp_path, "steps"), None))
    assert "It fits: 12.45 GiB" in html and "Memory through the run" not in html and "Which lines" not in html
    course = page.render(RehearsalPage(ended(tmp_path, course=None), None))
    assert "Memory through the run" not in course and "Which lines" in course


def test_places_on_the_chart(tmp_path: Path) -> None:
    course = ended(tmp_path).history
    assert course is not None and isinstance(course.course, MemoryCourse)
    run = course.course
    assert charts.course_phases(run) == [(0, 60, "first_step"), (60, 100, "optimizer")]
    reserved = [point.reserved_bytes for point in run.points]
    assert charts.course_spots(run, reserved, GIB, 100 * GIB) == [(0, 3), (50, 10), (100, 23)]
    assert charts.course_area(run, 0, 100 * GIB).startswith("M0 1000L0 990L500 920L1000 780L1000 1000Z")
