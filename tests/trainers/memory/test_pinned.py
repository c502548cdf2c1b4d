"""Host RAM that CUDA refuses to pin."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from planner.errors import VplanError  # noqa: E402
from trainers.memory.out_of_memory import out_of_memory  # noqa: E402
from trainers.memory.pinned import pinned_tensor  # noqa: E402

MEMORY_ALLOCATION, NOT_SUPPORTED = 2, 801
"""cudaErrorMemoryAllocation and cudaErrorNotSupported."""


def refuse(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    runtime = SimpleNamespace(cudaHostRegister=lambda address, nbytes, flags: code)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)


def test_too_little_host_ram_to_pin_is_the_host_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training steps down to a smaller plan then, and a probe measures ``host-oom``."""
    refuse(monkeypatch, MEMORY_ALLOCATION)
    with pytest.raises(MemoryError, match=r"could not pin 1\.0 GiB of host RAM") as raised:
        pinned_tensor(2**30, pinned=True)
    assert out_of_memory(raised.value) == "host-oom"


def test_another_error_of_cuda_is_refused_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, NOT_SUPPORTED)
    with pytest.raises(VplanError, match=r"error 801") as raised:
        pinned_tensor(4096, pinned=True)
    assert "ulimit -l" in raised.value.fix
