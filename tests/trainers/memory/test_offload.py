"""Checkpoint offload: what one block hands to the next waits in host RAM, in the same place in every step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.trainers.step.test_step import GRID, batch, built, tiny
from trainers.families import family
from trainers.memory.offload import InputsOnHost
from trainers.step import checkpointing, step

BLOCKS = 4


def run(away: InputsOnHost, weights: list[Tensor], start: Tensor, shared: Tensor) -> Tensor:
    """A stack of checkpointed blocks, each given the one before's output and what all are given."""
    away.begin()
    state = start
    for weight in weights:

        def block(state: Tensor, shared: Tensor, weight: Tensor = weight) -> Tensor:
            return torch.tanh(state @ weight) * shared

        with away.around(state, shared):
            state = checkpoint(block, state, shared, use_reentrant=False)
    return state.sum()


def made() -> tuple[list[Tensor], Tensor, Tensor]:
    torch.manual_seed(0)
    weights = [torch.randn(8, 8, requires_grad=True) for _ in range(BLOCKS)]
    return weights, torch.randn(16, 8, requires_grad=True), torch.randn(16, 8, requires_grad=True)


def test_only_what_is_handed_on_is_moved_and_host_memory_is_taken_once() -> None:
    weights, start, shared = made()
    away = InputsOnHost()
    places: list[list[int]] = []
    for _ in range(3):
        loss = run(away, weights, start, shared)
        assert {call: len(entries) for call, entries in away._away.items()} == dict.fromkeys(range(1, BLOCKS), 1)
        assert sum(host.numel() for host in away._hosts.values()) == (BLOCKS - 1) * start.nbytes
        places.append([host.data_ptr() for host in away._hosts.values()])
        loss.backward()
        assert not away._back, "everything that came back was used"
    assert places[0] == places[1] == places[2]


def test_gradients_are_those_without_offload() -> None:
    weights, start, shared = made()
    state = start
    for weight in weights:
        state = torch.tanh(state @ weight) * shared
    expected = torch.autograd.grad(state.sum(), [start, shared, *weights])
    found = torch.autograd.grad(run(InputsOnHost(), weights, start, shared), [start, shared, *weights])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_in_backward_the_block_before_is_fetched_with_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[int] = []
    fetch = InputsOnHost._fetch
    monkeypatch.setattr(InputsOnHost, "_fetch", lambda self, entry: (fetched.append(entry.call), fetch(self, entry))[1])
    used: list[tuple[int, int]] = []
    bring = InputsOnHost.unpack

    def brought(self: InputsOnHost, packed: object) -> Tensor:
        found = bring(self, packed)  # type: ignore[arg-type]
        if not isinstance(packed, Tensor):
            used.append((packed.call, len(fetched)))  # type: ignore[attr-defined]
        return found

    monkeypatch.setattr(InputsOnHost, "unpack", brought)
    weights, start, shared = made()
    run(InputsOnHost(), weights, start, shared).backward()
    assert fetched == [3, 2, 1]
    assert used == [(3, 2), (2, 3), (1, 3)]  # when block 3's input is used, two were asked for


def test_a_real_model_keeps_its_blocks_inputs_in_host_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    away: list[InputsOnHost] = []

    class Spied(InputsOnHost):
        def __init__(self) -> None:
            super().__init__()
            away.append(self)

    monkeypatch.setattr(checkpointing, "InputsOnHost", Spied)
    profile = tiny("wan2.1-t2v-1.3b")
    trainee, strategy = built(profile, "lora", autocast="none", gradient_checkpointing="offload")
    loss = step.forward(trainee, family(profile), batch(profile, strategy), strategy)
    tokens = GRID["F"] * GRID["H"] * GRID["W"]
    hidden = profile.config["num_attention_heads"] * profile.config["attention_head_dim"]
    handed_on = (profile.config["num_layers"] - 1) * GRID["B"] * tokens * hidden * 4
    assert sum(host.numel() for host in away[0]._hosts.values()) == handed_on
    loss.backward()
