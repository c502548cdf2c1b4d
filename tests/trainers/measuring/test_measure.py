"""The worker's own parts that need no GPU: which error is which, weights, and the history's form."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from planner.errors import VplanError  # noqa: E402
from planner.evidence.allocator_history import read_history  # noqa: E402
from planner.hardware.memory_trace import trace_of  # noqa: E402
from planner.spec.job import Bucket, Job, Machine, Strategy  # noqa: E402
from planner.spec.plan import Plan  # noqa: E402
from trainers.measuring import measure  # noqa: E402
from trainers.measuring.counters import Meter  # noqa: E402
from trainers.measuring.measure import requested_bytes  # noqa: E402
from trainers.measuring.phases import ProbeRequest  # noqa: E402
from trainers.memory.out_of_memory import out_of_memory  # noqa: E402
from trainers.step.random_weights import randomise  # noqa: E402


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


@pytest.mark.parametrize(
    ("message", "nbytes"),
    [
        ("CUDA out of memory. Tried to allocate 20.50 MiB. GPU 0 has a total capacity of 23.99 GiB", 20.5 * 2**20),
        ("CUDA out of memory. Tried to allocate 512.00 bytes. GPU 0", 512),
        ("CUDA out of memory. Tried to allocate more than 1EB memory.", None),
        ("[enforce] DefaultCPUAllocator: can't allocate memory: you tried to allocate 123456 bytes. Error", 123456),
        ("CUDA error: out of memory", None),
    ],
)
def test_the_request_that_found_no_memory(message: str, nbytes: float | None) -> None:
    assert requested_bytes(message) == nbytes


class Watched:
    """A card on which a context of 500 bytes and nothing else is beside torch's."""

    base_bytes = 0

    def take_peak(self) -> int:
        return 1500


def capped(
    monkeypatch: pytest.MonkeyPatch, capacity: int | None, planned: str = "24GB", reserve: int = 0
) -> tuple[int | None, list[float]]:
    """What a process of a plan for a card of that capacity gets of an H100 that has 10,000 bytes."""
    fractions: list[float] = []
    card = SimpleNamespace(total_memory=10_000, name="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 1000)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _: fractions.append(share))
    meter: Any = Meter(torch.device("cuda", 0), Watched(), SimpleNamespace(facts={}, tell=None))  # type: ignore[arg-type]
    machine = Machine(gpu=planned, reserve=reserve)
    wanted: Any = SimpleNamespace(capacity_bytes=capacity, plan=SimpleNamespace(machine=machine))
    return measure.limit(wanted, meter), fractions


def test_a_larger_card_gives_what_the_plan_s_gives_less_this_process_s_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert capped(monkeypatch, 4000) == (4000, [0.35])
    assert capped(monkeypatch, 300) == (300, [0.0])  # not even the context fits


def test_a_card_no_larger_than_the_plan_s_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert capped(monkeypatch, 10_000) == (None, [])
    assert capped(monkeypatch, None) == (None, [])
    assert capped(monkeypatch, 9_990, "h100-80gb") == (None, [])  # what is listed of a card is not what each one has
    assert capped(monkeypatch, 4000, "h100-80gb", reserve=6000) == (4000, [0.35])


def test_steps_are_of_the_largest_bucket() -> None:
    buckets = (Bucket(frames=81, height=64, width=64), Bucket(frames=5, height=480, width=832, batch_size=3), Bucket(
        frames=5, height=480, width=832
    ))  # fmt: skip
    job = Job(model="wan2.1-t2v-1.3b", frames=5, height=64, width=64, buckets=buckets)
    plan = Plan(job=job, strategy=Strategy(), machine=Machine(gpu="24GB"))
    wanted = ProbeRequest.of(plan, config={}, scratch="x", device="cpu", steps=1)
    assert [(grid["B"], grid["F"], grid["H"]) for grid in wanted.grids] == [(3, 2, 30), (1, 2, 30), (1, 21, 4)]


def test_pinned_memory_is_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA gives one error for both; FSDP2, DeepSpeed and diffusers pin host RAM with ``Tensor.pin_memory``."""

    def fails(_: Any) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.Tensor, "pin_memory", fails)
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1).pin_memory()
    assert out_of_memory(raised.value) == "host-oom"


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
        {
            "action": "alloc",
            "addr": 4096,
            "size": 512,
            "stream": 0,
            "time_us": 10,
            "frames": [
                {"filename": "/venv/lib/torch/nn/functional.py", "line": 1, "name": "linear"},
                {"filename": "/venv/lib/diffusers/models/unet.py", "line": 12, "name": "forward"},
            ],
        },
        {"action": "free_completed", "addr": 4096, "size": 512, "stream": 0, "time_us": 20},
        {"action": "oom", "device_free": 7, "size": 2**40, "stream": 0, "time_us": 30},
    ]
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [[], events]})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "card")
    plan = Plan(job=Job(model="sd1.5", frames=1, height=64, width=64), strategy=Strategy(), machine=Machine(gpu="24GB"))
    wanted: Any = SimpleNamespace(history=str(tmp_path / "h.json"), strategy=plan.strategy, plan=plan)
    meter: Any = SimpleNamespace(device=torch.device("cuda", 1), marks=[("load", 5.0), ("train", 15.0)])
    measure._write_history(wanted, meter)
    data = json.loads((tmp_path / "h.json").read_text())
    assert data["columns"] == ["action", "addr", "size", "stream", "frame"]
    rows = [["alloc", 4096, 512, 0, 0], ["free_completed", 4096, 512, 0, -1], ["oom", 0, 2**40, 0, -1]]
    assert data["events"] == rows
    assert data["phases"] == [["load", 0], ["train", 1]]
    assert data["frames"] == ["unet.py:12 forward"]
    assert read_history(tmp_path / "h.json").plan == plan
    wanted.history = str(tmp_path)
    with pytest.raises(VplanError, match="cannot write"):
        measure._write_history(wanted, meter)


def test_a_phase_keeps_how_the_card_s_memory_went() -> None:
    class Card:
        """A card whose use NVML saw go up and down."""

        def take(self) -> dict[str, int | None]:
            return {"device_bytes": 3 * 2**20}

        def take_trace(self) -> list[int]:
            return [1, 3, 2]

    told: dict[str, Any] = {"phases": {}}
    report = SimpleNamespace(facts=told, tell=lambda **facts: told.update(facts))
    with Meter(torch.device("cpu"), Card(), report).phase("train"):  # type: ignore[arg-type]
        pass
    found = trace_of({"id": "a", "details": told})
    assert found is not None and found.phases["train"].device_mib == (1, 3, 2)
    assert found.phases["train"].allocated_mib is None and found.phases["train"].seconds < 60
