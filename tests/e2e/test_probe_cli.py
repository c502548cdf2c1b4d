"""Real probes: a new process builds a model and steps it, here a tiny one on the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest

import vplan
from planner.commands.probe import estimated_bytes
from planner.probe.probe import RealRunner, probe
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Plan, write_plan

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.usefixtures("preloaded_python")

TINY = {
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "ffn_dim": 32,
    "text_dim": 16,
    "freq_dim": 16,
}
"""Keys of a Wan config."""


def plan(strategy: dict[str, Any] | None = None, **job: Any) -> Plan:
    """The shortest clip of Wan 2.1 1.3B at its smallest size."""
    shape = {"model": "wan2.1-t2v-1.3b", "frames": 5, "height": 32, "width": 32, "lora_rank": 4}
    return Plan(job=Job(**{**shape, **job}), strategy=Strategy(**(strategy or {})), machine=Machine(gpu="24GB"))


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs a command whose temporary files go to `folder`."""
    environment = {**os.environ, "TMPDIR": str(folder), "VPLAN_HOME": str(folder / "home")}
    return subprocess.run(vplan.command(*words), env=environment, capture_output=True, text=True, check=False)


def test_a_real_step() -> None:
    """The VAE has its published size and decodes in fp32: on a CPU, torch's bf16 convolutions are ninety times
    slower."""
    strategy = {"gradient_checkpointing": "full", "validation_mode": "on", "ema": "cpu", "gradient_accumulation": 2}
    strategy |= {"vae_dtype": "fp32"}
    row = probe(plan(strategy), RealRunner(device="cpu", config=TINY), steps=2, time_limit=300)
    assert row.measured.outcome == "ok", row.details
    assert row.measured.step_seconds and row.measured.step_seconds > 0
    assert row.measured.allocated_bytes is row.measured.reserved_bytes is row.measured.device_bytes is None
    assert row.measured.host_bytes and row.measured.host_bytes > 10**8
    phases = ["load", "first_step", "step", "train", "optimizer", "denoise", "decode", "save"]
    assert list(row.details["phases"]) == phases
    losses = row.details["losses"]
    assert len(losses) == 1 + 1 + 2 + 1
    assert all(loss is not None and 0 < loss < 100 for loss in losses)
    assert row.env.attention_kernel != "unknown"
    assert row.env.torch == version("torch")  # of a CUDA build without its "+cu130"
    assert row.machine.torch == ".".join(torch.__version__.split(".")[:2])
    assert row.strategy.weights_dtype == "bf16"


def test_a_loss_that_is_no_number() -> None:
    """With a negative epsilon a norm takes the root of a negative number; everything else is as in a working run."""
    strategy = {"optimizer_step": "fused", "expandable_segments": False}
    row = probe(
        plan(strategy, method="full"), RealRunner(device="cpu", config={**TINY, "eps": -1e30}), steps=1, time_limit=300
    )
    assert row.measured.outcome == "nan", row.details
    assert row.details["losses"] == [None] * 4
    assert len(row.details["step_seconds"]) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    write_plan(plan(), tmp_path / "plan.toml")
    done = run(tmp_path, "probe", str(tmp_path / "plan.toml"), "--json")
    assert done.returncode == 1
    error = json.loads(done.stdout)["error"]
    assert "needs a GPU" in error["message"] and "vplan estimate" in error["fix"]
    assert "Traceback" not in done.stderr


def test_the_time_limit_is_a_result(tmp_path: Path) -> None:
    write_plan(plan(), tmp_path / "plan.toml")
    rows = tmp_path / "rows.jsonl"
    options = ("--device", "cpu", "--time-limit", "1", "-o", str(rows), "--json")
    done = run(tmp_path, "probe", str(tmp_path / "plan.toml"), *options)
    assert done.returncode == 4
    row = json.loads(done.stdout)
    assert row["measured"]["outcome"] == "timeout"
    assert Path(row["details"]["log"]).is_file()
    assert json.loads(rows.read_text()) == row
    assert json.loads((tmp_path / "home" / "ledger.jsonl").read_text()) == row


def test_calibrating_at_a_tiny_size(tmp_path: Path) -> None:
    done = run(tmp_path, "calibrate", "--device", "cpu", "--no-probes", "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == 0
    assert all(rate > 0 for rate in answer["calibration"]["rates"].values())
    assert answer["calibration"]["context_bytes"] is None
    assert set(answer["calibration"]["kernels"]) == {"matmul", "attention", "convolution", "norm"}
    assert json.loads(Path(answer["path"]).read_text()) == answer["calibration"]
    assert list(tmp_path.glob("vplan-calibrate-*")) == []
    said = run(tmp_path, "calibrate", "--device", "cpu", "--no-probes").stdout
    assert "saved to " in said and "--gpu auto" not in said  # which is never the CPU


def test_an_end_by_sigterm_leaves_nothing_behind(tmp_path: Path) -> None:
    """As schedulers end jobs. A probe's folder can hold a checkpoint of many gigabytes."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    write_plan(plan(), tmp_path / "plan.toml")
    environment = {**os.environ, "TMPDIR": str(temporary), "VPLAN_HOME": str(tmp_path / "home")}
    words = vplan.command("probe", str(tmp_path / "plan.toml"), "--device", "cpu")
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not (logs := list(temporary.glob("vplan-probe-*/log.txt"))) and process.poll() is None:
            time.sleep(0.05)
        assert logs
        while not (workers := psutil.Process(process.pid).children()):  # its log is there just before it is
            time.sleep(0.05)
        (worker,) = workers
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, errors
    worker.wait(timeout=2)
    assert not list(temporary.glob("vplan-*"))


def test_encoding_that_does_not_run_is_not_in_the_estimate_beside_it(tmp_path: Path) -> None:
    """At this size the text encoder needs far more memory than the steps, which it precedes."""
    estimated = vplan.estimate("wan2.1-t2v-1.3b", gpu="24GB", frames=5, height=32, width=32, lora_rank=4)
    phases = {name: peak.device_bytes for name, peak in estimated.phases.items()}
    encoding = phases.pop("encode")
    assert encoding > max(phases.values())
    row = {"details": {"phases": {"load": {}, "step": {}}}}
    made = estimated.to_plan()
    assert estimated_bytes(row, made) == max(phases.values())
    assert estimated_bytes({"details": {"phases": {"encode": {}, "load": {}}}}, made) == encoding
