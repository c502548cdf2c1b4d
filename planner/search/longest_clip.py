"""The longest clip (of an image model: the largest batch) that each class of card takes. Pure, given a search."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from planner.catalog.profiles import GpuProfile
from planner.layout import margin
from planner.search.capacity_axes import axis, usable
from planner.search.capacity_map import OVERHEAD_SPREAD, Forms, Room, Shape, reserved_bytes
from planner.search.ladder import ladder, quick_estimates
from planner.search.objectives import Value, largest_by, other_kind
from planner.search.screening import QuickEstimate
from planner.search.search import Search
from planner.spec.job import Job, Machine
from planner.spec.rules import ResolvedStrategy

USUAL_OVERHEAD = 1.06
"""Reserved over allocated where it is guessed: by a way that was not replayed yet."""
LONGEST = 400
"""Values that are tried for the longest clip: 1,597 frames at four frames a step."""


@dataclass(frozen=True)
class Longest:
    """The longest clip (of an image model: the largest batch) that one class of card takes; 0 when none."""

    card: str
    title: str
    budget_bytes: int
    host_ram: int | None
    lossless: int
    lossless_by: ResolvedStrategy | None
    lossy: int
    lossy_by: ResolvedStrategy | None
    capped: bool
    """more would fit than was tried"""
    unified: bool = False
    """GPU and CPU share one memory"""


class Finder(Room):
    """Finds the longest clip of one job on one machine."""

    def __init__(self, search: Search, forms: Forms, overheads: dict[tuple[ResolvedStrategy, bool], float]) -> None:
        """``overheads``: what ways lose to fragmentation, reserved over allocated, which cards tell each other."""
        super().__init__(search, forms)
        self.overheads = overheads
        self._reaches: dict[ResolvedStrategy, int] = {}

    def longest(self, strategies: Sequence[ResolvedStrategy], lossless: bool) -> tuple[int, ResolvedStrategy | None]:
        """The longest clip at the job's size and the first of these ways that takes it; (0, None) when none does.

        A way that wins is replayed once before it is believed: some lose a sixth to fragmentation.
        """
        while True:
            length, by = self._longest(strategies, lossless)
            if by is None or _alike(by) in self.overheads:
                return length, by
            shape = length, self.forms.job.height, self.forms.job.width
            self.overheads[_alike(by)] = self._replayed_overhead(shape, by) + OVERHEAD_SPREAD
            self._reaches.clear()

    def _replayed_overhead(self, shape: Shape, way: ResolvedStrategy) -> float:
        """Reserved over allocated in a replay of training alone."""
        estimate = self.search.fresh_estimate(self.forms.at(shape), way, cached=False)
        return reserved_bytes(estimate) / self.forms.allocated(self.search, way, [shape])[0]

    def _longest(self, strategies: Sequence[ResolvedStrategy], lossless: bool) -> tuple[int, ResolvedStrategy | None]:
        job, question = self.forms.job, self.search.question
        shapes = [(value, job.height, job.width) for value in usable(question.model)[:LONGEST]]
        ways = [way for way in strategies if not (lossless and way.lossy_fields(job))]
        best, by = 0, None
        for way in sorted(ways, key=lambda way: -self._reach(way, shapes)):
            reach = self._reach(way, shapes)
            found = self._reached(way, shapes, best, reach, lossless)
            if found > best:
                best, by = found, way
            fewer = self._fewer_swapped(way, shapes[(found + reach) // 2 - 1]) if found < reach else None
            if fewer is not None:  # where RAM is short, blocks that stay make room for a longer clip's checkpoints
                found = self._reached(fewer, shapes, best, self._reach(fewer, shapes), lossless)
                if found > best:
                    best, by = found, fewer
        return (shapes[best - 1][0], by) if best else (0, None)

    def _reached(self, way: ResolvedStrategy, shapes: Sequence[Shape], low: int, high: int, lossless: bool) -> int:
        """How many of the shapes fit the host's RAM too, and can be encoded."""
        found = _last(low, high, lambda count: self._host_fits(shapes[count - 1], way))
        return _last(low, found, lambda count: self._encodes(shapes[count - 1], way, lossless))

    def _fewer_swapped(self, way: ResolvedStrategy, shape: Shape) -> ResolvedStrategy | None:
        """The way with no more blocks swapped than the RAM holds beside such a clip; None where that is no other."""
        if not way.swap_blocks:
            return None
        found = self.search.most_in_ram(self.forms.at(shape), way.replace(swap_blocks=0))
        return found if 0 < found.swap_blocks < way.swap_blocks else None

    def _reach(self, way: ResolvedStrategy, shapes: Sequence[Shape]) -> int:
        """How many of the shapes, from the shortest, fit the card by what they allocate."""
        if way not in self._reaches:
            self._reaches[way] = self._reach_of(way, shapes)
        return self._reaches[way]

    def _reach_of(self, way: ResolvedStrategy, shapes: Sequence[Shape]) -> int:
        allocated = self.forms.allocated(self.search, way, shapes)
        return bisect.bisect_left(allocated, True, key=lambda nbytes: not self._fits(way, nbytes, 0))

    def _fits(self, way: ResolvedStrategy, allocated: int, beside: int) -> bool:
        question = self.search.question
        outside = question.gpu.context_bytes + self.forms.outside[way] + beside
        overhead = self.overheads.get(_alike(way), USUAL_OVERHEAD)
        return margin.verdict(int(allocated * overhead) + outside, question.budget_bytes) == "fits"

    def _host_fits(self, shape: Shape, way: ResolvedStrategy) -> bool:
        """Whether the host has the RAM; where GPU and CPU share one memory, beside what the GPU takes."""
        question = self.search.question
        if not (question.machine.unified or question.gpu.unified):
            return self.has_ram(shape, way)
        job = self.forms.at(shape)
        ram = self.search.screen.host_ram_bytes(question.candidate(job, way))
        return self._fits(way, self.forms.allocated(self.search, way, [shape])[0], ram)

    def _encodes(self, shape: Shape, way: ResolvedStrategy, lossless: bool) -> bool:
        found = self.encoding(shape, way)
        return found is not None and not (lossless and found != way)


