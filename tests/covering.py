"""Fewer cases than a full product, chosen by a rule: for what is claimed of every model and of every option, where a
pair of the two runs no code that neither runs with others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

Case = TypeVar("Case")


def in_turns(*lists: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The full product of all lists but the last; each case of it with one value of the last, which takes turns: the
    one at the sum of the others' positions. Of models, methods and dtypes every model meets each method, every model
    and every method meet each dtype, and half of the full product is left."""
    *whole, turns = lists
    return [
        (*(value for _, value in case), turns[sum(place for place, _ in case) % len(turns)])
        for case in itertools.product(*(list(enumerate(values)) for values in whole))
    ]


def covering(cases: Iterable[Case], facts: Callable[[Case], Iterable[Hashable]]) -> list[Case]:
    """Cases that have together every fact that any of them has. Greedy: next is the first of those that add most; in
    their own order."""
    left = list(cases)
    said = [frozenset(facts(case)) for case in left]
    wanted, chosen = frozenset[Hashable]().union(*said), set[int]()
    while wanted:
        best = max(range(len(left)), key=lambda place: len(said[place] & wanted))
        chosen.add(best)
        wanted -= said[best]
    return [left[place] for place in sorted(chosen)]
