"""A call that is made again returns what the fake mode, and a real tensor, return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from trainers.recording import repeated_calls
from trainers.recording.repeated_calls import RepeatedCalls

aten = torch.ops.aten

CALLS: dict[str, Callable[[Tensor], Any]] = {
    "one of its own": lambda x: aten.mul.Tensor(x, 2),
    "another format": lambda x: aten._to_copy.default(x, dtype=torch.bfloat16),
    "a view": lambda x: aten.transpose.int(x, 0, 1),
    "a view behind its start": lambda x: aten.slice.Tensor(x, 0, 2),
    "several views": lambda x: aten.split.Tensor(x, 2, 1),
    "several of its own": lambda x: aten.var_mean.correction(x, [1]),
    "itself": lambda x: aten.add_.Tensor(x, 1),
    "itself under a name": lambda x: aten.mul.out(x, 3, out=x),
    "a list of tensors": lambda x: aten.cat.default([x, x], 1),
    "complex numbers": lambda x: aten.mul.Tensor(aten._to_copy.default(x, dtype=torch.complex64), 1j),
    "a number that is whole": lambda x: aten.pow.Tensor_Scalar(aten._to_copy.default(x, dtype=torch.long), 2),
    "a number that is not": lambda x: aten.mul.Tensor(aten._to_copy.default(x, dtype=torch.long), 2.0),
}


class Repeating(TorchDispatchMode):
    """Sends every operator through one memory of calls."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = RepeatedCalls()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.calls.call(func, args, kwargs or {})


def facts(given: Tensor, out: Any) -> Any:
    """What a recording reads of a result: sizes, format, and whose storage it has."""
    if isinstance(out, list | tuple):
        return [type(out), *(facts(given, each) for each in out)]
    storage = out.untyped_storage()
    shares = storage._cdata == given.untyped_storage()._cdata
    return out is given, shares, out.shape, out.stride(), out.storage_offset(), out.dtype, out.device, storage.nbytes()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_returns_the_same_the_second_time(call: Callable[[Tensor], Any]) -> None:
    real = torch.ones(4, 6)
    with FakeTensorMode():
        alone = torch.ones(4, 6)
        plain = facts(alone, call(alone))
        with Repeating() as repeating:
            first, second = torch.ones(4, 6), torch.ones(4, 6)
            told = [facts(each, call(each)) for each in (first, second, second)]
    assert any(repeating.calls._results.values())
    assert told == [plain] * 3 == [facts(real, call(real))] * 3


def test_results_are_tensors_of_their_own() -> None:
    with FakeTensorMode(), Repeating():
        given = torch.ones(4)
        one, two = aten.mul.Tensor(given, 2), aten.mul.Tensor(given, 2)
    assert one is not two and one.untyped_storage()._cdata != two.untyped_storage()._cdata


def test_gradients_go_through_a_call_that_is_made_again() -> None:
    with FakeTensorMode(), Repeating():
        for _ in range(2):
            weight = torch.ones(3, 4, requires_grad=True)
            (torch.ones(2, 4) @ weight.t()).relu().view(6).sum().backward()
            assert weight.grad is not None and weight.grad.shape == (3, 4)


def test_what_depends_on_numbers_is_asked_each_time() -> None:
    with FakeTensorMode(), Repeating():
        for _ in range(2):
            with pytest.raises(DynamicOutputShapeException):
                torch.nonzero(torch.ones(3))


def test_calls_that_differ_by_a_number_s_kind_differ() -> None:
    with FakeTensorMode(), Repeating():
        whole = torch.ones(3, dtype=torch.long)
        kinds = [aten.mul.Tensor(whole, factor).dtype for factor in (2, 2.0, True, 2, 2.0)]
    assert kinds == [torch.long, torch.float32, torch.long, torch.long, torch.float32]


def test_no_more_are_kept_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated_calls, "MOST", 3)
    with FakeTensorMode(), Repeating() as repeating:
        for size in range(1, 20):
            assert aten.neg.default(torch.ones(size)).shape == (size,)
            assert len(repeating.calls._results) <= 3
