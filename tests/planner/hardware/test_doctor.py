"""`vplan doctor` on machines we do not have: NVML is replaced by one that answers as real cards and drivers do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import vplan
from planner.hardware import doctor
from planner.hardware.diagnoses import LEAST, Finding, findings
from planner.units import GIB, MIB
from tests.planner.drivers import H100, Driver

KEYS = [
    "vplan",
    "system",
    "host_ram",
    "disks",
    "driver",
    "gpus",
    "packages",
    "torch_build",
    "expandable_segments",
    "environment",
    "tapes",
    "findings",
]


def printed(*words: str, **environment: str) -> str:
    done = subprocess.run(
        vplan.command("doctor", *words), env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_json_has_its_keys_on_any_machine() -> None:
    answer = json.loads(printed("--json"))
    assert list(answer) == ["schema", *KEYS]
    assert answer["host_ram"]["total_bytes"] >= answer["host_ram"]["available_bytes"] > 0
    assert answer["packages"]["torch"] and answer["tapes"]["recorded_with"]["torch"]
    assert all(list(finding) == ["level", "what", "fix"] for finding in answer["findings"])


def test_nothing_personal_and_no_secret_is_printed(tmp_path: Path) -> None:
    """Whatever the shell holds: a name, a path or a token must not get into a bug report."""
    secrets = {"HF_TOKEN": "hf_secret1", "HOME": "/home/alicesecret", "USER": "alicesecret", "HOSTNAME": "hostsecret"}
    mine = str(tmp_path / "alicesecret")
    for words in ((), ("--json",)):
        page = printed(*words, **secrets, VPLAN_HOME=mine, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
        assert "secret" not in page
        assert str(Path.cwd()) not in page and os.uname().nodename not in page.split()
        assert "expandable_segments:True" in page


def test_torch_is_not_imported() -> None:
    source = "import sys, vplan; vplan.main(['doctor']); print('HEAVY', *{'torch', 'diffusers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", source], cwd=vplan.HOME, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY"


# ---- cards


EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
NEW = dict.fromkeys(doctor.PACKAGES, "99.0")


def look(monkeypatch: pytest.MonkeyPatch, *cards: dict[str, Any], cuda: int = 12080, **changed: Any) -> list[Finding]:
    """What is found on a healthy training machine with these cards, but for what `changed` says of the facts."""
    Driver(monkeypatch, list(cards), cuda)
    for name in doctor.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    driver, cards = doctor.gpus()
    facts = {
        "system": doctor.system(),
        "driver": driver,
        "gpus": cards,
        "tapes": {"differs": [], "recorded_with": {}, "own_models": 0},  # to read them would take a second
        "torch_build": {"for": "cuda", "cuda": "12.8"},
        "environment": EXPANDABLE,
        "packages": NEW,
        "expandable_segments": True,
        "host_ram": {"total_bytes": 2**42, "available_bytes": 2**41, "limit_bytes": None},
        "disks": {"working": {"free_bytes": 10**12}, "shared": {"total_bytes": 2**34}},
        **changed,
    }
    return findings(facts)


def test_a_healthy_machine_has_no_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert look(monkeypatch, H100, H100) == []


def test_a_card_is_told_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = [SimpleNamespace(pid=os.getpid(), usedGpuMemory=GIB), SimpleNamespace(pid=2**22 + 1, usedGpuMemory=None)]
    Driver(monkeypatch, [{**H100, "ComputeRunningProcesses": busy}])
    driver, (card,) = doctor.gpus()
    assert driver == {"version": "570.86.10", "cuda": "12.8", "error": None}
    processes = card.pop("processes")
    assert [process["used_bytes"] for process in processes] == [GIB, None]
    assert processes[0]["name"] and processes[1]["name"] is None
    assert card == {
        "index": 0,
        "name": "NVIDIA H100 80GB HBM3",
        "known_as": "h100-80gb",
        "compute_capability": "9.0",
        "total_bytes": 81_559 * MIB,
        "reserved_bytes": 560 * MIB,
        "used_bytes": 2 * MIB,
        "free_bytes": 80_997 * MIB,
        "ecc": True,
        "mig": False,
        "power_limit_watts": 700.0,
    }


def test_what_a_card_does_not_tell_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GB10 shares its memory with the CPU and answers NOT_SUPPORTED; an old driver knows version 1 only."""
    memory = {"total": 16_380 * MIB, "used": 300 * MIB, "free": 16_080 * MIB}
    old = {"Name": b"NVIDIA GeForce RTX 4060 Ti", "v1": memory}
    Driver(monkeypatch, [{"Name": "NVIDIA GB10"}, old, {}])
    _, cards = doctor.gpus()
    assert (cards[0]["known_as"], cards[0]["total_bytes"], cards[0]["ecc"]) == ("gb10", None, None)
    assert (cards[1]["known_as"], cards[1]["reserved_bytes"]) == ("rtx4060ti-16gb", None)
    assert cards[2]["name"] is None
    assert [finding.what for finding in look(monkeypatch, {"Name": "NVIDIA GB10"}, old, {})] == [
        "GPU 2 does not respond"
    ]


RTX = {
    "Name": "NVIDIA RTX A6000",
    "CudaComputeCapability": (8, 6),
    "EccMode": (1, 1),
    "v2": {"total": 49_140 * MIB, "reserved": 600 * MIB, "used": 2 * GIB, "free": 46 * GIB},
}


