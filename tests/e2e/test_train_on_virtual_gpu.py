"""`vplan train` sharded over two virtual cards: killed, taken up again, and its peaks beside the estimate."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("elftools")
pytest.importorskip("torch")

from tests.cuda_wheel import needs_cuda_wheel
from tests.tools import train_on_virtual_gpu as tool

pytestmark = needs_cuda_wheel


def test_fsdp_with_all_on_the_host_goes_on_where_it_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and states lie in host RAM, so what a card holds is a block's weights and its activations: also while it
    takes up the states of a checkpoint, which once came by way of the card and stayed to the end of the first step."""
    monkeypatch.setenv("VPLAN_HOME", str(tmp_path / "home"))
    place = tool.make_place(tmp_path / "place")
    course = tool.train(place, tool.CASES["full-fsdp-all-on-host"], tmp_path / "run")
    assert course.resumed >= tool.KILLED_BEHIND and course.losses == tool.STEPS
    assert course.rehearsed["allocated_bytes"] == pytest.approx(course.predicted["allocated_bytes"], rel=0.01)
    assert course.rehearsed["reserved_bytes"] == pytest.approx(course.predicted["reserved_bytes"], rel=0.05)
