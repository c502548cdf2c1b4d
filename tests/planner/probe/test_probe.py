"""The parent of a probe: what it makes of a worker that tells, dies, hangs or refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest
from click.testing import CliRunner

import vplan
from planner.catalog import card_lookup
from planner.catalog.plan_id import row_id
from planner.commands import cli
from planner.errors import VplanError
from planner.evidence.jsonl import append_row
from planner.evidence.ledger import Ledger, default_path
from planner.evidence.published import read_rows
from planner.hardware import nvml
from planner.launch import launch
from planner.launch.supported import supported_plan
from planner.probe import probe as probing
from planner.probe.probe import probe
from planner.probe.reported_facts import classify, facts_of_all_ranks, measurement_of
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Plan, write_plan
from planner.units import GIB
from planner.worker_process import Ended, run_worker, write_json
from tests.planner.drivers import H100, Driver

PHASE = {"allocated_bytes": None, "reserved_bytes": None, "device_bytes": None, "retries": None}


def plan(trainer: str = "vplan", **fields: Any) -> Plan:
    """A small job; each field goes to the record that has it."""
    said = {"model": "wan2.1-t2v-1.3b", "frames": 5, "height": 64, "width": 64, "gpu": "24GB", **fields}
    records = {
        name: record.read({field: value for field, value in said.items() if field in record.model_fields})
        for name, record in (("job", Job), ("strategy", Strategy), ("machine", Machine))
    }
    return Plan(**records, trainer=trainer)


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("VPLAN_HOME", str(tmp_path / "home"))


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
    found = measurement_of("ok", told)
    assert found.to_json() == {
        "outcome": "ok", "phase": "train", "allocated_bytes": 8, "reserved_bytes": 9, "device_bytes": 12,
        "host_bytes": 4, "step_seconds": 2.0, "retries": 2,
    }  # fmt: skip


def test_a_run_that_ended_early_says_where_and_no_speed() -> None:
    phases = {"first_step": {**PHASE, "allocated_bytes": 3}}
    found = measurement_of("oom", {"phases": phases, "phase": "step", "step_seconds": [1.0]})
    assert (found.phase, found.allocated_bytes, found.step_seconds) == ("train", 3, None)
    assert measurement_of("crash", {}).phase is None


PEAKS = {"allocated_bytes": GIB, "reserved_bytes": 2 * GIB, "device_bytes": 3 * GIB, "retries": 0}


def test_the_rank_that_takes_most_counts() -> None:
    low = {**PEAKS, "allocated_bytes": GIB // 2}
    ranks = [
        {"outcome": "ok", "phases": {"load": PEAKS, "train": low}, "host_bytes": 3, "step_seconds": [1.0, 2.0]},
        {"outcome": "ok", "phases": {"load": low, "train": PEAKS}, "host_bytes": 4, "step_seconds": [3.0, 1.0]},
    ]
    told = facts_of_all_ranks(ranks)
    assert told["phases"] == {"load": PEAKS, "train": PEAKS}
    assert (told["outcome"], told["host_bytes"], told["step_seconds"]) == ("ok", 7, [3.0, 2.0])
    assert told["device_bytes_by_rank"] == [3 * GIB, 3 * GIB]


@pytest.mark.parametrize(
    ("outcomes", "outcome"),
    [(("ok", "oom"), "oom"), ((None, "oom"), "oom"), (("ok", None), None), (("nan", "ok"), "nan"), ((None,), None)],
)
def test_the_worst_word_of_all_ranks_counts(outcomes: tuple[str | None, ...], outcome: str | None) -> None:
    ranks = [{"phases": {}, "rank": rank, **({"outcome": said} if said else {})} for rank, said in enumerate(outcomes)]
    told = facts_of_all_ranks(ranks)
    assert told.get("outcome") == outcome
    assert told["rank"] == outcomes.index(outcome)


def test_a_cache_that_is_emptied_in_steady_steps_does_not_fit(worker: Any) -> None:
    steady = {**PEAKS, "retries": 2}
    worker(f"tell(outcome='ok', phase='save', step_seconds=[1.0], phases={{'first_step': {PEAKS}, 'step': {steady}}})")
    row = probe(plan())
    assert (row.measured.outcome, row.measured.phase, row.measured.retries) == ("oom", "train", 2)
    assert "2 times in steady steps" in row.details["message"]
    worker(f"tell(outcome='ok', phase='save', step_seconds=[1.0], phases={{'first_step': {steady}, 'step': {PEAKS}}})")
    assert probe(plan()).measured.outcome == "ok"


def test_a_capped_run_is_of_a_card_that_gives_less(worker: Any) -> None:
    """23.5 GiB of an H100: the row's machine has just that budget, and says what it was for."""
    worker(f"tell(outcome='ok', gpu='NVIDIA H100 80GB HBM3', phases={{'train': {PEAKS}}}, capped_bytes={23 * GIB})")
    row = probe(plan())
    assert (row.machine.gpu, row.planned_gpu, row.capped_bytes) == ("h100-80gb", "24GB", 23 * GIB)
    assert card_lookup.gpu("h100-80gb").allocatable_bytes - row.machine.reserve == 23 * GIB


