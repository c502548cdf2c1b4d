"""trainers/recording/constant_values.py: what depends on numbers is answered for constants, as by real tensors, and for
no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from trainers.recording.constant_values import Uniform
from trainers.recording.recorder import Recorder


class Following(TorchDispatchMode):
    """Fake tensors with their constants followed."""

    def __init__(self) -> None:
        super().__init__()
        self.uniform = Uniform()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = f"{func.namespace}.{func.overloadpacket.__name__}"
        return self.uniform.call(func, name, args, kwargs or {})


def full_mask() -> torch.Tensor:
    return torch.ones(2, 5, dtype=torch.long).bool()[0]


def empty_mask() -> torch.Tensor:
    return ~full_mask()


ROWS = {
    "a full mask picks all": lambda: torch.randn(5, 3)[full_mask()],
    "an empty mask picks none": lambda: torch.randn(5, 3)[empty_mask()],
    "zeros as a mask pick none": lambda: torch.randn(5, 3)[torch.zeros(5).bool()],
    "rows of a full mask": lambda: torch.nonzero(full_mask()),
    "rows of an empty mask": lambda: torch.nonzero(empty_mask()),
    "a branch on zeros": lambda: torch.randn(1 if torch.all(torch.zeros(4, 2) == 0) else 2),
    "a branch on ones": lambda: torch.randn(1 if torch.all(torch.ones(4, 2) == 0) else 2),
    "a full mask of two dimensions": lambda: torch.randn(2, 5, 3)[torch.ones(2, 5).bool()],
    "a number": lambda: torch.randn(int(torch.ones(1, dtype=torch.long).item()) + 3),
}


@pytest.mark.parametrize("name", list(ROWS))
def test_the_size_is_that_of_real_tensors(name: str) -> None:
    with FakeTensorMode(), Following():
        found = ROWS[name]()
    assert found.shape == ROWS[name]().shape


def test_gradients_go_through_a_mask() -> None:
    with FakeTensorMode(), Following():
        leaf = torch.randn(5, 3, requires_grad=True)
        torch.cat([leaf[full_mask()], leaf[empty_mask()]]).sum().backward()
        assert leaf.grad is not None and leaf.grad.shape == leaf.shape


@pytest.mark.parametrize("write", [torch.Tensor.zero_, torch.Tensor.logical_not_, lambda mask: mask[:2].fill_(False)])
def test_what_was_written_to_is_not_known_any_more(write: Any) -> None:
    with FakeTensorMode(), Following(), pytest.raises(DynamicOutputShapeException):
        mask = torch.ones(5).bool()
        write(mask)
        torch.nonzero(mask)


def test_numbers_nobody_knows_are_not_guessed() -> None:
    with FakeTensorMode(), Following(), pytest.raises(DynamicOutputShapeException):
        torch.nonzero(torch.randn(5) > 0)


@pytest.mark.parametrize("adds_masks_up, tokens", [(True, 5), (False, 1)])
def test_a_mask_says_how_many_tokens_it_leaves(adds_masks_up: bool, tokens: int) -> None:
    with FakeTensorMode(), Recorder() as recorder:
        recorder.adds_masks_up = adds_masks_up
        counts = torch.ones(2, 5, dtype=torch.long).sum(dim=1).tolist()
    assert counts == [tokens, tokens]
