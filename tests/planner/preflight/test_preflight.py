"""`vplan preflight` on machines we do not have: what it says, how it ends, and what it waits for."""

from __future__ import annotations

import json
import os
import resource
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

import vplan
from planner.catalog import user_data
from planner.catalog.plan_id import row_id
from planner.commands import cli
from planner.errors import VplanError
from planner.evidence.ledger import Ledger, default_path
from planner.evidence.measurement import ProbeRow
from planner.hardware import doctor
from planner.preflight import gpu_wait
from planner.preflight.checks import on_disk
from planner.preflight.gpu_wait import parse_wait
from planner.preflight.preflight import PreflightOptions, estimated, preflight, ready
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Environment, Evidence, Measured, Plan, read_plan, write_plan
from planner.units import GIB, MIB
from tests.planner.drivers import H100, Computer, Driver

RTX = {
    "Name": "NVIDIA GeForce RTX 4090",
    "CudaComputeCapability": (8, 9),
    "MigMode": (0, 0),
    "ComputeRunningProcesses": [],
    "GraphicsRunningProcesses": [],
    "v2": {"total": 24_564 * MIB, "reserved": 400 * MIB, "used": 0, "free": 24_164 * MIB},
}


def held(nbytes: int, card: dict[str, Any] = RTX, by: list[Any] | None = None) -> dict[str, Any]:
    """The card with so much of it in use."""
    memory = {**card["v2"], "used": nbytes, "free": card["v2"]["free"] - nbytes}
    return {**card, "v2": memory, "ComputeRunningProcesses": by or []}


def plan(strategy: dict[str, Any] | None = None, gpus: int = 1, **said: Any) -> Plan:
    job = Job(model="wan2.1-t2v-1.3b", frames=17, height=480, width=832)
    asked = Strategy.read(strategy or {"gradient_checkpointing": "full"})
    return Plan(job=job, strategy=asked, machine=Machine(gpu="24GB", gpus=gpus), **said)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv(user_data.VARIABLE, str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    write_plan(plan(), "plan.toml")


def run(*words: str) -> Result:
    result = CliRunner().invoke(cli, ["preflight", *words])
    assert "Traceback" not in result.output
    return result


def levels(answer: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["level"] for check in answer["checks"]}


def test_a_free_card_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch, [held(GIB, by=[SimpleNamespace(pid=os.getpid(), usedGpuMemory=GIB)])])
    result = run("plan.toml", "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["verdict"] == "go" and "error" not in answer
    assert levels(answer) == {"plan": "ok", "GPU 0": "note", "host RAM": "ok", "disk": "ok", "versions": "note"}
    assert f"(pid {os.getpid()}) holds 1.0 GiB" in json.dumps(answer["checks"])
    assert list(answer["need"]["phases"]) == list(answer["estimate"]["phases"])
    assert "it can start" in run("plan.toml").stdout


def test_a_card_that_others_hold_is_named_with_them_and_the_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch, [RTX, held(16 * GIB, by=[SimpleNamespace(pid=2**22 + 1, usedGpuMemory=16 * GIB)])])
    write_plan(plan({"gradient_checkpointing": "full", "sharding": "ddp"}, gpus=2), "plan.toml")
    result = run("plan.toml", "--json")
    assert result.exit_code == 3
    answer = json.loads(result.stdout)
    told = answer["error"]["message"]
    assert "GPU 1 (NVIDIA GeForce RTX 4090) has 7.6 GiB free" in told and "encode " in told and "save" not in told
    assert f"(pid {2**22 + 1}) holds 16.0 GiB" in told
    assert levels(answer)["GPU 0"] == "ok" and answer["verdict"] == "no"
    text = run("plan.toml")
    assert text.exit_code == 3 and "error: GPU 1" in text.stderr and "fix: stop other programs" in text.stderr