@pytest.mark.parametrize(
    ("card", "changed", "level", "what", "fix"),
    [
        (None, {}, "error", "shows no GPU", "nvidia-smi -L"),
        (H100, {"torch_build": {"for": "cpu", "cuda": None}}, "error", "torch was built for cpu", "--index-url"),
        (H100, {"torch_build": {"for": "cuda", "cuda": "13.0"}}, "error", "this driver supports up to 12.8", "update"),
        (H100, {"environment": {**EXPANDABLE, "CUDA_VISIBLE_DEVICES": ""}}, "error", "hides all GPUs", "unset"),
        (H100, {"environment": {}}, "warning", "expandable segments are off", "export PYTORCH_CUDA_ALLOC_CONF=exp"),
        (
            H100,
            {"environment": {"PYTORCH_ALLOC_CONF": "max_split_size_mb:128"}},
            "warning",
            "expandable segments are off",
            "export PYTORCH_ALLOC_CONF=max_split_size_mb:128,expandable_segments:True",
        ),
        (
            H100,
            {"packages": {**NEW, "torch": "2.9.1+cu128"}},  # which does not read the new name
            "warning",
            "expandable segments are off",
            "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        ),
        (
            H100,
            {"environment": {**EXPANDABLE, "PYTORCH_CUDA_ALLOC_CONF": "x:1"}},
            "warning",
            "both allocator variables",
            "unset",
        ),
        (H100, {"expandable_segments": False}, "note", "no expandable segments", "--no-expandable-segments"),
        (RTX, {}, "warning", "2.0 GiB are already in use", "--reserve 2.0GiB"),
        ({**H100, "MigMode": (1, 1)}, {}, "note", "MIG slices", "--gpu 79.1GiB"),
        ({**H100, "Name": "NVIDIA X1"}, {}, "note", "this card is not known", "--gpu 79.10GiB"),
        ({**H100, "CudaComputeCapability": (7, 5)}, {}, "warning", "bf16 is emulated", "--compute-dtype fp16"),
        (
            H100,
            {"host_ram": {"total_bytes": 64 * GIB, "available_bytes": GIB, "limit_bytes": None}},
            "note",
            "64.0 GiB of host RAM; plans assume 128.0 GiB",
            "--host-ram 64GiB",
        ),
        (
            H100,
            {"host_ram": {"total_bytes": 256 * GIB, "available_bytes": GIB, "limit_bytes": 200 * GIB}},
            "note",
            "may use 200.0 GiB of the 256.0 GiB",
            "--host-ram 200GiB",
        ),
        (H100, {"disks": {"working": {"free_bytes": 10**9}}}, "warning", "1.0 GB are free", "train where"),
        (H100, {"disks": {"data": {"free_bytes": 10**6}}}, "warning", "1 MB are free", "VPLAN_HOME"),
        (
            H100,
            {"disks": {"shared": {"total_bytes": 64 * MIB}}, "system": {"container": True, "os": "Linux"}},
            "warning",
            "/dev/shm has 64 MiB",
            "--shm-size",
        ),
        (
            H100,
            {"tapes": {"differs": ["torch"], "recorded_with": {"torch": ["2.13.0"]}, "own_models": 0}},
            "note",
            "(recorded: 2.13.0)",
            "vplan record --check",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_fix(
    monkeypatch: pytest.MonkeyPatch,
    card: dict[str, Any] | None,
    changed: dict[str, Any],
    level: str,
    what: str,
    fix: str,
) -> None:
    found = look(monkeypatch, *([card] if card else []), **changed)
    assert [one for one in found if one.level == level and what in one.what and fix in one.fix], found
    assert len(found) == 1


def test_packages_that_are_missing_or_old(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = dict.fromkeys(doctor.PACKAGES)
    (missing, *notes) = look(monkeypatch, H100, packages=packages, torch_build=None)
    assert (missing.level, missing.fix) == ("error", "pip install 'vplan[train]'")
    assert "torch, diffusers" in missing.what
    assert [note.what.split()[0] for note in notes] == ["deepspeed", "optuna"]
    old = NEW | {"torch": "2.7.1+cu126"}
    finding, segments = look(monkeypatch, H100, packages=old)
    assert segments.what.startswith("expandable segments are off")  # 2.7 knows the old name of the variable alone
    assert finding.what.startswith("torch 2.7.1+cu126 is older")


def test_the_least_versions_are_those_of_pyproject() -> None:
    project = tomllib.loads((Path(vplan.HOME) / "pyproject.toml").read_text())["project"]
    wanted = dict(entry.split(">=") for entry in project["optional-dependencies"]["train"] if ";" not in entry)
    assert {name: wanted[name] for name in LEAST} == LEAST


def test_the_worst_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = [finding.level for finding in look(monkeypatch, RTX, {}, environment={"CUDA_VISIBLE_DEVICES": "-1"})]
    assert levels == sorted(levels, key=("error", "warning", "note").index)
    assert levels[0] == "error"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("GPU-1a2b", ["L4"]),
        ("GPU-1a9f0c7e,0", ["A10G", "L4"]),
        ("GPU-1a", []),  # of two cards
        ("GPU-ff", []),
        ("1a2b", []),
        ("MIG-1a2b", []),  # slices are named in full
    ],
)
def test_a_card_is_named_by_the_beginning_of_its_uuid(
    said: str, shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Driver(monkeypatch, [{"Name": "L4", "UUID": "GPU-1a2b77"}, {"Name": "A10G", "UUID": b"GPU-1a9f0c7e"}])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", said)
    assert [card["name"] for card in doctor.visible()[1]] == shown
