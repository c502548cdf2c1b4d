"""Which module is at work: asked from inside of a real forward, a recompute and a backward."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.utils.checkpoint import checkpoint

from trainers.observer.working_module import working_moment


class Asking(torch.nn.Linear):  # type: ignore[misc]
    """Asks in each of its forwards."""

    model: Any = None

    def __init__(self, answers: list[str | None]) -> None:
        super().__init__(4, 4)
        self.answers = answers

    def forward(self, x: Any) -> Any:
        self.answers.append(working_moment(torch, sys._getframe(), Asking.model))
        return super().forward(x)


def test_forward_and_recompute_are_named_by_the_model() -> None:
    answers: list[str | None] = []
    model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([torch.nn.Sequential(Asking(answers))])})
    Asking.model = model
    checkpoint(model["blocks"][0], torch.ones(1, 4, requires_grad=True), use_reentrant=False).sum().backward()
    assert answers == ["forward of blocks.0.0", "recompute of blocks.0.0"]
    Asking.model = None
    model["blocks"][0](torch.ones(1, 4))
    model["blocks"][0][0](torch.ones(1, 4))
    assert answers[2:] == ["forward of 0", "forward of Asking"]


def test_a_backward_and_neither() -> None:
    answers: list[str | None] = []
    main = threading.main_thread().ident
    assert main is not None
    x = torch.ones(4, requires_grad=True)
    x.register_hook(lambda _: answers.append(working_moment(torch, sys._current_frames()[main], None)))
    x.sum().backward()
    assert answers == ["backward"]
    assert working_moment(torch, sys._getframe(), None) is None
    assert working_moment(torch, None, None) is None
