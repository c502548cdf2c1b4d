"""How the worker that encodes says that it ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from planner.launch.launch import OUT_OF_MEMORY, Preparation, outcome, write_request  # noqa: E402
from planner.spec.job import Job, Machine, Strategy  # noqa: E402
from planner.spec.plan import Plan  # noqa: E402
from planner.worker_process import Ended  # noqa: E402
from trainers import prepare  # noqa: E402

CUDA = "CUDA out of memory. Tried to allocate 1.00 GiB."
HOST = "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: 9 bytes"


def request(root: Path) -> Preparation:
    job = Job(model="wan2.1-t2v-1.3b", frames=5, height=32, width=32)
    plan = Plan(job=job, strategy=Strategy(), machine=Machine(gpu="24GB"))
    entries = str(root / "cache" / "entries.jsonl")
    return Preparation(plan=plan, data=str(root), weights=str(root), entries=entries, device="cpu")


@pytest.mark.parametrize(
    ("error", "name"),
    [(torch.OutOfMemoryError(CUDA), "oom"), (RuntimeError(HOST), "host-oom"), (MemoryError("no more"), "host-oom")],
)
def test_memory_that_runs_out_is_said_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, name: str
) -> None:
    def full(*_: Any) -> None:
        raise error

    folder = write_request(tmp_path / "prepare", request(tmp_path))
    monkeypatch.setattr(prepare, "prepare", full)
    assert prepare.main([str(folder)]) == OUT_OF_MEMORY
    assert json.loads((folder / "result-00000.json").read_text())["outcome"] == name
    ended = outcome(folder, Ended(returncode=OUT_OF_MEMORY))
    assert (ended.name, ended.message, ended.exit_code) == (name, str(error), 3)


def test_another_error_is_not_taken_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(prepare, "prepare", broken)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        prepare.main([str(write_request(tmp_path / "prepare", request(tmp_path)))])
