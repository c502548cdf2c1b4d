"""How the worker that encodes says that it ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from diffusers import AutoencoderKLWan  # noqa: E402

from planner.dataset.sources import DataSource  # noqa: E402
from planner.launch.launch import OUT_OF_MEMORY, Preparation, outcome, write_request  # noqa: E402
from planner.spec.job import Job, Machine, Strategy  # noqa: E402
from planner.spec.plan import Plan  # noqa: E402
from planner.worker_process import Ended  # noqa: E402
from tests.trainers import runs, tiny  # noqa: E402
from trainers import prepare  # noqa: E402

CUDA = "CUDA out of memory. Tried to allocate 1.00 GiB."
HOST = "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: 9 bytes"


@pytest.fixture
def request_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A request to encode three clips with the encoders of a tiny model."""
    monkeypatch.setenv("VPLAN_HOME", str(tmp_path / "home"))
    model = tiny.folder(tmp_path / "model", tiny.profile("wan2.1-t2v-1.3b"))
    job = Job(model=runs.make_model(model, "wan"), frames=9, height=48, width=64)
    strategy = Strategy.read({"text_encoder_dtype": "fp32", "vae_dtype": "fp32"})
    clips = tiny.write_clips(tmp_path / "clips")
    request = Preparation(
        plan=Plan(job=job, strategy=strategy, machine=Machine(gpu="24GB")),
        data=str(clips),
        sources=(DataSource(folder=str(clips), fps=16.0),),
        weights=str(model),
        entries=str(tmp_path / "cache" / "entries.jsonl"),
        device="cpu",
    )
    return write_request(tmp_path / "prepare", request)


def fail_with(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets diffusers' VAE fail, as CUDA and the host's allocator make it fail."""

    def encode(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(AutoencoderKLWan, "encode", encode)


def test_what_is_encoded_is_listed(request_folder: Path) -> None:
    assert prepare.main([str(request_folder)]) == 0
    assert json.loads((request_folder / "result-00000.json").read_text())["outcome"] == "ok"
    assert len((request_folder.parent / "cache" / "entries.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("error", "name"),
    [(torch.OutOfMemoryError(CUDA), "oom"), (RuntimeError(HOST), "host-oom"), (MemoryError("no more"), "host-oom")],
)
def test_memory_that_runs_out_is_said_as_that(
    request_folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, name: str
) -> None:
    fail_with(error, monkeypatch)
    assert prepare.main([str(request_folder)]) == OUT_OF_MEMORY
    assert json.loads((request_folder / "result-00000.json").read_text())["outcome"] == name
    ended = outcome(request_folder, Ended(returncode=OUT_OF_MEMORY))
    assert (ended.name, ended.message, ended.exit_code) == (name, str(error), 3)


def test_another_error_is_not_taken_for_it(request_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), monkeypatch)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        prepare.main([str(request_folder)])
