"""The worker's own parts that need no GPU: which error is which, weights, and the history's form."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from planner.errors import VplanError  # noqa: E402
from trainers import measure  # noqa: E402
from trainers.measure import Wanted, out_of_memory, randomise  # noqa: E402
from trainers.meter import Meter  # noqa: E402


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "oom"),
        (RuntimeError("CUDA error: out of memory"), "oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "host-oom"),
        (MemoryError(), "host-oom"),
        (RuntimeError("CUDA error: device-side assert triggered"), None),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
    ],
)
def test_which_errors_mean_out_of_memory(error: BaseException, outcome: str | None) -> None:
    assert out_of_memory(error) == outcome


def test_pinned_memory_is_host_memory() -> None:
    """CUDA says the same for both; save_on_cpu's hook is where activations are pinned."""

    def pack_to_cpu(_: Any) -> None:
        raise RuntimeError("CUDA error: out of memory")

    with pytest.raises(RuntimeError) as raised:
        pack_to_cpu(None)
    assert out_of_memory(raised.value) == "host-oom"


def test_an_oom_in_a_step_is_told_with_its_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    def optimizer_step() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB.")

    def run(wanted: Wanted, meter: Meter) -> None:
        with meter.phase("step"):
            optimizer_step()

    told: dict[str, Any] = {"phases": {}}
    report = SimpleNamespace(told=told, tell=lambda **facts: told.update(facts))
    monkeypatch.setattr(measure, "_run", run)
    measure.measure(SimpleNamespace(device="cpu", history=None), report)
    assert (told["outcome"], told["phase"]) == ("oom", "optimizer")
    assert told["message"] == "CUDA out of memory. Tried to allocate 2.00 GiB."
    assert told["phases"]["step"]["allocated_bytes"] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_weights_are_filled_and_buffers_left(dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.LayerNorm(64))
    buffers = [buffer.clone() for buffer in model.buffers()]
    for parameter in model.parameters():
        parameter.data = torch.full(parameter.shape, float("nan")).to(dtype)
    for name, parameter in model.named_parameters():
        randomise(name, parameter.data)
    assert 0.01 < model[0].weight.float().std() < 0.03
    assert model[0].bias.float().abs().max() == 0
    assert model[2].weight.float().eq(1).all()
    assert all(torch.equal(one, other) for one, other in zip(buffers, model.buffers(), strict=True))


def test_history_is_plain_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    events = [
        {"action": "alloc", "addr": 4096, "size": 512, "stream": 0, "time_us": 10, "frames": []},
        {"action": "free_completed", "addr": 4096, "size": 512, "stream": 0, "time_us": 20},
        {"action": "oom", "device_free": 7, "size": 2**40, "stream": 0, "time_us": 30},
    ]
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [[], events]})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "card")
    wanted: Any = SimpleNamespace(history=str(tmp_path / "h.json"), strategy=SimpleNamespace(expandable_segments=True))
    meter: Any = SimpleNamespace(device=torch.device("cuda", 1), marks=[("load", 5.0), ("train", 15.0)])
    measure._write_history(wanted, meter)
    data = json.loads((tmp_path / "h.json").read_text())
    assert data["columns"] == ["action", "addr", "size", "stream"]
    assert data["events"] == [["alloc", 4096, 512, 0], ["free_completed", 4096, 512, 0], ["oom", 0, 2**40, 0]]
    assert data["phases"] == [["load", 0], ["train", 1]]
    wanted.history = str(tmp_path)
    with pytest.raises(VplanError, match="cannot write"):
        measure._write_history(wanted, meter)
