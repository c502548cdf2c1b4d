"""What MPS does otherwise than CUDA: attention with whole scores, RMSNorm in several operators, its autocast."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from trainers.recording import mps_ops
from trainers.recording.cuda_ops import cuda_lists
from trainers.recording.mps_ops import mps_lists, mps_semantics
from trainers.recording.recorder import Recorder

BATCH, HEADS, QUERIES, KEYS, SIZE = 2, 3, 320, 256, 16
SCORES = BATCH * HEADS * QUERIES * KEYS


def recorded(call: Callable[[], object]) -> Recorder:
    recorder = Recorder(mps_ops.workspaces)
    with mps_semantics(), FakeTensorMode(allow_non_fake_inputs=True), recorder:
        call()
    return recorder


def attend(trains: bool, backward: bool = False) -> Callable[[], object]:
    def call() -> object:
        query = torch.empty(BATCH, HEADS, QUERIES, SIZE, dtype=torch.bfloat16, requires_grad=trains)
        key, value = (torch.empty(BATCH, HEADS, KEYS, SIZE, dtype=torch.bfloat16) for _ in range(2))
        out = scaled_dot_product_attention(query, key, value)
        if backward:
            out.sum().backward()
        return out

    return call


def most_scores(recorder: Recorder) -> int:
    """The most bytes of scores at once."""
    allocations, alive, most = recorder.recording.allocations, 0, 0
    for event in recorder.recording.events:
        nbytes = allocations[event if event >= 0 else ~event].nbytes
        if nbytes % SCORES == 0:
            alive += nbytes if event >= 0 else -nbytes
            most = max(most, alive)
    return most


def test_attention_with_gradients_makes_scores_whole_in_fp32() -> None:
    recorder = recorded(attend(trains=True))
    assert {"aten.bmm", "aten._safe_softmax"} <= recorder.recording.ops
    assert not any("scaled_dot" in name for name in recorder.recording.ops)
    # The scores and their softmax, which rows are blocked, and the softmax before these are cleared.
    assert most_scores(recorder) == (4 + 4 + 1 + 4) * SCORES


def test_its_backward_keeps_the_softmax_and_makes_two_gradients_of_the_scores() -> None:
    assert most_scores(recorded(attend(trains=True, backward=True))) == (4 + 4 + 1 + 4) * SCORES
    recorder = recorded(attend(trains=True, backward=True))
    made = [entry.op for entry in recorder.recording.allocations if entry.nbytes == 4 * SCORES]
    assert made.count("aten.bmm") == 2 and "aten._softmax_backward_data" in made


def test_attention_without_gradients_makes_an_output_and_the_scores_in_16_bits() -> None:
    recorder = recorded(attend(trains=False))
    assert "aten.bmm" not in recorder.recording.ops
    assert most_scores(recorder) == 2 * SCORES


def norm(trains: bool) -> Callable[[], object]:
    value = torch.empty(64, 32, dtype=torch.bfloat16, requires_grad=trains)
    return lambda: rms_norm(value, (32,), torch.empty(32, dtype=torch.bfloat16))


@pytest.mark.parametrize("trains", [True, False])
def test_rms_norm_is_several_operators_where_there_are_gradients(trains: bool) -> None:
    ops = recorded(norm(trains)).recording.ops
    assert ({"aten.rsqrt", "aten.pow", "aten.mul"} <= ops) is trains


def test_autocast_casts_what_cuda_s_does_less_norms_and_interpolations() -> None:
    cuda, mps = cuda_lists(), mps_lists()
    assert all(mps[kind] <= cuda[kind] for kind in cuda)
    assert {"linear", "bmm", "scaled_dot_product_attention"} <= mps["lower"]
    assert "layer_norm" in mps["fp32"] and "rms_norm" in cuda["fp32"] - mps["fp32"]
    assert math.isclose(len(mps["lower"]) / len(cuda["lower"]), 1, abs_tol=0.4)
