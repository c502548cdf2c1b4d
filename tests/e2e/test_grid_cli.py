"""A grid in real processes that step a tiny model: a kill in the middle, and what accuracy says about the rows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import vplan
from planner.evidence.ledger import Ledger

pytestmark = pytest.mark.usefixtures("preloaded_python")

TINY = """
schema = 1
[[jobs]]
model = "wan2.1-t2v-1.3b"
frames = 5
height = 32
width = 32
plans = [{ gradient_checkpointing = "full" }, { optimizer = "came", attention = "math" }, { cap = "under" }]
[jobs.config]
num_layers = 2
num_attention_heads = 2
attention_head_dim = 12
ffn_dim = 32
text_dim = 16
freq_dim = 16
"""

SIMULATED = """
schema = 1
[[jobs]]
model = "sd1.5"
frames = 1
height = 256
width = 256
plans = [{}, { gradient_checkpointing = "full" }, { optimizer_step = "fused" }, { expandable_segments = false }]
"""


def line(folder: Path, text: str, *words: str) -> tuple[list[str], dict[str, str], Path]:
    (folder / "grid.toml").write_text(text)
    rows = folder / "rows.jsonl"
    environment = {**os.environ, "TMPDIR": str(folder), "VPLAN_HOME": str(folder / "home")}
    return vplan.command("calibrate", "--grid", str(folder / "grid.toml"), "-o", str(rows), *words), environment, rows


def answer(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run([*command, "--json"], env=environment, capture_output=True, text=True, check=False)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_tiny_grid_in_real_processes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    command, environment, rows = line(tmp_path, TINY, "--device", "cpu")
    first = answer(command, environment)
    assert [row["measured"]["outcome"] for row in first["probes"]] == ["ok"], first
    assert [entry["why"].split(",")[0] for entry in first["refused"]] == [
        "attention math is not supported by vplan's training step yet", "a shrunk model's peak is not estimated"
    ]  # fmt: skip
    row = Ledger(rows).rows()[0]
    assert row.grid == "grid" and row.details["config"]["num_layers"] == 2 and row.measured.step_seconds
    assert Ledger(tmp_path / "home" / "ledger.jsonl").rows() == [row]
    again = answer(command, environment)
    assert (again["probes"], again["known"]) == ([], 1)
    told = answer(vplan.command("accuracy", str(rows)), environment)
    assert told["halves"] == {} and "says nothing about a GPU" in told["rows"][0]["unsupported"]


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_a_kill_loses_nothing(tmp_path: Path) -> None:
    command, environment, rows = line(tmp_path, SIMULATED, "--runner", "simulate")
    running = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and running.poll() is None and not (rows.exists() and rows.read_bytes()):
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    running.wait()
    before = rows.read_text()
    assert before.count("\n") >= 1
    kept = [text for text in before.splitlines(keepends=True) if text.endswith("\n")]
    found = answer(command, environment)
    assert found["known"] == len(kept) and found["left"] == []
    assert rows.read_text().startswith("".join(kept)) and len(Ledger(rows).rows()) == 4
