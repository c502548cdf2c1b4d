"""A copy-on-write list, for lists that are copied often and changed little."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar, overload

T = TypeVar("T")


class CowList(Sequence[T]):
    """A copy-on-write list: copies share the items they started with, and each has a list of its own for added ones.

    A recording laid out has 100,000 buffers, and every strategy that is tried adds a few to a copy.
    """

    __slots__ = ("_count", "_own", "_shared")

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._shared: list[T] = []  # never changed in place
        self._count = 0
        self._own = list(items)

    def copy(self) -> CowList[T]:
        """A list with the same items, which can be appended to independently of this one."""
        if self._own:  # a new list, because earlier copies hold on to the old one
            self._shared = [*self._shared, *self._own]
            self._count = len(self._shared)
            self._own = []
        other: CowList[T] = CowList()
        other._shared, other._count = self._shared, self._count
        return other

    def append(self, item: T) -> None:
        """Appends an item to this list only; earlier copies do not get it."""
        self._own.append(item)

    def __iadd__(self, items: Iterable[T]) -> CowList[T]:
        self._own += items
        return self

    def __setitem__(self, index: int, item: T) -> None:
        index = range(len(self))[index]
        if index < self._count:  # the first change of a shared item: from here on nothing is shared
            self._own[:0] = self._shared
            self._shared, self._count = [], 0
        self._own[index - self._count] = item

    def update(self, changes: Mapping[int, T]) -> None:
        """Sets several items. ``changes``: index -> item."""
        if min(changes, default=self._count) < self._count:
            self[min(changes)] = changes[min(changes)]  # from here on nothing is shared
        for index, item in changes.items():
            self._own[index - self._count] = item

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            places = range(len(self))[index]
            if places and min(places[0], places[-1]) >= self._count:  # of those added since, which are few
                return [self._own[place - self._count] for place in places]
            return list(self)[index]
        if index < 0:
            index = range(len(self))[index]
        return self._shared[index] if index < self._count else self._own[index - self._count]

    def __len__(self) -> int:
        return self._count + len(self._own)

    def __iter__(self) -> Iterator[T]:
        return itertools.chain(self._shared, self._own)