def _alike(way: ResolvedStrategy) -> tuple[ResolvedStrategy, bool]:
    """Ways that lose about as much to fragmentation, whatever the clip: how many blocks are swapped matters little."""
    return way.replace(swap_blocks=0), way.swap_blocks > 0


def _last(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The largest count up to `high` for which something holds that holds for all smaller ones; `low` is known to."""
    if high <= low or holds(high):
        return max(low, high)
    while low < high - 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def longest(
    search: Search,
    forms: Forms,
    rungs: Sequence[QuickEstimate],
    cards: Sequence[tuple[GpuProfile, Machine]],
    searched: str = "",
) -> tuple[Longest, ...]:
    """The longest clip at the job's size for each card, by what is allocated and what the way loses to fragmentation.

    Ways are those of the ladder there, which the RAM beside the card decides. ``searched``: the card for which
    `vplan suggest --frames max` is asked instead, which tries all ways and takes seconds.
    """
    job, own = forms.job, search.question.machine
    ways = {own.host_ram: _ways(search, job, rungs)}
    found = []
    overheads: dict[tuple[ResolvedStrategy, bool], float] = {}
    for card, machine in sorted(cards, key=lambda pair: -pair[0].allocatable_bytes):  # what it knows of, others share
        there = Search(search.question._replace(machine=machine, gpu=card), search.screen)
        if card.name == searched:
            found.append(_searched(there, card, machine))
            continue
        if machine.host_ram not in ways:
            ways[machine.host_ram] = _ways(there, job, ladder(there, job, quick_estimates(there, job)))
        finder = Finder(there, forms, overheads)
        lossless, lossless_by = finder.longest(ways[machine.host_ram], True)
        lossy, lossy_by = finder.longest(ways[machine.host_ram], False)
        last = usable(search.question.model)[:LONGEST][-1]
        longer = lossy > lossless
        found.append(
            Longest(
                card.name,
                card.title,
                there.question.budget_bytes,
                machine.host_ram,
                lossless,
                lossless_by,
                lossy if longer else 0,
                lossy_by if longer else None,
                capped=last in (lossless, lossy),
                unified=card.unified,
            )
        )
    return tuple(_rising(found[::-1], searched))


def _rising(found: Sequence[Longest], searched: str) -> Iterator[Longest]:
    """Cards by rising capacity, each with no shorter clips than a smaller one: it runs that one's plan too, where the
    host has as much RAM. What was ``searched`` stays as it is."""
    least: list[Longest] = []
    for each in found:
        card, ram = each, each.host_ram or 0
        for smaller in least:
            if card.card == searched or ram < (smaller.host_ram or 0) or card.unified or smaller.unified:
                continue
            if smaller.lossless > card.lossless:
                card = replace(card, lossless=smaller.lossless, lossless_by=smaller.lossless_by)
            if smaller.lossy > max(card.lossless, card.lossy):
                card = replace(card, lossy=smaller.lossy, lossy_by=smaller.lossy_by)
        if card.lossy <= card.lossless:
            card = replace(card, lossy=0, lossy_by=None)
        least.append(card)
        yield card


def _searched(search: Search, card: GpuProfile, machine: Machine) -> Longest:
    """What the search behind `--frames max` answers for a card."""
    question, objective = search.question, axis(search.question.model)
    plain = largest_by(search, question.job, objective, False)
    if plain is None:
        other = largest_by(search, question.job, objective, True)
    else:
        other = next((wish.plan for wish in other_kind(search, plain, objective)), None)
    lengths = [_length(objective.read(plan.job)) if plan else 0 for plan in (plain, other)]
    ways = [plan.configuration.strategy if plan else None for plan in (plain, other)]
    return Longest(
        card.name,
        card.title,
        question.budget_bytes,
        machine.host_ram,
        lengths[0],
        ways[0],
        lengths[1],
        ways[1],
        capped=objective.values[-1] in lengths,
        unified=card.unified,
    )


def _length(value: Value) -> int:
    assert isinstance(value, int)
    return value


def _ways(search: Search, job: Job, rungs: Iterable[QuickEstimate]) -> list[ResolvedStrategy]:
    """The ladder's, each without swapped blocks and with as many as the RAM holds."""
    swap = search.space.baseline(job).swap_blocks
    bare = dict.fromkeys(rung.strategy.replace(swap_blocks=swap) for rung in rungs)
    return list(dict.fromkeys([*bare, *(search.most_in_ram(job, strategy) for strategy in bare)]))
