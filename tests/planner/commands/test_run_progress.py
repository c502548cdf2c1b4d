"""What `vplan train` shows while its data is looked through and encoded, by what the ranks report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.commands._shared.training.run_progress import Preparing
from planner.errors import VplanError
from planner.launch.stop import STOPPED


def report(output: Path, *ranks: dict[str, Any]) -> None:
    (output / "prepare").mkdir(exist_ok=True)
    for rank, facts in enumerate(ranks):
        (output / "prepare" / f"result-{rank:05d}.json").write_text(json.dumps(facts))


def test_scanning_and_then_each_encoder_is_announced_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    waits = {"rank": 1, "phase": "encode"}
    scanning = {"scanning": "files of clips", "done": 3, "all": 1000}
    with Preparing(tmp_path) as preparing:
        preparing.tick()
        report(tmp_path, {"rank": 0, "phase": "encode"}, waits)
        preparing.tick()
        report(tmp_path, scanning, waits)
        preparing.tick()
        report(tmp_path, {**scanning, "done": 900}, waits)
        preparing.tick()
        encoding = {**scanning, "doing": "clips (vae)", "done": 1, "all": 30}
        report(tmp_path, encoding, {**encoding, "doing": "captions (text_encoder)", "all": 7})
        preparing.tick()
        report(tmp_path, encoding, encoding)
        preparing.tick()
    assert capsys.readouterr().err.splitlines() == ["scanning files of clips: 1000", "encoding clips (vae): 30"]


def test_a_request_to_stop_ends_the_encoding(tmp_path: Path) -> None:
    report(tmp_path, {"scanning": "files of clips", "done": 3, "all": 1000})
    (tmp_path / "stop").touch()
    with Preparing(tmp_path) as preparing, pytest.raises(VplanError, match="stopped while the data") as caught:
        preparing.tick()
    assert caught.value.exit_code == STOPPED
