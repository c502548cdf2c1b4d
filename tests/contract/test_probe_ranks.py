"""A probe of several ranks: each sets up what the plan says, runs all phases and reports; the highest numbers count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.probe.reported_facts import facts_of_all_ranks
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Plan
from planner.worker_process import REQUEST, read_json, write_json

pytest.importorskip("torch")
pytest.importorskip("deepspeed")

from tests.contract import training

TINY = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32, "text_dim": 16}


@pytest.mark.parametrize(
    "strategy",
    [
        {"sharding": "ddp", "ema": "cpu", "gradient_accumulation": 2},
        {"sharding": "fsdp", "optimizer_step": "fused"},
        {"sharding": "zero-2", "offload_optimizer": "cpu"},
    ],
    ids=lambda strategy: strategy["sharding"],
)
def test_every_rank_runs_every_phase(strategy: dict[str, Any], tmp_path: Path) -> None:
    from planner.launch.supported import supported_plan

    job = Job(model="wan2.1-t2v-1.3b", frames=5, height=32, width=32, lora_rank=4)
    plan = supported_plan(Plan(job=job, strategy=Strategy.read(strategy), machine=Machine(gpu="24GB", gpus=2)))
    records = {part: getattr(plan, part).to_json() for part in ("job", "strategy", "machine")}
    request = {"plan": {"schema": 1, **records}}
    request |= {"device": "cpu", "steps": 1, "weights": None, "config": TINY, "history": None, "capacity_bytes": 1}
    write_json(tmp_path / REQUEST, request)
    assert training.probe(str(tmp_path)) == [{"code": 0}, {"code": 0}]
    ranks = [read_json(tmp_path / name) for name in ("result-00000.json", "result-00001.json")]
    assert [rank["missing"] for rank in ranks] == [["allocated_bytes, reserved_bytes, device_bytes: no GPU"]] * 2
    told = facts_of_all_ranks(ranks)
    assert told["outcome"] == "ok"
    assert list(told["phases"]) == ["load", "first_step", "step", "train", "optimizer", "save"]
    assert told["host_bytes"] == sum(rank["host_bytes"] for rank in ranks)
    losses = [rank["losses"] for rank in ranks]
    assert losses[0] == losses[1] and len(losses[0]) == 1 + 1 + 1 + 1
    saved = json.loads((tmp_path / "scratch" / "step-00000004" / "manifest.json").read_text())
    assert saved["step"] == 4
