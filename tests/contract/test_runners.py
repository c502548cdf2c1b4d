"""All runners that measure plans keep one contract: the simulated machine, and our own step in a separate process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planner.errors import VplanError
from planner.evidence.ledger import Ledger
from planner.evidence.measurement import ProbeRow
from planner.probe.probe import RealRunner
from planner.probe.runner import Runner
from planner.probe.simulated import SimulatedRunner
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Plan

pytest.importorskip("torch")

pytestmark = pytest.mark.usefixtures("preloaded_python")

TINY = {
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "ffn_dim": 32,
    "text_dim": 16,
    "freq_dim": 16,
}
RUNNERS: list[Runner] = [SimulatedRunner(crash=0.0), RealRunner(device="cpu", config=TINY)]
EVERY = pytest.mark.parametrize("runner", RUNNERS, ids=lambda runner: runner.name)


def plan(**strategy: Any) -> Plan:
    job = Job(model="wan2.1-t2v-1.3b", frames=5, height=32, width=32, lora_rank=4)
    return Plan(job=job, strategy=Strategy(**strategy), machine=Machine(gpu="24GB"))


@EVERY
def test_a_plan_that_runs(runner: Runner, tmp_path: Path) -> None:
    asked = plan(gradient_checkpointing="full")
    row = runner.run(asked, steps=1, time_limit=300)
    assert row.measured.outcome == "ok", row.details
    assert row.runner == runner.name and row.id.startswith("wan2.1-t2v-1.3b-lora-")
    assert row.job == asked.job and row.machine.replace(torch=None) == asked.machine
    assert row.strategy.gradient_checkpointing == "full" and row.strategy.weights_dtype == "bf16"  # filled in
    assert row.measured.step_seconds and row.measured.host_bytes and row.measured.phase != "save"
    assert all(len(word) for word in row.env.to_json().values())
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append(row)
    assert ledger.rows() == [ProbeRow.read(row.to_json())]


@EVERY
def test_a_probe_ends_at_its_time_limit(runner: Runner) -> None:
    row = runner.run(plan(), steps=9999, time_limit=0.3)  # one step can be done by then
    assert row.measured.outcome == "timeout" and row.measured.step_seconds is None


@EVERY
def test_a_plan_that_cannot_be_run_here_is_no_outcome(runner: Runner) -> None:
    with pytest.raises(VplanError, match="math"):
        runner.run(plan(attention="math"), steps=1, time_limit=300)
