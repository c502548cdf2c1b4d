"""LyCORIS' adapters, of which several trainers have rewritten LoKr: how many numbers they train, and which LoRA has as
many."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Set
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


def ends_of(profile: ModelProfile, wanted: Set[str]) -> tuple[str, ...]:
    """`lora_targets` of these layers: a recorded choice where it is theirs, else the shortest ends of names that are
    theirs alone."""
    every = layers_of(profile)
    for usual in filter(None, (profile.lora.targets, profile.lora.wide)):
        if {name for name in every if is_named(name, usual)} == wanted:
            return usual
    unwanted = {end for name in every.keys() - wanted for end in _ends(name)}
    return tuple(dict.fromkeys(next((end for end in _ends(name) if end not in unwanted), name) for name in wanted))


def _ends(layer: str) -> Iterator[str]:
    """The ends of a layer's name, the shortest first; none begins with a number."""
    names = layer.split(".")
    return (".".join(names[at:]) for at in range(len(names) - 1, -1, -1) if not names[at].isdecimal())


def rank_of_lokr(layers: Collection[LinearLayer], factor: int, rank: int) -> int:
    """The rank of the LoRA that has as many numbers as a LoKr on the same layers. ``rank``: of the second matrices, as
    for `numbers_of`."""
    numbers = sum(numbers_of(layer, factor, rank) for layer in layers)
    return max(1, round(numbers / sum(layer.numbers for layer in layers)))


def numbers_of(layer: LinearLayer, factor: int, rank: int, window: int = 1) -> int:
    """Those of a layer's LoKr: the first matrix has the smaller sides and is whole; so is the second, unless a product
    of two of ``rank`` (0: never) has less than half of its longer side. ``window``: of a convolution, the positions
    that a filter reads, which the second matrix has for each of its columns."""
    (rows, more_rows), (columns, more_columns) = sides(layer.rows, factor), sides(layer.columns // window, factor)
    if rank and rank < max(more_rows, more_columns) / 2:
        return rows * columns + rank * (more_rows + window * more_columns)
    return rows * columns + window * more_rows * more_columns


LORAS = ("lora", "locon")
"""LyCORIS' words for a LoRA, ``algo``."""


def numbers_by(algo: str, layer: LinearLayer, dim: int, factor: int, whole: bool, window: int = 1) -> int:
    """Those of a layer's adapter: a LoKr's, whose matrices may be ``whole``, a LoHa's of two products, or a LoRA's."""
    if algo in LORAS:
        return dim * layer.numbers
    return 2 * dim * layer.numbers if algo == "loha" else numbers_of(layer, factor, 0 if whole else dim, window)


def adapter_in_words(algo: str, factors: Iterable[int]) -> str:
    """An adapter by ``algo``, and the factors of a LoKr's layers."""
    if algo in LORAS:
        return "LyCORIS LoRA"
    if algo == "loha":
        return "LoHa"
    first, *more = factors
    return " and ".join((lokr_of(first), *(lokr_of(factor).removeprefix("LoKr of ") for factor in more)))


def is_true(value: Any) -> bool:
    """Whether a switch is on: any word but false is (lycoris/utils/__init__.py ``str_bool``)."""
    return value is not None and str(value).lower() != "false"


def sides(length: int, factor: int) -> tuple[int, int]:
    """The two factors of a side of a weight, the smaller first: ``factor`` itself where that divides it, else the
    largest divisor up to it and the square root (``factorization`` of LyCORIS lycoris/functional/general.py, and of
    ai-toolkit's and musubi-tuner's lokr.py)."""
    if factor > 0 and length % factor == 0:
        return factor, length // factor
    most = math.isqrt(length) if factor == NEAR_ROOT else min(factor, math.isqrt(length))
    smaller = next(divisor for divisor in range(most, 0, -1) if length % divisor == 0)
    return smaller, length // smaller
