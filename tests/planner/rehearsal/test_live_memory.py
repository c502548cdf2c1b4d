"""Whose memory it is: bytes by stack, read and added up by line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("elftools")

from planner.rehearsal.live_memory import MOST_SITES, read_histories, sites_of
from planner.rehearsal.observations import Frame

TRAIN = {"file": "/home/me/train.py", "line": 12, "function": "train", "source": "loss = model(x)"}
ATTENTION = {"file": "/v/site-packages/diffusers/attention.py", "line": 5, "function": "call", "source": "q = k"}
MLP = {"file": "/v/site-packages/diffusers/mlp.py", "line": 9, "function": "call", "source": "x = self.up(x)"}


def history(**changes: Any) -> dict[str, Any]:
    """A file as trainers/observer writes it."""
    facts = {
        "device": 1,
        "at_error": True,
        "frames": [TRAIN, ATTENTION, MLP],
        "stacks": [
            {"frames": [0, 1], "bytes": 100, "blocks": 2},
            {"frames": [0, 2], "bytes": 300, "blocks": 1},
            {"frames": [0], "bytes": 50, "blocks": 1},
            {"frames": [2], "bytes": 70, "blocks": 1},
            {"frames": [], "bytes": 7, "blocks": 3},
        ],
        "course": None,
    }
    return {**facts, **changes}


def test_libraries_are_folded_into_the_line_that_calls_them(tmp_path: Path) -> None:
    (tmp_path / "history-42.json").write_text(json.dumps(history()))
    live = read_histories(tmp_path)[42].live
    assert [(site.frame.line, site.allocated_bytes, site.blocks) for site in live.sites] == [(12, 450, 4), (9, 70, 1)]
    assert (live.sites[0].inner.line, live.sites[0].inner_bytes) == (9, 300)
    assert (live.backward_bytes, live.allocated_bytes) == (7, 527)
    told = live.to_json()
    assert (told["at"], told["device"], told["other_lines"]) == ("error", 1, 0)
    assert told["lines"][0]["inner"] == {**MLP, "bytes": 300}
    assert told["lines"][1]["inner"] is None


def test_many_lines_are_added_up() -> None:
    stacks = [((Frame("/home/me/a.py", line, "f", ""),), line, 1) for line in range(1, MOST_SITES + 3)]
    sites = sites_of(stacks)
    assert [site.allocated_bytes for site in sites] == list(range(MOST_SITES + 2, 0, -1))


def test_the_course_of_a_run(tmp_path: Path) -> None:
    points = [[0, 10, 20], [5, 90, 100], [9, 30, 100]]
    course = {"events": 10, "cut": False, "peak": 5, "points": points, "phases": [[0, "load"], [4, "train"]]}
    (tmp_path / "history-7.json").write_text(json.dumps(history(at_error=False, course=course)))
    read = read_histories(tmp_path)[7]
    assert read.live.to_json()["at"] == "peak"
    assert read.course is not None
    assert read.course.peak.event == 5
    assert read.course.phases == ((0, "load"), (4, "train"))
