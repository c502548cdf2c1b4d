"""The parent of a probe: what it makes of a worker that tells, dies, hangs or refuses; and the files of rows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

import vplan
from planner import monitor
from planner import probe as probing
from planner.applied import EVERY_VALUE, VALUES, settled
from planner.commands import cli
from planner.commands import probe as verb
from planner.errors import VplanError
from planner.evidence import read_rows
from planner.job import Job, Machine, Strategy
from planner.plan import Plan, write_plan
from planner.probe import ProbeRow, classify, measured, probe, row_id
from planner.process import Ended, run_worker, write_json
from planner.rows import append_row, rows_by_id
from planner.units import GIB

PHASE = {"allocated_bytes": None, "reserved_bytes": None, "device_bytes": None, "retries": None}


def plan(trainer: str = "vplan", **fields: Any) -> Plan:
    """A small job; each field goes to the record that has it."""
    said = {"model": "wan2.1-t2v-1.3b", "frames": 5, "height": 64, "width": 64, "gpu": "24GB", **fields}
    records = {
        name: record.read({field: value for field, value in said.items() if field in record.model_fields})
        for name, record in (("job", Job), ("strategy", Strategy), ("machine", Machine))
    }
    return Plan(**records, trainer=trainer)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Sets the Python source that runs in the worker's place, with the shared folder in `folder`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def set_source(source: str) -> None:
        opening = f"import json, os, sys, time; from pathlib import Path; sys.path.insert(0, {vplan.HOME!r})\n"
        opening += "from planner.process import write_json; folder = Path(sys.argv[-1])\n"
        opening += "def tell(**facts): write_json(folder / 'result.json', facts)\n"
        monkeypatch.setattr(vplan, "command", lambda *words: [sys.executable, "-c", opening + source, words[-1]])

    return set_source


@pytest.mark.parametrize(
    ("told", "ended", "outcome"),
    [
        ("ok", Ended(0), "ok"),
        ("ok", Ended(-11), "ok"),  # died while it cleaned up, with everything told
        ("ok", Ended(None), "ok"),
        ("oom", Ended(0), "oom"),
        ("host-oom", Ended(0), "host-oom"),
        ("nan", Ended(0), "nan"),
        (None, Ended(None), "timeout"),
        (None, Ended(-9), "host-oom"),
        (None, Ended(1), "crash"),
        (None, Ended(0), "crash"),
        (None, Ended(-11), "crash"),
    ],
)
def test_outcomes(told: str | None, ended: Ended, outcome: str) -> None:
    assert classify(told, ended) == outcome


def test_numbers_are_the_highest_over_all_phases() -> None:
    told = {
        "phases": {
            "load": {"allocated_bytes": 5, "reserved_bytes": 6, "device_bytes": 9, "retries": 0},
            "step": {"allocated_bytes": 8, "reserved_bytes": 9, "device_bytes": 12, "retries": 2},
            "train": {"allocated_bytes": 8, "reserved_bytes": 9, "device_bytes": 12, "retries": 0},
            "optimizer": {"allocated_bytes": 7, "reserved_bytes": 9, "device_bytes": 12, "retries": 0},
        },
        "step_seconds": [3.0, 1.0, 2.0],
        "host_bytes": 4,
    }
    found = measured("ok", told)
    assert found.to_json() == {
        "outcome": "ok", "phase": "train", "allocated_bytes": 8, "reserved_bytes": 9, "device_bytes": 12,
        "host_bytes": 4, "step_seconds": 2.0, "retries": 2,
    }  # fmt: skip


def test_a_run_that_ended_early_says_where_and_no_speed() -> None:
    phases = {"first_step": {**PHASE, "allocated_bytes": 3}}
    found = measured("oom", {"phases": phases, "phase": "step", "step_seconds": [1.0]})
    assert (found.phase, found.allocated_bytes, found.step_seconds) == ("train", 3, None)
    assert measured("crash", {}).phase is None


def test_a_row_is_what_accuracy_reads(worker: Any, tmp_path: Path) -> None:
    peaks = {"allocated_bytes": GIB, "reserved_bytes": 2 * GIB, "device_bytes": 3 * GIB, "retries": 0}
    worker(f"tell(outcome='ok', gpu='NVIDIA H100 80GB HBM3', driver='580.1', phases={{'train': {peaks}}})")
    row = probe(plan())
    assert row.machine.gpu == "h100-80gb"  # where it was taken, not what the plan is for
    assert row.env.gpu == "NVIDIA H100 80GB HBM3"
    append_row(tmp_path / "rows.jsonl", row.to_json())
    (read,), notes = read_rows(tmp_path / "rows.jsonl")
    assert (read.id, read.outcome, notes) == (row.id, "ok", [])
    assert [interval[:2] for interval in read.intervals] == [("allocated", 1.0), ("reserved", 2.0), ("device", 3.0)]
    assert list(tmp_path.glob("vplan-probe-*")) == []


def test_a_crash_keeps_its_log(worker: Any) -> None:
    worker("tell(phase='load', phases={}); raise ImportError('libcudnn is gone')")
    row = probe(plan())
    assert (row.measured.outcome, row.measured.phase) == ("crash", "load")
    assert "ImportError: libcudnn is gone" in row.details["message"]
    assert "Traceback" in Path(row.details["log"]).read_text()


def test_the_kernel_ending_it_is_host_oom(worker: Any) -> None:
    worker("tell(phase='load', phases={}); os.kill(os.getpid(), 9)")
    row = probe(plan())
    assert (row.measured.outcome, row.measured.phase) == ("host-oom", "load")


def test_a_refusal_is_an_error(worker: Any, tmp_path: Path) -> None:
    worker("tell(refused={'message': 'no GPU', 'fix': 'get one'})")
    with pytest.raises(VplanError, match="no GPU; get one"):
        probe(plan())
    assert list(tmp_path.glob("vplan-probe-*")) == []


def test_a_hung_worker_and_its_children_are_gone_at_the_limit(worker: Any, tmp_path: Path) -> None:
    worker(
        "import subprocess\n"
        "orphan = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        f"Path({str(tmp_path / 'pids')!r}).write_text(f'{{os.getpid()}} {{orphan.pid}}')\n"
        "tell(phase='first_step', phases={}); time.sleep(600)"
    )
    began = time.monotonic()
    row = probe(plan(), time_limit=3)
    assert time.monotonic() - began < 20
    assert (row.measured.outcome, row.measured.phase) == ("timeout", "first_step")
    assert [pid for pid in map(int, (tmp_path / "pids").read_text().split()) if _runs(pid)] == []


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_a_worker_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    pid_file, home = tmp_path / "pid", f"import sys; sys.path.insert(0, {vplan.HOME!r})\n"
    child = home + (
        "import os, time; from trainers.probe import end_with_parent; end_with_parent()\n"
        f"open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    parent = home + (
        "from pathlib import Path; from planner.process import run_worker\n"
        f"run_worker([sys.executable, '-c', {child!r}], Path({str(tmp_path / 'log')!r}), 600)"
    )
    running = subprocess.Popen([sys.executable, "-c", parent])
    _wait_for(lambda: pid_file.exists() and pid_file.read_text() != "")
    running.send_signal(signal.SIGKILL)
    running.wait()
    _wait_for(lambda: not _runs(int(pid_file.read_text())))


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def _wait_for(true: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_output_goes_to_the_log(tmp_path: Path) -> None:
    assert run_worker([sys.executable, "-c", "print('hello')"], tmp_path / "log", 60) == Ended(0)
    assert (tmp_path / "log").read_text() == "hello\n"


def test_a_result_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"outcome": None})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"outcome": "ok", "loss": float("nan")})
    assert json.loads(path.read_text()) == {"outcome": None}


def test_the_worker_sets_the_allocator_before_torch() -> None:
    source = (
        "import os, sys; import trainers.probe as probe; assert 'torch' not in sys.modules\n"
        "probe.set_allocator(False); print(os.environ['PYTORCH_ALLOC_CONF'], os.environ['PYTORCH_CUDA_ALLOC_CONF'])"
    )
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    said = subprocess.check_output([sys.executable, "-c", source], cwd=vplan.HOME, env=environment, text=True)
    assert said.split() == ["expandable_segments:False"] * 2


# ---- what is applied, and a plan's name


def test_every_field_is_judged() -> None:
    """A new field of the record must be told here whether the step applies it."""
    assert VALUES.keys() | EVERY_VALUE == Strategy.model_fields.keys()
    assert VALUES.keys().isdisjoint(EVERY_VALUE)
    assert settled(plan()).strategy.weights_dtype == "bf16"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"swap_blocks": 4, "gradient_checkpointing": "full", "weights_dtype": "fp8"},
            "swap_blocks of weights in fp8 is not applied",
        ),
        ({"offload_optimizer": "cpu"}, "offload_optimizer cpu is not applied"),
        ({"sharding": "zero-2", "gpus": 2}, "training on 2 GPUs is not applied"),
        ({"text_encoder": "resident"}, "text_encoder resident is not applied"),
        ({"weights_dtype": "int4"}, "weights_dtype int4 has no backward"),
        ({"method": "sample"}, "method sample is not applied"),
        ({"trainer": "diffsynth"}, "the plan is for diffsynth"),
        ({"frames": 6}, "frames 6 is not 4n[+]1"),
    ],
)
def test_what_the_step_lacks_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(VplanError, match=message) as refusal:
        probe(plan(**fields))
    assert refusal.value.fix
    assert refusal.value.exit_code == 1


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> Any:
        return None if name == "bitsandbytes" else SimpleNamespace()

    monkeypatch.setattr(probing.importlib.util, "find_spec", find)
    with pytest.raises(VplanError, match="needs bitsandbytes"):
        probe(plan(optimizer="adamw-8bit"))


def test_a_row_is_named_by_what_the_plan_asks() -> None:
    name = row_id(plan())
    assert name.startswith("wan2.1-t2v-1.3b-lora-")
    assert name == row_id(plan(weights_dtype="bf16")) == row_id(plan(lora_rank=16))  # said or by default
    others = [row_id(plan(frames=9)), row_id(plan(gpu="48GB")), row_id(plan(), {"num_layers": 2})]
    assert len({name, *others}) == 4


# ---- files of rows


def test_rows_are_appended_and_found(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert rows_by_id(path) == {}
    for name in ("a", "b"):
        append_row(path, {"id": name})
    assert list(rows_by_id(path)) == ["a", "b"]


@pytest.mark.parametrize(("tail", "kept"), [(b'{"id": "b", "mea', ["a", "c"]), (b'{"id": "b"}', ["a", "b", "c"])])
def test_a_torn_last_line_is_no_row(tmp_path: Path, tail: bytes, kept: list[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"id": "a"}\n' + tail)
    assert list(rows_by_id(path)) == kept[:-1]
    append_row(path, {"id": "c"})
    assert list(rows_by_id(path)) == kept
    assert path.read_bytes().startswith(b'{"id": "a"}\n')


def test_a_damaged_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "a"}\nnonsense\n{"id": "b"}\n')
    with pytest.raises(VplanError, match=r"rows\.jsonl:2 is damaged"):
        rows_by_id(path)
    with pytest.raises(VplanError, match="cannot write"):
        append_row(tmp_path, {"id": "a"})


# ---- the command


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The command with a probe whose outcome depends on the frames; gives the list of frames that were run."""
    ran: list[int] = []
    outcomes = {5: "ok", 9: "oom", 13: "crash"}

    def fake(plan: Plan, *, command: str, **_: Any) -> ProbeRow:
        ran.append(plan.job.frames)
        told = {"phase": "train", "phases": {"train": {**PHASE, "device_bytes": GIB}}, "step_seconds": [1.5]}
        outcome: Any = outcomes[plan.job.frames]
        return ProbeRow(
            id=row_id(plan), job=plan.job, strategy=plan.strategy, machine=plan.machine,
            measured=measured(outcome, told), env=probing._environment(told, command, "now"),
        )  # fmt: skip

    monkeypatch.setattr(verb, "probe", fake)
    return ran


