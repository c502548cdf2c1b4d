"""What `vplan tune` and `vplan train` show while they run, on a terminal of 80 columns: the answer first, then its
bar, then the plan, and nothing cut."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from planner.commands import cli
from planner.commands._shared.training.run_progress import Follower
from planner.units import GIB

WIDTH = 80


@pytest.fixture(autouse=True)
def terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VPLAN_HOME", str(tmp_path / "home"))
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)


def frames(written: str) -> list[list[str]]:
    """The screens that were drawn one over the other, each as its lines without colours."""
    drawn = re.split(r"(?:\r?\x1b\[\d*[AK])+", written)
    plain = (re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", frame) for frame in drawn)
    return [frame.strip("\r\n").splitlines() for frame in plain if frame.strip()]


def test_a_run_says_how_far_it_is_and_how_long_it_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    counters = {"allocated_bytes": 1, "reserved_bytes": 1, "device_bytes": int(139.2 * GIB)}
    line = {"step": 15_000, "loss": 1.1268, "seconds": 12.1, "retries": 0, **counters}
    with Follower(path, steps=100_000, every=50, high_bytes=None) as follower:
        path.write_text(json.dumps(line) + "\n")
        follower.tick()
    loading, running, *_ = frames(capsys.readouterr().err)
    assert loading[0] == "step 0 of 100000: loading"
    first, bar = running
    assert first == "step 15000 of 100000: loss 1.1268, 12.10 s/step, 285 h 41 min left"
    assert re.fullmatch(r"█{7}░{41} 15% done, peak 139.2 GiB", bar)
    assert max(map(len, running)) < WIDTH  # what fills a line is not wiped away by Ctrl-C


def test_a_search_begins_with_its_best_plan(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna")
    question = ["cogvideox-2b", "--gpu", "9GiB", "--host-ram", "32GiB", "--batch-size", "2"]
    shape = ["--frames", "9", "--height", "240", "--width", "352"]
    assert cli.main(["tune", *question, *shape, "--runner", "simulate", "--seed", "4"], standalone_mode=False) == 0
    said = capsys.readouterr()
    assert cli.main(["tune", *question, *shape, "--runner", "simulate", "--seed", "4"], standalone_mode=False) == 0
    again = capsys.readouterr()
    assert re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", again.err).startswith("study cogvideox-2b-lora-")  # and no empty line
    first, *_, last = (frame for frame in frames(said.err) if len(frame) > 2)
    assert first[0] == "no plan proved yet"
    assert re.fullmatch(r"best so far: 0\.\d\d s per step", last[0])
    assert re.fullmatch(r"█+░* 8\.\d\d of 9\.00 GiB used", last[1])
    assert last[2].startswith("plan: ")
    assert not any("measuring" in line or line.startswith("now:") for line in last)
    assert any(line.startswith("study cogvideox-2b-lora-") for line in last)
    assert all(len(line) <= WIDTH for line in last)
    answer = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in said.out.splitlines()]
    used = re.search(r"used (\S+) GiB", said.out)
    assert used is not None
    bar = next(line for line in answer if "█" in line)
    assert f" {used[1]} of 9.00 GiB" in bar  # what was measured, not what was expected of it
    assert any(line.startswith("simulated, so not proved on any card") for line in answer)
