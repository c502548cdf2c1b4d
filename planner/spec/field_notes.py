"""What stands at a field of the strategy beside its type, default and help text, so that a field is described once."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

Setting = str | int | bool | None
"""A value of a strategy's field."""

ALL: Final = "all"


class Loss(NamedTuple):
    """The lossy values of a field: they change what is learnt, not only where and when it is computed
    (docs/suggest.md, "Lossless before lossy")."""

    values: frozenset[Setting]
    why: str
    methods: frozenset[str] = frozenset({"lora", "full", "sample"})
    unless_master: bool = False
    """an fp32 master of the trained weights removes the loss"""


class Searched(NamedTuple):
    """That a search sets the field, and the values it tries.

    By method: None where the search leaves the field alone, an empty tuple where the job or the machine decides which
    values there are (`planner.search.space`).
    """

    turn: int
    """place in the order in which switches can be switched on one after the other"""
    lora: tuple[Setting, ...] | None = None
    full: tuple[Setting, ...] | None = None
    sample: tuple[Setting, ...] | None = None
    last: tuple[Setting, ...] = ()
    """values of full training that are tried too where nothing else fits: what they give up is worth it only there"""

    def values(self, method: str, last_resort: bool = False) -> tuple[Setting, ...] | None:
        """The values of this field that a search tries for a method (`lora`, `full` or `sample`); None when it does not
        try any. ``last_resort``: with those of `last`."""
        values = {"lora": self.lora, "full": self.full, "sample": self.sample}[method]
        return (*values, *self.last) if values and last_resort and method == "full" else values


class Note(NamedTuple):
    """An annotation of a strategy's field."""

    trained: tuple[Setting, ...] | Literal["all"]
    """the values that our trainer applies, by training and by a probe, which sets up the same. Listed one by one where
    a new value would need code"""
    losses: tuple[Loss, ...] = ()
    """values that lose something; all others are lossless"""
    words: Mapping[Setting, str] = MappingProxyType({})
    """value -> how one line of a table or a message says it; values that need no mention are left out"""
    searched: Searched | None = None
