"""trainers/step/random_weights.py: weights of a probe come as files' do, without a copy beside them."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trainers.recording.cuda_ops import cuda_semantics
from trainers.recording.recorder import Recorder
from trainers.step.random_weights import PATTERN, SPREAD, randomise

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_small_and_of_both_signs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.empty(256, 256, dtype=dtype)
    randomise("blocks.0.weight", weight)
    numbers = weight.float()
    assert numbers.std().item() == pytest.approx(SPREAD, rel=0.2)
    assert abs(numbers.mean().item()) < SPREAD / 50
    assert len(weight.view(torch.uint8).unique()) > 8


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_allocated_beside_the_weight(dtype: torch.dtype) -> None:
    """A 16-bit copy of each fp8 weight once left holes that training does not have: 1.1 % of Wan 2.1 1.3B."""
    recorder = Recorder()
    with cuda_semantics(), FakeTensorMode(), recorder:
        randomise("blocks.0.weight", torch.empty(256, 256, dtype=dtype))
    assert [made.op for made in recorder.recording.allocations] == ["aten.empty"]


def test_the_second_matrix_of_an_adapter_begins_at_zero() -> None:
    """As in training: Prodigy keeps a copy of every weight that does not."""
    weight = torch.ones(64, 4)
    randomise("blocks.0.attn.to_q.lora_B.default.weight", weight)
    assert not weight.any()
    randomise("blocks.0.attn.to_q.lora_A.default.weight", weight)
    assert weight.any()


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_a_large_weight_in_host_ram_repeats_what_was_drawn(dtype: torch.dtype) -> None:
    weight = torch.empty(2 * PATTERN // 1024 + 3, 1024, dtype=dtype)
    randomise("blocks.0.weight", weight)
    numbers = weight.view(-1)
    assert torch.equal(numbers[:PATTERN], numbers[PATTERN : 2 * PATTERN]) and bool(numbers[2 * PATTERN :].any())
    assert not torch.equal(weight[0], weight[1024])  # rows of a matrix differ
    assert numbers.float().std().item() == pytest.approx(SPREAD, rel=0.01)