def files(folder: Path, *frames: int) -> list[str]:
    """Plans of different lengths."""
    for count in frames:
        write_plan(plan(frames=count), folder / f"{count}.toml")
    return [str(folder / f"{count}.toml") for count in frames]


@pytest.mark.parametrize(("frames", "code"), [((5,), 0), ((9,), 3), ((13,), 4), ((5, 9), 3), ((9, 13, 5), 4)])
def test_exit_codes(measuring: list[int], tmp_path: Path, frames: tuple[int, ...], code: int) -> None:
    result = CliRunner().invoke(cli, ["probe", *files(tmp_path, *frames), "--json"])
    assert result.exit_code == code
    answer = json.loads(result.stdout)
    rows = answer["rows"] if len(frames) > 1 else [answer]
    assert [row["job"]["frames"] for row in rows] == list(frames) == measuring
    assert "vplan probe 5.toml --steps 3" in json.dumps(answer) or 5 not in frames


def test_a_grid_goes_on_where_it_was_stopped(measuring: list[int], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    first = CliRunner().invoke(cli, ["probe", *files(tmp_path, 5, 9), "-o", str(rows)])
    assert "[2/2]" in first.stderr and "oom" in first.stderr
    before = rows.read_bytes()
    second = CliRunner().invoke(cli, ["probe", *files(tmp_path, 5, 9, 13), "-o", str(rows), "--json"])
    assert measuring == [5, 9, 13]
    assert "is in" in second.stderr
    assert rows.read_bytes().startswith(before)
    assert [row["measured"]["outcome"] for row in json.loads(second.stdout)["rows"]] == ["ok", "oom", "crash"]


def test_all_plans_are_read_before_one_runs(measuring: list[int], tmp_path: Path) -> None:
    write_plan(plan(ema="gpu"), tmp_path / "ema.toml")
    result = CliRunner().invoke(cli, ["probe", *files(tmp_path, 5), str(tmp_path / "ema.toml")])
    assert (result.exit_code, measuring) == (1, [])
    assert "ema gpu" in result.stderr


# ---- the monitor


def test_host_memory_is_this_process_s() -> None:
    resident = psutil.Process().memory_info().rss
    assert monitor.host_peak_bytes() >= 0.9 * resident