def test_held_out_of_sight_and_just_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container hides who holds it; between low and high the plan may start, with a warning."""
    found, _ = estimated(ready(plan()), must=True)
    assert found
    middle = (found.low_bytes + found.high_bytes) // 2
    Driver(monkeypatch, [held(RTX["v2"]["free"] - middle)])  # type: ignore[index]
    result = run("plan.toml", "--json")
    assert result.exit_code == 0
    (check,) = [check for check in json.loads(result.stdout)["checks"] if check["level"] == "warning"]
    assert "may need" in check["message"] and "an invisible process" in check["message"]


@pytest.mark.parametrize(
    ("shown", "visible", "code", "told"),
    [
        (None, None, 1, "NVML reports"),
        ([], None, 1, "the plan is for 1 GPU, but this machine shows 0"),
        ([RTX], "", 1, "shows 0"),
        ([held(20 * GIB), RTX], "1", 0, ""),
        ([held(20 * GIB), RTX], "GPU-1,GPU-0", 0, ""),
        ([RTX, held(20 * GIB)], "MIG-1", 3, "GPU 0"),
        ([RTX], "7,0", 1, "shows 0"),
        ([{}], None, 4, "GPU 0 does not respond"),
        ([{**RTX, "MigMode": (1, 1)}], None, 0, ""),
    ],
)
def test_the_cards_that_cuda_would_show(
    monkeypatch: pytest.MonkeyPatch, shown: list[Any] | None, visible: str | None, code: int, told: str
) -> None:
    if shown is not None:
        Driver(monkeypatch, shown)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    result = run("plan.toml")
    assert result.exit_code == code, result.output
    assert told in result.stderr
    assert result.stderr.count("error:") == (code != 0)
    if shown and shown[0].get("MigMode") == (1, 1):
        assert "CUDA_VISIBLE_DEVICES=MIG-" in result.stdout


def test_memory_that_the_cpu_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch, [{"Name": "NVIDIA GB10", "MigMode": (0, 0)}])
    result = run("plan.toml", "--json")
    assert result.exit_code in (0, 3)  # by what this computer has
    (card,) = json.loads(result.stdout)["gpus"]
    assert card["unified"] and 0 < card["free_bytes"] <= doctor.host_ram()["total_bytes"]


def test_it_waits_until_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_wait, "POLL_SECONDS", 0.01)
    driver = Driver(monkeypatch, [held(16 * GIB)])
    looks = 0

    def memory(index: int, version: int | None = None) -> Any:
        nonlocal looks
        looks += 1
        if looks > 3:
            driver.cards[0] = RTX
        return driver.memory(index, version)

    monkeypatch.setattr("pynvml.nvmlDeviceGetMemoryInfo", memory)
    result = run("plan.toml", "--wait", "10m", "--json")
    assert result.exit_code == 0, result.output
    assert "waiting for" in result.stderr and "left" in result.stderr
    driver.cards[0] = held(16 * GIB)
    looks = -(10**6)
    late = run("plan.toml", "--wait", "0.05s", "--json")
    assert late.exit_code == 3 and json.loads(late.stdout)["waited_seconds"] >= 0


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("2h", 7200), ("1.5", 1.5), ("3 min", 180)])
def test_times(text: str, seconds: float) -> None:
    assert parse_wait(text) == seconds
    for wrong in ("10x", "-5m", "nan", "9999h", "1e9", ""):
        with pytest.raises(VplanError, match="--wait"):
            parse_wait(wrong)


# ---- the host


def test_a_jobs_own_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Slurm's step has less than its job, the job less than the machine; both versions of control groups."""
    for version, line, names in (
        (1, "4:memory:/slurm/job_7/step_0\n", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
        (2, "0::/slurm/job_7/step_0\n", ("memory.max", "memory.current")),
    ):
        root = tmp_path / str(version)
        place = root / ("memory" if version == 1 else "") / "slurm" / "job_7" / "step_0"
        place.mkdir(parents=True)
        for folder, limit in ((place, "max"), (place.parent, str(2 * GIB)), (place.parent.parent, str(9 * GIB))):
            (folder / names[0]).write_text(limit + "\n")
            (folder / names[1]).write_text(f"{GIB}\n")
            (folder / "memory.stat").write_text(f"anon 5\ninactive_file {GIB // 2}\n")
        (root / "own").write_text("7:cpu:/else\n" + line)
        monkeypatch.setattr(doctor, "GROUPS", str(root))
        monkeypatch.setattr(doctor, "OWN_GROUPS", str(root / "own"))
        ram = doctor.host_ram()
        assert ram["limit_bytes"] == 2 * GIB
        assert ram["available_bytes"] == 3 * GIB // 2
    result = run("plan.toml", "--device", "cpu")
    assert result.exit_code == 3
    assert "needs 3.1 GiB of host RAM, but this machine gives 2.0 GiB (the limit of this" in result.stderr


def test_disk_for_checkpoints(tmp_path: Path) -> None:
    result = run("plan.toml", "--device", "cpu", "--keep-checkpoints", "100000", "--output", str(tmp_path / "a" / "b"))
    assert result.exit_code == 3
    assert "100001 checkpoints" in result.stderr and "are free at" in result.stderr
    assert not (tmp_path / "a").exists()


def test_what_a_tiny_model_writes_is_not_told_as_nothing(tmp_path: Path) -> None:
    found, _ = estimated(plan(), must=True)
    assert found is not None
    (check,) = on_disk(tmp_path, found.replace(disk_bytes=150_000), 2, 0)
    assert check.what.startswith("0.45 MB needed (3 checkpoints of 0.15 MB)")


def test_lora_files_of_all_checkpoints_are_warned_of_where_they_may_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stay, whatever is kept to resume from."""
    found, _ = estimated(plan(), must=True)
    assert found is not None
    free = shutil.disk_usage(tmp_path)._replace(free=10_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    of_a_checkpoint = found.replace(disk_bytes=1_000_000)
    (enough,) = on_disk(tmp_path, of_a_checkpoint, 2, 0, 7)
    assert enough.level == "ok"
    (short,) = on_disk(tmp_path, of_a_checkpoint, 2, 0, 8)
    assert short.level == "warning" and short.what.startswith("LoRA files of 8 checkpoints take up to 8.00 MB; 7.00 MB")


def test_pinned_memory_is_a_note() -> None:
    swapped = ready(plan({"gradient_checkpointing": "offload", "swap_blocks": 10}))
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (MIB, hard))
    try:
        report = preflight(swapped, PreflightOptions(device="cpu"))
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
    (check,) = [check for check in report.checks if check.name == "pinned RAM"]
    assert check.level == "note" and "ulimit -l unlimited" in check.fix


# ---- what was measured


def proof(device_bytes: int, **env: str) -> Evidence:
    said = {"gpu": RTX["Name"], "driver": "570.86.10", "torch": doctor.package_version("torch") or "0"}
    said |= {"diffusers": doctor.package_version("diffusers") or "0", "attention_kernel": "flash", "command": "x"}
    seen = Measured(outcome="ok", device_bytes=device_bytes)
    return Evidence(id="row", measured=seen, env=Environment(**{**said, "time": "now", **env}))


def test_what_was_measured_here_counts_for_more_than_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch, [held(16 * GIB)])  # 7.6 GiB are free, and the estimate says 11
    write_plan(plan(evidence=(proof(7 * GIB),)), "plan.toml")
    answer = json.loads(run("plan.toml", "--json").stdout)
    assert (answer["verdict"], answer["need"]["basis"]) == ("go", "measured")
    assert levels(answer)["versions"] == "ok"
    for env in ({"torch": "1.0"}, {"gpu": "NVIDIA H100 80GB HBM3"}):
        write_plan(plan(evidence=(proof(7 * GIB, **env),)), "plan.toml")
        result = run("plan.toml", "--json")
        assert result.exit_code == 3
        answer = json.loads(result.stdout)
        assert answer["need"]["basis"] == "recorded" and levels(answer)["versions"] == "warning"


def test_what_was_rehearsed_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch, [RTX])
    write_plan(plan(evidence=(proof(7 * GIB, gpu=f"virtual {RTX['Name']}", driver="virtual"),)), "plan.toml")
    answer = json.loads(run("plan.toml", "--json").stdout)
    assert (answer["verdict"], answer["need"]["basis"]) == ("go", "recorded")
    (versions,) = [check for check in answer["checks"] if check["name"] == "versions"]
    assert versions["level"] == "note" and "proved in rehearsal with torch" in versions["message"]


def test_inside_a_rehearsal_memory_is_no_reason_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch, [held(16 * GIB)])
    assert run("plan.toml").exit_code == 3
    monkeypatch.setenv("VPLAN_GPU_FOLDER", "/nowhere")
    answer = json.loads(run("plan.toml", "--json").stdout)
    assert answer["verdict"] == "go" and "error" not in levels(answer).values()
    unrecorded = plan()
    write_plan(unrecorded.replace(job=unrecorded.job.replace(text_tokens=777)), "plan.toml")
    answer = json.loads(run("plan.toml", "--json").stdout)
    assert answer["verdict"] == "go" and levels(answer)["plan"] == "warning"


def test_the_estimate_is_of_the_torch_that_is_installed(computer: Computer) -> None:
    needs = []
    computer.has_cards(H100)
    for installed in ("2.13.0", "2.11.0"):
        computer.has_packages(torch=installed)
        write_plan(plan({"gradient_checkpointing": "none"}), "plan.toml")
        needs.append(json.loads(run("plan.toml", "--json").stdout)["estimate"]["peak"]["device_bytes"])
    assert needs[1] < 0.95 * needs[0]


def test_what_ran_out_of_memory_here_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ready(plan())
    row = ProbeRow(
        id=row_id(asked),
        job=asked.job,
        strategy=asked.strategy,
        machine=asked.machine.replace(gpu="rtx-4090"),
        measured=Measured(outcome="oom", phase="train"),
        env=proof(1).env,
    )
    Ledger(default_path()).append(row)
    Driver(monkeypatch, [H100])  # which has room enough
    result = run("plan.toml", "--json")
    assert result.exit_code == 3 and levels(json.loads(result.stdout))["plan"] == "error"


COUNTED = {"allocated_bytes": None, "reserved_bytes": None, "device_bytes": 12 * GIB, "retries": 0}


@pytest.mark.parametrize(
    ("reported", "code", "told"),
    [
        ({"outcome": "ok", "phases": {"step": COUNTED}}, 0, "12.0 GiB of a GPU"),
        ({"outcome": "ok", "phases": {"step": {**COUNTED, "device_bytes": 30 * GIB}}}, 3, "are free"),
        ({"outcome": "ok", "phases": {"first_step": {**COUNTED, "retries": 2}}}, 3, "at the limit"),
        ({"outcome": "oom", "phase": "step"}, 3, "ran out of GPU memory in train"),
        ({"outcome": "host-oom"}, 3, "ran out of host memory"),
        ({"outcome": "nan"}, 4, "ended with nan"),
        ({}, 4, "ended with crash"),
    ],
)
def test_a_probe_has_the_last_word(
    monkeypatch: pytest.MonkeyPatch, worker: Callable[[str], None], reported: dict[str, Any], code: int, told: str
) -> None:
    Driver(monkeypatch, [RTX])
    worker(f"tell(**{ ({'step_seconds': [1.0], **reported}) })")
    result = run("plan.toml", "--probe")
    assert result.exit_code == code
    assert told in result.output


@pytest.mark.parametrize(
    ("strategy", "parts"),
    [
        ({"gradient_checkpointing": "full"}, ["encode", "step"]),
        ({"gradient_checkpointing": "partial", "checkpointed_blocks": 15}, ["step"]),
    ],
)
def test_a_probe_encodes_where_encoding_needs_most(
    monkeypatch: pytest.MonkeyPatch,
    worker: Callable[[str], None],
    tmp_path: Path,
    strategy: dict[str, Any],
    parts: list[str],
) -> None:
    Driver(monkeypatch, [RTX])
    write_plan(plan(strategy), "plan.toml")
    worker(
        "request = json.loads((folder / 'request.json').read_text())\n"
        f"with open({str(tmp_path / 'parts')!r}, 'a') as file: print(request.get('part', 'step'), file=file)\n"
        f"tell(outcome='ok', phases={{'step': {COUNTED}}}, step_seconds=[1.0])"
    )
    assert run("plan.toml", "--probe").exit_code == 0
    assert (tmp_path / "parts").read_text().split() == parts


# ---- plans that are none


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("schema = 1", "schema = 7"), "has schema 7"),
        (("frames = 17", "frames = 16"), "frames 16"),
        (("frames = 17", 'frames = "many"'), "frames 'many'"),
        (("wan2.1-t2v-1.3b", "wan9"), "wan9"),
        (("[job]", "[job"), "is not TOML"),
        (("24GB", "-3GB"), "-3GB"),
    ],
)
def test_a_plan_edited_into_nonsense(change: tuple[str, str], told: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(path.read_text().replace(*change))
    result = run("plan.toml", "--device", "cpu", "--json")
    assert result.exit_code == 1
    assert told in json.loads(result.stdout)["error"]["message"]


def test_another_trainers_plan_is_held_against_the_machine_too(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch, [H100])
    write_plan(plan(trainer="diffsynth"), "plan.toml")
    result = run("--plan", "plan.toml")
    assert result.exit_code == 0, result.output
    assert ready(read_plan("plan.toml")).trainer == "diffsynth"
    assert run().exit_code == 2
    assert run("missing.toml").exit_code == 1


@pytest.mark.skipif(not doctor.gpus()[0]["error"], reason="a login node has no GPU")
def test_a_login_node_checks_what_it_can_and_the_job_the_rest(tmp_path: Path) -> None:
    """`vplan preflight plan.toml && sbatch job.sh`, with a scheduler that runs the script at once."""
    (tmp_path / "sbatch").write_text(
        f"#!/bin/bash\nPATH={tmp_path}:$PATH SLURM_JOB_ID=7 SLURM_CPUS_PER_TASK=4 exec bash $1\n"
    )
    (tmp_path / "srun").write_text('#!/bin/bash\nexec "$@"\n')
    (tmp_path / "vplan").write_text(f'#!/bin/bash\nexec {shlex.join(vplan.command())} "$@"\n')
    for name in ("sbatch", "srun", "vplan"):
        (tmp_path / name).chmod(0o755)
    (tmp_path / "clips").mkdir()
    (tmp_path / "model").mkdir()
    write_plan(plan(), tmp_path / "plan.toml")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "CUDA_"))}

    def shell(line: str, path: str) -> subprocess.CompletedProcess[str]:
        said = {**environment, "PATH": path}
        done = ["bash", "-c", line]
        return subprocess.run(done, cwd=tmp_path, env=said, capture_output=True, text=True, check=False, timeout=300)

    with_scheduler = f"{tmp_path}:{os.environ['PATH']}"
    made = shell("vplan train plan.toml --data clips --output run --weights model --slurm job.sh", with_scheduler)
    assert made.returncode == 0, made.stderr
    done = shell("vplan preflight plan.toml && sbatch job.sh", with_scheduler)
    assert "it can be submitted" in done.stdout and "GPU: no GPU is asked for on a login node" in done.stdout
    assert "host RAM:" not in done.stdout  # the node's own says nothing of the job's
    assert done.returncode == 1 and "training needs a GPU" in done.stderr  # the job's own pre-flight
    assert not (tmp_path / "run" / "cache").exists()
    asked = shell("vplan preflight plan.toml --json", with_scheduler)
    assert json.loads(asked.stdout)["login_node"] is True
    # A plan that fits no such card is not submitted, and a broken driver on a training machine is no login node.
    small = plan().replace(machine=Machine(gpu="8GB"), job=plan().job.replace(model="wan2.1-t2v-14b"))
    write_plan(small, tmp_path / "large.toml")
    refused = shell("vplan preflight large.toml && sbatch job.sh", with_scheduler)
    assert refused.returncode == 3 and "training needs a GPU" not in refused.stderr
    here = f"{tmp_path / 'alone'}:{os.environ['PATH']}"
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "vplan").write_text((tmp_path / "vplan").read_text())
    (tmp_path / "alone" / "vplan").chmod(0o755)
    alone = shell("vplan preflight plan.toml", here)
    assert alone.returncode == 1 and "--login-node" in alone.stderr
    assert shell("vplan preflight plan.toml --login-node", here).returncode == 0
    assert "has no GPU to probe on" in shell("vplan preflight plan.toml --login-node --probe", here).stderr
