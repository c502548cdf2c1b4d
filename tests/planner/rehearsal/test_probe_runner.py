"""Probes on virtual cards: rows that nobody can take for measured ones, and one whole run with a CUDA wheel."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("elftools")

from planner.catalog import card_lookup
from planner.commands import cli
from planner.errors import VplanError
from planner.evidence.from_ledger import measurements_of
from planner.evidence.ledger import Ledger
from planner.evidence.measurement import ProbeRow, is_of_a_gpu
from planner.layout.correction import NO_MEASUREMENTS
from planner.probe.probe import rehearsed
from planner.probe.worker_python import WorkerPython
from planner.rehearsal.probe_runner import cuda_interpreter
from planner.spec.job import Job, Machine, Strategy
from planner.units import GIB
from tests.cuda_wheel import needs_cuda_wheel

ENV = {
    "gpu": "NVIDIA H100 80GB HBM3",
    "driver": "580.65.06",
    "torch": "2.13.0",
    "diffusers": "0.42.1",
    "attention_kernel": "cudnn",
    "command": "vplan probe plan.toml",
    "time": "2026-11-23T00:00:00+00:00",
}


def row(gib: float = 12.0) -> ProbeRow:
    peaks = {"allocated_bytes": int(gib * GIB), "reserved_bytes": int(gib * GIB), "retries": 0}
    measured = {"outcome": "ok", "phase": "train", "host_bytes": GIB, "step_seconds": 1.5, **peaks}
    said: dict[str, Any] = {
        "id": "sd1.5-lora-1",
        "job": Job(model="sd1.5", frames=1, height=512, width=512),
        "strategy": Strategy(),
        "machine": Machine(gpu="h100-80gb"),
        "measured": {**measured, "device_bytes": int((gib + 1) * GIB)},
        "env": ENV,
        "details": {"step_seconds": [1.5], "losses": [0.0], "missing": [], "phases": {"step": peaks}},
    }
    return ProbeRow.read(said)


def test_a_rehearsed_row_is_marked_and_has_no_seconds() -> None:
    found = rehearsed(row())
    assert (found.runner, found.env.gpu, found.env.driver) == ("rehearse", "virtual NVIDIA H100 80GB HBM3", "virtual")
    seen = found.measured
    assert (seen.step_seconds, seen.host_bytes, seen.device_bytes) == (None, None, 13 * GIB)
    assert seen.allocated_bytes == seen.reserved_bytes == 12 * GIB
    assert set(found.details) == {"missing", "phases"}


def test_a_probe_inside_a_rehearsed_command_is_marked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VPLAN_GPU_FOLDER", raising=False)
    assert not WorkerPython().is_virtual
    monkeypatch.setenv("VPLAN_GPU_FOLDER", "/tmp")
    assert WorkerPython().is_virtual


def test_nothing_is_learned_from_it() -> None:
    card = card_lookup.gpu("h100-80gb")
    assert is_of_a_gpu(row()) and not is_of_a_gpu(rehearsed(row()))
    assert measurements_of("sd1.5", card, probes=[rehearsed(row())]) is NO_MEASUREMENTS


def test_accuracy_reports_it_apart(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "rows.jsonl")
    ledger.append(rehearsed(row()))
    answer = json.loads(CliRunner().invoke(cli, ["accuracy", str(ledger.path), "--json"]).stdout)
    assert answer["rows"] == [] and answer["halves"] == {} and answer["summary"]["allocated"]["n"] == 0
    assert {entry["counter"] for entry in answer["rehearsed"]["rows"]} == {"allocated", "reserved", "device"}
    assert answer["rehearsed"]["summary"]["verdict"]["n"] == 1
    shown = CliRunner().invoke(cli, ["accuracy", str(ledger.path)]).stdout
    assert "rehearsed: our own trainer on virtual GPUs" in shown and "its accuracy is not reported" in shown


def test_a_python_without_the_cuda_wheel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VPLAN_CUDA_PYTHON", raising=False)
    if cuda_of_this_python() is not None:
        pytest.skip("this Python has the CUDA wheel")
    with pytest.raises(VplanError, match="needs PyTorch's CUDA wheel") as refusal:
        cuda_interpreter()
    assert refusal.value.fix and "--python PATH" in refusal.value.fix and "VPLAN_CUDA_PYTHON" in refusal.value.fix


def cuda_of_this_python() -> str | None:
    from planner.rehearsal.interpreter import interpreter_of

    return interpreter_of([sys.executable]).cuda


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["calibrate", "--grid", "one-gpu", "-o", "rows.jsonl", "--python", "python"], "--python is for rehearsals"),
        (["calibrate", "--runner", "rehearse"], "--runner needs --grid"),
    ],
)
def test_options_that_do_not_go_together(words: list[str], fault: str) -> None:
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 2 and fault in done.stderr


TINY_GRID = """
schema = 1
[[jobs]]
model = "wan2.1-t2v-1.3b"
frames = 5
height = 32
width = 32
lora_rank = 4
plans = [{ gradient_checkpointing = "full" }]
[jobs.config]
num_layers = 2
num_attention_heads = 2
attention_head_dim = 12
ffn_dim = 32
text_dim = 16
freq_dim = 16
"""


@needs_cuda_wheel
def test_a_grid_is_rehearsed_and_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY_GRID)
    rows = tmp_path / "rows.jsonl"
    line = ["calibrate", "--grid", str(tmp_path / "tiny.toml"), "-o", str(rows), "--runner", "rehearse"]
    line += ["--gpu", "4090", "--json"]
    answer = json.loads(CliRunner().invoke(cli, line).stdout)
    assert answer["outcomes"] == {"ok": 1}, answer
    (found,) = Ledger(rows).rows()
    assert (found.runner, found.grid, found.env.driver) == ("rehearse", "tiny", "virtual")
    assert found.measured.allocated_bytes and found.measured.reserved_bytes and found.measured.step_seconds is None
    assert found.measured.device_bytes == found.measured.reserved_bytes + card_lookup.gpu("rtx4090").context_bytes
    assert not (tmp_path / "home" / "ledger.jsonl").exists()
    assert json.loads(CliRunner().invoke(cli, line).stdout)["known"] == 1
