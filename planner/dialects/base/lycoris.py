"""LyCORIS' LoKr, which several trainers have rewritten: how many numbers it trains, and which LoRA has as many."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

from planner.catalog.profiles import ModelProfile
from planner.dialects.base.values import integer
from planner.layout.adapters import LinearLayer, is_named, layers_of

NEAR_ROOT = -1
"""The factor that divides each side of a weight as near to its square root as can be."""


def factor_of(value: Any, name: str) -> int:
    """The factor that a setting says. Raises a VplanError that names the setting for what is none."""
    return NEAR_ROOT if value in (None, NEAR_ROOT, str(NEAR_ROOT)) else max(1, integer(value, name))


def lokr_of(factor: int) -> str:
    """A LoKr in words."""
    return "LoKr of the factor nearest to the square root" if factor == NEAR_ROOT else f"LoKr of factor {factor}"


def priced_as(adapter: str, rank: int, source: str, builds_deltas: bool) -> str:
    """How an adapter that is no LoRA is priced, in words. ``builds_deltas``: whether it makes the change of each weight
    whole (`planner.layout.trainer_terms.lycoris.whole_changes`)."""
    deltas = ", plus the full weight deltas that it builds" if builds_deltas else ""
    return f"a {adapter} is priced as a LoRA of rank {rank}, which has about as many parameters{deltas} ({source})"


def layers_named(profile: ModelProfile, targets: Iterable[str] | None) -> list[LinearLayer]:
    """A model's layers with one of these names, or these ends; None: all layers of its blocks."""
    named = None if targets is None else tuple(targets)
    return [
        layer
        for name, layer in layers_of(profile).items()
        if (layer.block is not None if named is None else is_named(name, named))
    ]


def rank_of_lokr(layers: Collection[LinearLayer], factor: int, rank: int) -> int:
    """The rank of the LoRA that has as many numbers as a LoKr on the same layers. ``rank``: of the second matrices, as
    for `numbers_of`."""
    numbers = sum(numbers_of(layer, factor, rank) for layer in layers)
    return max(1, round(numbers / sum(layer.numbers for layer in layers)))


def numbers_of(layer: LinearLayer, factor: int, rank: int) -> int:
    """Those of a layer's LoKr: the first matrix has the smaller sides and is whole; so is the second, unless a product
    of two of ``rank`` (0: never) has less than half of its longer side."""
    (rows, more_rows), (columns, more_columns) = sides(layer.rows, factor), sides(layer.columns, factor)
    if rank and rank < max(more_rows, more_columns) / 2:
        return rows * columns + rank * (more_rows + more_columns)
    return rows * columns + more_rows * more_columns


def sides(length: int, factor: int) -> tuple[int, int]:
    """The two factors of a side of a weight, the smaller first: ``factor`` itself where that divides it, else the
    largest divisor up to it and the square root (``factorization`` of LyCORIS lycoris/functional/general.py, and of
    ai-toolkit's and musubi-tuner's lokr.py)."""
    if factor > 0 and length % factor == 0:
        return factor, length // factor
    most = math.isqrt(length) if factor == NEAR_ROOT else min(factor, math.isqrt(length))
    smaller = next(divisor for divisor in range(most, 0, -1) if length % divisor == 0)
    return smaller, length // smaller