def test_running_out_of_memory_says_what_was_asked_for(worker: Any) -> None:
    said = {"outcome": "oom", "phase": "train", "phases": {}, "requested_bytes": 5 * GIB, "allocator": "| summary |"}
    worker(f"tell(**{said})")
    row = probe(plan())
    assert (row.measured.outcome, row.measured.phase, row.requested_bytes) == ("oom", "train", 5 * GIB)
    assert row.details["allocator"] == "| summary |"


def test_a_rank_that_the_kernel_ended_is_host_oom(worker: Any) -> None:
    """As torch's launcher tells of it: its own exit code is 1."""
    worker("print('  exitcode  : -9 (pid: 4711)'); sys.exit(1)")
    assert probe(plan(gpus=2, sharding="ddp")).measured.outcome == "host-oom"


def test_ranks_are_started_by_torch_s_launcher(tmp_path: Path) -> None:
    alone, several = (launch.command(plan(gpus=gpus), tmp_path, launch.Nodes(), "probe") for gpus in (1, 2))
    assert alone[-3:] == several[-3:] == ["worker", "probe", str(tmp_path)]
    assert "torch.distributed.run" in several and "torch.distributed.run" not in alone


def test_a_plan_is_probed_as_for_another_card(ran: Callable[[], list[int]], tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["probe", *files(tmp_path, 5), "--gpu", "16GB", "--json"])
    row = json.loads(result.stdout)
    assert row["machine"]["gpu"] == "16GB"
    assert row["env"]["command"].endswith("--gpu 16GB")
    result = CliRunner().invoke(cli, ["probe", *files(tmp_path, 5), "--weights", str(tmp_path / "none")])
    assert (result.exit_code, ran()) == (1, [5])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("schema = 1", "schema = 2"), "has schema 2; this vplan reads schema 1"),
        (("wan2.1-t2v-1.3b", "wan9-t2v-1.3b"), "wan9-t2v-1.3b"),
        (("frames = 5", "frames = [5"), "is not TOML"),
        (("frames = 5", "frames = true"), "frames True is wrong"),
        (("[job]", "[joob]"), "plan has no field 'joob'"),
    ],
)
def test_a_plan_that_is_none_is_one_line_and_nothing_runs(
    ran: Callable[[], list[int]], tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    (path,) = files(tmp_path, 5)
    text = Path(path).read_text()
    assert change[0] in text
    Path(path).write_text(text.replace(*change))
    result = CliRunner().invoke(cli, ["probe", path, "-o", str(tmp_path / "rows.jsonl")])
    assert (result.exit_code, ran()) == (1, [])
    error, fix = result.stderr.splitlines()
    assert error.startswith("error: ") and message in error and fix.startswith("fix: ")
    assert not (tmp_path / "rows.jsonl").exists() and not default_path().exists()


def test_a_gpu_that_vanishes_is_a_crash_with_its_log(worker: Any, tmp_path: Path) -> None:
    lost = "CUDA error: unspecified launch failure"
    worker(f"tell(phase='step', phases={{'load': {PEAKS}}}, gpu='NVIDIA H100'); raise RuntimeError({lost!r})")
    result = CliRunner().invoke(cli, ["probe", *files(tmp_path, 5), "--json"])
    row = json.loads(result.stdout)
    assert (result.exit_code, row["measured"]["outcome"], row["measured"]["phase"]) == (4, "crash", "train")
    assert lost in row["details"]["message"] and Path(row["details"]["log"]).is_file()
    assert len(Ledger(default_path()).rows()) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX limits")
def test_no_room_for_a_probe_is_one_line(tmp_path: Path) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, before[1]))  # bytes that a file may have
    try:
        with pytest.raises(VplanError, match=r"cannot write into .*: File too large") as failure:
            probe(plan())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "TMPDIR" in failure.value.fix
    assert list(tmp_path.glob("vplan-probe-*")) == []


