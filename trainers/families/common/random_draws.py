"""Random numbers of a training step: from torch's global generator, or for each sample from its own seed.

A recorded or measured step draws for the whole batch at once. In training every sample has a seed, made from the run's
seed, the step and the sample's place in the global batch, so its noise does not depend on the rank, the micro-batch or
on resuming.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

SEEDS = "seeds"
"""Key of a batch: the seed of each sample, int64 on the CPU."""

_generators: list[torch.Generator] = []


def sample_seed(*parts: int | str) -> int:
    """A 63-bit seed from these parts, by hashing, so that neighbouring steps and samples get unrelated seeds."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


@contextlib.contextmanager
def from_seeds(seeds: Tensor | None, device: torch.device) -> Iterator[None]:
    """A context in which the functions of this module draw from one generator per sample; without seeds, from torch's
    global one.

    torch's own generators, of the CPU and the device, are seeded with the first sample's seed, for dropout.
    ``torch.manual_seed`` is not used: what else it does (stack traces for lazy CUDA initialisation, MPS, XPU) takes
    longer than all draws together.
    """
    if seeds is None:
        yield
        return
    assert not _generators, "one forward pass at a time"
    numbers: Sequence[int] = seeds.tolist()
    torch.default_generator.manual_seed(numbers[0])
    if device.type == "cuda":
        torch.cuda.manual_seed(numbers[0])
    _generators.extend(torch.Generator(device).manual_seed(number) for number in numbers)
    try:
        yield
    finally:
        _generators.clear()


def normal_like(tensor: Tensor) -> Tensor:
    """Standard normal numbers with the shape, dtype and device of a batch."""
    if not _generators:
        return torch.randn_like(tensor)
    noise = torch.empty_like(tensor)
    _check_count(noise.shape[0])
    for sample, generator in zip(noise.unbind(), _generators, strict=True):
        sample.normal_(generator=generator)
    return noise


def normal(count: int, device: torch.device) -> Tensor:
    """Standard normal numbers, one per sample, in fp32: (count,)."""
    if not _generators:
        return torch.randn(count, device=device)
    _check_count(count)
    return torch.cat([torch.randn(1, device=device, generator=generator) for generator in _generators])


def uniform(count: int, device: torch.device) -> Tensor | None:
    """Numbers strictly between 0 and 1, one per sample, in fp64: (count,). None when no seeds are set."""
    if not _generators:
        return None
    _check_count(count)
    draws = torch.empty(count, device=device, dtype=torch.float64)
    for number, generator in zip(draws.split(1), _generators, strict=True):
        number.uniform_(generator=generator)
    return draws.clamp_(1e-9, 1 - 1e-9)


def integers(high: int, count: int, device: torch.device) -> Tensor:
    """Integers from 0 to ``high`` - 1, one per sample: (count,)."""
    if not _generators:
        return torch.randint(0, high, (count,), device=device)
    _check_count(count)
    return torch.cat([torch.randint(0, high, (1,), device=device, generator=generator) for generator in _generators])


def _check_count(count: int) -> None:
    assert count == len(_generators), f"{count} samples and {len(_generators)} seeds"
