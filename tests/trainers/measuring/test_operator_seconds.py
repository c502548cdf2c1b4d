"""The seconds of a step's operators: what the profiler's events come to. It sees kernels on a GPU only."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from trainers.measuring.operator_seconds import _facts, _passes  # noqa: E402


def test_where_no_kernel_is_seen_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    weight = torch.randn(8, 8, requires_grad=True)
    assert _passes(lambda: (weight @ weight).sum().backward(), "forward", "backward") == {}
    assert weight.grad is not None


def test_operators_are_summed_by_name_longest_first() -> None:
    def event(name: str, *microseconds: float) -> SimpleNamespace:
        return SimpleNamespace(name=name, kernels=[SimpleNamespace(duration=each) for each in microseconds])

    found = _facts(
        [event("aten::add", 2.0), event("aten::mm", 1.0, 600.0), event("aten::mm", 400.0), event("tiny", 0.1)]
    )
    assert found["kernels"] == 5
    assert list(found["operators"].items()) == [("aten::mm", [2, 0.001001]), ("aten::add", [1, 2e-06])]
    assert found["seconds"] == pytest.approx(0.0010031)
