"""A list that is copied often does what a list does."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from planner.tape.cow_list import CowList


class Copies(RuleBasedStateMachine):
    """Copies of copies, each changed on its own, beside plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[CowList[int], list[int]]] = [(CowList([1, 2, 3]), [1, 2, 3])]

    def pair(self, which: int) -> tuple[CowList[int], list[int]]:
        return self.pairs[which % len(self.pairs)]

    @rule(which=st.integers(0, 99))
    def copy(self, which: int) -> None:
        grown, plain = self.pair(which)
        self.pairs.append((grown.copy(), plain.copy()))

    @rule(which=st.integers(0, 99), items=st.lists(st.integers(), max_size=3))
    def add(self, which: int, items: list[int]) -> None:
        grown, plain = self.pair(which)
        if len(items) == 1:
            grown.append(items[0])
        else:
            grown += items
        plain.extend(items)

    @rule(which=st.integers(0, 99), index=st.integers(-9, 9), item=st.integers())
    def change(self, which: int, index: int, item: int) -> None:
        grown, plain = self.pair(which)
        if -len(plain) <= index < len(plain):
            grown[index] = item
            plain[index] = item

    @invariant()
    def same(self) -> None:
        for grown, plain in self.pairs:
            assert list(grown) == plain and len(grown) == len(plain)
            assert [grown[index] for index in range(-len(plain), len(plain))] == plain + plain
            assert grown[1:] == plain[1:]


TestCopies = Copies.TestCase
