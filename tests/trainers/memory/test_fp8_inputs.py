"""Checkpoints in 8 bits: what blocks hand on is rounded for their recomputation, and nothing else is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.trainers.memory.test_offload import BLOCKS, made
from tests.trainers.step.test_step import batch, built, tiny
from trainers.families import family
from trainers.memory.fp8_inputs import FP8, InputsInFp8
from trainers.step import step

E4M3_STEP = 2**-4
"""Half of what neighbouring numbers with three bits behind the first differ by, of their size."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_numbers_come_back_within_half_a_step_whatever_the_size_of_their_token(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sizes = torch.tensor([1e-4, 1.0, 3e3, 0.0]).unsqueeze(-1)
    tokens = (torch.randn(4, 512) * sizes).to(dtype).requires_grad_()
    inputs = InputsInFp8()
    with torch.autocast("cpu", torch.bfloat16):
        packed = inputs.pack(1, tokens)
    assert not isinstance(packed, Tensor) and packed.values.dtype == FP8 and packed.largest.shape == (4, 1)
    back = inputs.unpack(packed)
    assert back.dtype == dtype
    largest = tokens.detach().abs().amax(-1, keepdim=True)
    # Below the smallest normal number, 1/16384 of the largest, steps no longer shrink.
    allowed = torch.maximum(tokens.detach().abs() * E4M3_STEP, largest / 16384) * 1.05
    assert ((back - tokens.detach()).abs() <= allowed).all()


def test_masks_and_tables_are_left_as_they_are() -> None:
    inputs = InputsInFp8()
    for tensor in (torch.ones(3, dtype=torch.bool), torch.ones(3, dtype=torch.complex64), torch.ones(3)):
        assert inputs.unpack(inputs.pack(2, tensor)) is tensor


def test_the_loss_is_exact_and_gradients_are_of_the_rounded_inputs() -> None:
    """By hand: each block but the first recomputed from its input in 8 bits."""
    weights, start, shared = made()
    inputs, states = InputsInFp8(), [start]
    with torch.no_grad():
        for weight in weights:
            states.append(torch.tanh(states[-1] @ weight) * shared)
    gradient, expected = torch.ones_like(start), []
    for number in reversed(range(BLOCKS)):
        state = states[number].detach().requires_grad_()
        state = inputs.unpack(inputs.pack(number, state)).requires_grad_() if number else state
        out = torch.tanh(state @ weights[number]) * shared
        gradient, of_weight = torch.autograd.grad(out, [state, weights[number]], gradient)
        expected.insert(0, of_weight)
    away, state = InputsInFp8(), start
    away.begin()
    for weight in weights:

        def block(state: Tensor, shared: Tensor, weight: Tensor = weight) -> Tensor:
            return torch.tanh(state @ weight) * shared

        with away.around(state, shared):
            state = checkpoint(block, state, shared, use_reentrant=False)
    assert torch.equal(state, states[-1])
    found = torch.autograd.grad(state.sum(), weights)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["wan2.1-t2v-1.3b", "flux.1-dev", "z-image"])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_real_model_learns_nearly_the_same(name: str, method: str) -> None:
    profile = tiny(name)
    found = {}
    for mode in ("full", "fp8"):
        torch.manual_seed(0)
        trainee, strategy = built(profile, method, autocast="none", gradient_checkpointing=mode)
        torch.manual_seed(1)
        loss = step.forward(trainee, family(profile), batch(profile, strategy), strategy)
        loss.backward()
        gradients = [weight.grad for weight in trainee.trainable.values() if weight.grad is not None]
        found[mode] = loss.detach(), torch.cat([gradient.flatten() for gradient in gradients])
    assert torch.equal(found["full"][0], found["fp8"][0])
    whole, rounded = found["full"][1], found["fp8"][1]
    assert not torch.equal(whole, rounded)
    assert torch.cosine_similarity(whole, rounded, 0) > 0.99
