"""Random numbers of a training step: torch's own, or each sample's from a seed of its own.

A recorded or measured step draws for the whole batch at once. In training every sample has a seed made of the run's
seed, the step and its place in the global batch, so that its noise is the same on whatever rank, in whatever
micro-batch and after whatever resume it comes.
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
    """A seed of 63 bits for these numbers: neighbouring steps and samples have nothing in common."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


@contextlib.contextmanager
def from_seeds(seeds: Tensor | None, device: torch.device) -> Iterator[None]:
    """Draws inside come from one generator per sample; without seeds, from torch's own as ever.

    What torch draws by itself (dropout) is seeded with the first sample's: on the CPU and on the device. What
    ``torch.manual_seed`` does beyond that (stack traces for a CUDA to be started later, MPS, XPU) takes longer than all
    draws together.
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
    """Standard normal numbers in the shape, dtype and place of a batch."""
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