def test_a_ledger_that_cannot_be_written_takes_no_answer_away(
    ran: Callable[[], list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VPLAN_HOME", str(tmp_path / "file"))
    result = CliRunner().invoke(cli, ["probe", *files(tmp_path, 5), "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["measured"]["outcome"] == "ok"
    assert "warning: the measurement is not kept: cannot write" in result.stderr


def test_memory_that_a_driver_does_not_take_back_is_told(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first two runs it comes back at once, or after a while; of the last never."""
    used = iter([GIB, 9 * GIB, GIB, GIB, GIB, GIB, *[5 * GIB] * 1000])
    Driver(monkeypatch, [H100])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda *_, **__: SimpleNamespace(used=next(used)))
    monkeypatch.setattr(probing, "SETTLE_SECONDS", 0.3)
    worker("tell(outcome='ok', phases={})")
    rows = [probe(plan()) for _ in range(3)]
    assert [row.details.get("left_bytes") for row in rows] == [None, None, 4 * GIB]


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


@pytest.mark.parametrize(("phase", "outcome"), [("save", "ok"), ("step", "timeout")])
def test_a_checkpoint_that_is_written_has_as_long_again(phase: str, outcome: str, worker: Any) -> None:
    """One and a half times the limit, from when the process began."""
    worker(
        f"import psutil; tell(phase={phase!r}, phases={{}})\n"
        "time.sleep(max(0, psutil.Process().create_time() + 6 - time.time())); tell(outcome='ok', phases={})"
    )
    assert probe(plan(), time_limit=4).measured.outcome == outcome


def test_as_long_again_is_given_once(tmp_path: Path) -> None:
    asked: list[bool] = []
    words = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert run_worker(words, tmp_path / "log", 0.1, once_more=lambda: not asked.append(True)).timed_out
    assert asked == [True]


ENCODED = (
    "part = json.loads((folder / 'request.json').read_text()).get('part', 'step')\n"
    "counted = dict(allocated_bytes=3, reserved_bytes=4, device_bytes={'encode': 9, 'step': 6}[part], retries=0)\n"
    "phases = {'encode': counted} if part == 'encode' else {'load': counted, 'train': counted}\n"
)


def test_encoding_is_another_process_of_the_same_row(worker: Any) -> None:
    worker(ENCODED + "tell(outcome='ok', phases=phases, missing=[part], step_seconds=[1.0], host_bytes=len(part))")
    row = probe(plan(), encode=True)
    assert list(row.details["phases"]) == ["encode", "load", "train"] and row.details["missing"] == ["step", "encode"]
    assert (row.measured.outcome, row.measured.device_bytes, row.measured.host_bytes) == ("ok", 9, 6)
    assert "encode" not in probe(plan()).details["phases"]


def test_what_runs_out_while_encoding_is_not_stepped(worker: Any) -> None:
    worker(ENCODED + "assert part == 'encode'; tell(outcome='oom', phase='encode', phases=phases, requested_bytes=5)")
    row = probe(plan(), encode=True)
    assert (row.measured.outcome, row.measured.phase, row.requested_bytes) == ("oom", "encode", 5)
    worker(ENCODED + "raise ImportError('no encoder')")
    row = probe(plan(), encode=True)
    assert row.measured.outcome == "crash" and "no encoder" in row.details["message"]
    assert "no encoder" in Path(row.details["log"]).read_text()


def test_what_a_worker_that_died_had_started_is_gone(worker: Any, tmp_path: Path) -> None:
    """Ranks lead sessions of their own, and a launcher may be the first to be killed."""
    worker(
        "import subprocess\n"
        "rank = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        f"Path({str(tmp_path / 'pid')!r}).write_text(str(rank.pid)); time.sleep(2.5); os.kill(os.getpid(), 9)"
    )
    assert probe(plan()).measured.outcome == "host-oom"
    assert not _runs(int((tmp_path / "pid").read_text()))


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_a_worker_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    pid_file, home = tmp_path / "pid", f"import sys; sys.path.insert(0, {vplan.HOME!r})\n"
    child = home + (
        "import os, time; from trainers.worker import end_with_parent; end_with_parent()\n"
        f"open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    parent = home + (
        "from pathlib import Path; from planner.worker_process import run_worker\n"
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
    path = tmp_path / "result-00000.json"
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


def test_open_fields_are_filled_in() -> None:
    assert supported_plan(plan()).strategy.weights_dtype == "bf16"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"sharding": "zero-2", "gpus": 2, "nodes": 2},
            "for 2 nodes, but only one is measured; set nodes = 1",
        ),
        ({"sharding": "fsdp", "gpus": 2, "weights_dtype": "nf4"}, "nf4"),
        ({"text_encoder": "resident"}, "text_encoder resident is not supported"),
        ({"weights_dtype": "int4"}, "weights_dtype int4 has no backward"),
        ({"method": "sample"}, "method sample is not supported"),
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
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # as Python marks what cannot be imported
    with pytest.raises(VplanError, match="needs bitsandbytes"):
        probe(plan(optimizer="adamw-8bit"))


def test_a_row_is_named_by_what_the_plan_asks() -> None:
    name = row_id(plan())
    assert name.startswith("wan2.1-t2v-1.3b-lora-")
    assert name == row_id(plan(weights_dtype="bf16")) == row_id(plan(lora_rank=16))  # said or by default
    others = [row_id(plan(frames=9)), row_id(plan(gpu="48GB")), row_id(plan(), {"num_layers": 2})]
    assert len({name, *others}) == 4


# ---- the command


@pytest.fixture
def ran(worker: Any, tmp_path: Path) -> Callable[[], list[int]]:
    """Lets the outcome of a probe depend on the frames of its plan; gives the frames of all plans that were run."""
    log = tmp_path / "ran"
    worker(
        "frames = json.loads((folder / 'request.json').read_text())['plan']['job']['frames']\n"
        f"with open({str(log)!r}, 'a') as file: print(frames, file=file)\n"
        f"tell(phase='step', phases={{'train': {PEAKS}}}, step_seconds=[1.5], **{{5: {{'outcome': 'ok'}}, "
        "9: {'outcome': 'oom'}, 13: {}}[frames])"
    )
    return lambda: [int(line) for line in log.read_text().split()] if log.exists() else []


def files(folder: Path, *frames: int) -> list[str]:
    """Plans of different lengths."""
    for count in frames:
        write_plan(plan(frames=count), folder / f"{count}.toml")
    return [str(folder / f"{count}.toml") for count in frames]


@pytest.mark.parametrize(("frames", "code"), [((5,), 0), ((9,), 3), ((13,), 4), ((5, 9), 3), ((9, 13, 5), 4)])
def test_exit_codes(ran: Callable[[], list[int]], tmp_path: Path, frames: tuple[int, ...], code: int) -> None:
    result = CliRunner().invoke(cli, ["probe", *files(tmp_path, *frames), "--json"])
    assert result.exit_code == code
    answer = json.loads(result.stdout)
    rows = answer["rows"] if len(frames) > 1 else [answer]
    assert [row["job"]["frames"] for row in rows] == list(frames) == ran()
    assert "vplan probe 5.toml --steps 3" in json.dumps(answer) or 5 not in frames
    assert [row.job.frames for row in Ledger(default_path()).rows()] == list(frames)


def test_a_grid_goes_on_where_it_was_stopped(ran: Callable[[], list[int]], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    first = CliRunner().invoke(cli, ["probe", *files(tmp_path, 5, 9), "-o", str(rows)])
    assert "[2/2]" in first.stderr and "oom" in first.stderr
    before = rows.read_bytes()
    second = CliRunner().invoke(cli, ["probe", *files(tmp_path, 5, 9, 13), "-o", str(rows), "--json"])
    assert ran() == [5, 9, 13]
    assert "already in" in second.stderr
    assert rows.read_bytes().startswith(before)
    assert [row["measured"]["outcome"] for row in json.loads(second.stdout)["rows"]] == ["ok", "oom", "crash"]


def test_all_plans_are_read_before_one_runs(ran: Callable[[], list[int]], tmp_path: Path) -> None:
    write_plan(plan(text_encoder="resident"), tmp_path / "resident.toml")
    result = CliRunner().invoke(cli, ["probe", *files(tmp_path, 5), str(tmp_path / "resident.toml")])
    assert (result.exit_code, ran()) == (1, [])
    assert "text_encoder resident" in result.stderr


# ---- the monitor


def test_host_memory_is_this_process_s() -> None:
    resident = psutil.Process().memory_info().rss
    assert nvml.host_peak_bytes() >= 0.9 * resident
