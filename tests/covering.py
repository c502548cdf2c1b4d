"""Rules for choosing fewer cases than the full product, for claims about every model and every option whose
combinations share all of their code with other cases."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

Case = TypeVar("Case")


def in_turns(*lists: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The full product of all lists but the last, where each case gets one value of the last list, taking turns: the
    one at the sum of the others' positions. For models, methods and dtypes, every model meets every method, and every
    model and every method meet every dtype, with half of the full product (for two dtypes)."""
    *whole, turns = lists
    return [
        (*(value for _, value in case), turns[sum(place for place, _ in case) % len(turns)])
        for case in itertools.product(*(list(enumerate(values)) for values in whole))
    ]


def covering(cases: Iterable[Case], facts: Callable[[Case], Iterable[Hashable]]) -> list[Case]:
    """Cases that together have every fact that any case has. Greedy: repeatedly adds the first of the cases that
    contribute most. Returned in their original order."""
    left = list(cases)
    said = [frozenset(facts(case)) for case in left]
    wanted, chosen = frozenset[Hashable]().union(*said), set[int]()
    while wanted:
        best = max(range(len(left)), key=lambda place: len(said[place] & wanted))
        chosen.add(best)
        wanted -= said[best]
    return [left[place] for place in sorted(chosen)]
