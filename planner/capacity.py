"""How far a card goes: frames x resolution with the best way to train in each cell, and the longest clip per card.

A few strategies (the ladder) are priced at all shapes at once by what they allocate (`planner.peaks`). Where that
alone does not decide, near the budget, the shape is replayed as an estimate would; a replay also tells how much that
strategy loses to fragmentation, so the next cells of it need fewer. Pure, given a search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from planner import margin
from planner.estimate import outside_bytes
from planner.extent import lengths, sizes, usable
from planner.facts import GpuProfile
from planner.job import Job, Machine, Strategy
from planner.layout import kernels
from planner.peaks import PeakForms, peak_forms
from planner.phases import caching
from planner.plan import Verdict
from planner.run import Run
from planner.screen import Look, Screen
from planner.shapes import grid
from planner.space import naive
from planner.strategies import CUBLAS_HANDLES, cublas_bytes
from planner.suggest import Search
from planner.ways import ladder, looks
from planner.wishes import Wish

UNKNOWN_LOSS = (1.0, 1.10)
"""Reserved over allocated before a replay told: what is allocated is a lower bound, and 10 % above it is more than
fragmentation takes where segments expand."""
KNOWN_LOSS = 0.01
"""The same to either side of the last replay of the strategy."""
OTHERS_LOSS = 0.03
"""The same to either side of what other strategies were seen to lose."""
USUAL_LOSS = 1.06
"""The same where it is guessed: for the longest clips, of which nothing is replayed."""
ONE = 2**40
"""A round number of bytes, to read the margin's share off."""
STRIDE = 16
"""Of the values for the longest clip, how many are left out at first."""
LONGEST = 400
"""Values that are tried for the longest clip: 1,597 frames at four frames a step."""
Shape = tuple[int, int, int]
"""Frames (of an image model: the batch), height, width."""


@dataclass(frozen=True)
class Cell:
    """One shape of the map: the best verdict any way of the ladder has there, and which."""

    shape: Shape
    verdict: Verdict
    rung: int | None
    """index into the ladder; None where nothing fits"""
    device_bytes: int
    """of that way, or of the one that needs least"""
    replayed: bool
    tiled: bool = False
    """the clip is encoded in tiles, as the VAE does not take it whole"""


@dataclass(frozen=True)
class Capacity:
    """The map. ``cells[row][column]``: a row per size, a column per length (of an image model: per batch)."""

    axis: str
    """frames or batch"""
    lengths: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]
    ladder: tuple[Look, ...]
    cells: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Longest:
    """The longest clip (of an image model: the largest batch) that one class of card takes; 0 when none."""

    card: str
    title: str
    budget_bytes: int
    host_ram: int | None
    lossless: int
    lossless_by: Strategy | None
    lossy: int
    lossy_by: Strategy | None
    capped: bool
    """more would fit than was tried"""


# ---- the map


Known = dict[tuple[int, int], int]
"""(length, pixels) -> bytes, for what a longer or larger clip never needs less of."""


class Forms:
    """Allocated bytes of strategies at many shapes; what cards have in common is worked out once."""

    def __init__(self, screen: Screen, job: Job, wish: Wish) -> None:
        self.screen = screen
        self.job = job.replace(buckets=())
        self.wish = wish
        self.outside: dict[Strategy, int] = {}
        """Strategy -> device bytes that are neither torch's nor CUDA's context"""
        self.encoded: dict[bool, Known] = {}
        """In tiles or not -> device bytes of what is cached before training"""
        self.host: dict[Strategy, Known] = {}
        """Strategy -> host RAM"""
        self._forms: dict[tuple[object, ...], tuple[PeakForms, int]] = {}
        """What is alike -> its forms, and what of them is cuBLAS's workspace"""
        self._allocated: dict[tuple[object, ...], dict[Shape, int]] = {}
        self._jobs: dict[Shape, Job] = {}

    def at(self, shape: Shape) -> Job:
        """The job at another shape."""
        if shape not in self._jobs:
            self._jobs[shape] = self.wish.put(self.job.replace(height=shape[1], width=shape[2]), shape[0])
        return self._jobs[shape]

    def allocated(self, search: Search, strategy: Strategy, shapes: Sequence[Shape]) -> list[int]:
        """Of the job at each shape, without what is cached ahead of training."""
        question = search.question
        # Cards differ in their attention's kernel, and in a workspace that is there all the time.
        alike = strategy, kernels(strategy, question.machine, self.screen.facts(self.job, strategy, question.machine))
        known = self._allocated.setdefault(alike, {})
        for one in (True, False):
            new = [shape for shape in shapes if shape not in known and (self.at(shape).batch_size == 1) is one]
            if new:
                forms, laid_out = self._of(search, strategy, self.at(new[0]), (*alike, one))
                peaks = forms.at([grid(question.model, self.at(shape)) for shape in new]) - laid_out
                known.update(zip(new, map(int, peaks), strict=True))
        workspace = CUBLAS_HANDLES * cublas_bytes(question.gpu)
        return [known[shape] + workspace for shape in shapes]

    def _of(self, search: Search, strategy: Strategy, job: Job, key: tuple[object, ...]) -> tuple[PeakForms, int]:
        """Of one sample, or of several: those are recordings of their own."""
        if key not in self._forms:
            machine = search.question.machine
            facts = self.screen.facts(job, strategy, machine)
            where = grid(search.question.model, job)
            run = self.screen.lay_out(job, strategy, machine, facts, where, self.screen.trainer)
            self.outside[strategy] = outside_bytes(run) - facts.gpu.context_bytes
            self._forms[key] = peak_forms(run), CUBLAS_HANDLES * cublas_bytes(facts.gpu)
        return self._forms[key]


class _Found(NamedTuple):
    verdict: Verdict
    device_bytes: int
    replayed: bool = False
    tiled: bool = False


def _cell_of(shape: Shape, rung: int | None, found: _Found) -> Cell:
    return Cell(shape, found.verdict, rung, found.device_bytes, found.replayed, found.tiled)


class Mapper:
    """Prices shapes of one job on one machine."""

    def __init__(self, search: Search, forms: Forms) -> None:
        self.search = search
        self.forms = forms
        self._lost: dict[Strategy, tuple[float, float]] = {}
        """Strategy -> reserved over allocated, from and to, by its last replay"""
        self._most_lost: dict[Strategy, float] = {}
        """The same, the most that any replay of it told"""
        self._reaches: dict[Strategy, int] = {}

    def map(self, rungs: Sequence[Look]) -> Capacity:
        """The whole map over a ladder."""
        model = self.search.question.model
        columns, rows = lengths(model, self.forms.job), sizes(model, self.forms.job)
        shapes = [(length, height, width) for height, width in rows for length in columns]
        allocated = [self.forms.allocated(self.search, rung.strategy, shapes) for rung in rungs]
        for height, width in reversed(rows):  # what is encoded whole at a row's end is so at all that is smaller
            way = rungs[0].strategy if rungs else None
            if way is None or self.encoding((columns[-1], height, width), way) == way:
                break
        # The largest first: who has the RAM there has it everywhere.
        cells: dict[Shape, Cell] = {}
        for index in reversed(range(len(shapes))):
            cells[shapes[index]] = self._cell(shapes[index], rungs, [each[index] for each in allocated])
        table = tuple(tuple(cells[(length, *size)] for length in columns) for size in rows)
        return Capacity(self.forms.wish.fields[0].removesuffix("_size"), columns, rows, tuple(rungs), table)

    def _cell(self, shape: Shape, rungs: Sequence[Look], allocated: Sequence[int]) -> Cell:
        """As a search answers: what fits without loss, what fits, what is tight without loss, what is tight."""
        found: dict[int, _Found] = {}
        for wanted in ("fits", "tight"):
            for index, (rung, nbytes) in enumerate(zip(rungs, allocated, strict=True)):
                if index not in found:
                    found[index] = self._priced(shape, rung, nbytes)
                if found[index].verdict == wanted:
                    return _cell_of(shape, index, found[index])
        return _cell_of(shape, None, min(found.values(), key=lambda each: each.device_bytes))

    def _priced(self, shape: Shape, rung: Look, allocated: int) -> _Found:
        question, strategy = self.search.question, rung.strategy
        outside, compiled = rung.device_bytes - rung.allocated_bytes, strategy.compile != "none"
        lost = self._lost.get(strategy) or self._usual()
        best, worst = (
            margin.verdict(int(allocated * each) + outside, question.budget_bytes, compiled) for each in lost
        )
        guess = int(allocated * (sum(lost) / 2)) + outside
        if best == worst == "no" or not self.has_ram(shape, strategy):
            return _Found("no", guess)
        way = self.encoding(shape, strategy)
        if way is None:
            return _Found("no", guess)
        tiled = way != strategy
        if best == worst:
            return _Found(best, guess, tiled=tiled)
        found = self.search.priced(self.forms.at(shape), way)
        if found is None:
            return _Found("no", guess)
        train = [found.phases[phase].reserved_bytes for phase in found.phases if phase != "encode"]
        seen = max(train) / allocated
        self._lost[strategy] = max(1.0, seen - KNOWN_LOSS), seen + KNOWN_LOSS
        self._most_lost[strategy] = max(seen, self._most_lost.get(strategy, 1.0))
        return _Found(found.verdict, found.peak.device_bytes, True, tiled)

    def _usual(self) -> tuple[float, float]:
        seen = self._most_lost.values()
        return (max(1.0, min(seen) - OTHERS_LOSS), max(seen) + OTHERS_LOSS) if seen else UNKNOWN_LOSS

    def has_ram(self, shape: Shape, strategy: Strategy) -> bool:
        """Whether the host has the RAM for a way at a shape."""
        machine = self.search.question.machine
        if machine.host_ram is None:
            return True
        known = self.forms.host.setdefault(strategy, {})
        return _at_most(
            machine.host_ram,
            shape,
            known,
            lambda: self.search.screen.host_ram_bytes(self.forms.at(shape), strategy, machine),
        )

    def encoding(self, shape: Shape, strategy: Strategy) -> Strategy | None:
        """The way itself, where what is cached before training fits at a shape; in tiles, where that does; or None."""
        room = int(self.search.question.budget_bytes / margin.interval(ONE)[1] * ONE)
        for tiled in (strategy.vae_tiling, True):
            way = strategy.replace(vae_tiling=tiled) if tiled != strategy.vae_tiling else strategy
            known = self.forms.encoded.setdefault(tiled, {})
            if _at_most(room, shape, known, lambda way=way: self._encode_bytes(shape, way)):  # type: ignore[misc]
                return way
        return None

    def _encode_bytes(self, shape: Shape, way: Strategy) -> int:
        question, job = self.search.question, self.forms.at(shape)
        facts = self.search.screen.facts(job, way, question.machine)
        run = Run(job, way, question.machine, facts, grid=grid(question.model, job))
        return max((entry.encode_peak_bytes for entry in caching(run)), default=0) + question.gpu.context_bytes

    # ---- the longest clip

    def longest(self, strategies: Sequence[Strategy], lossless: bool) -> tuple[int, Strategy | None]:
        """The longest clip at the job's size and the first of these ways that takes it; (0, None) when none does."""
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

    def _reached(self, way: Strategy, shapes: Sequence[Shape], low: int, high: int, lossless: bool) -> int:
        """How many of the shapes fit the host's RAM too, and can be encoded."""
        found = _last(low, high, lambda count: self._host_fits(shapes[count - 1], way))
        return _last(low, found, lambda count: self._encodes(shapes[count - 1], way, lossless))

    def _fewer_swapped(self, way: Strategy, shape: Shape) -> Strategy | None:
        """The way with no more blocks swapped than the RAM holds beside such a clip; None where that is no other."""
        if not way.swap_blocks:
            return None
        found = self.search.most_in_ram(self.forms.at(shape), way.replace(swap_blocks=0))
        return found if 0 < found.swap_blocks < way.swap_blocks else None

    def _reach(self, way: Strategy, shapes: Sequence[Shape]) -> int:
        """How many of the shapes, from the shortest, fit the card by what they allocate."""
        if way not in self._reaches:
            self._reaches[way] = self._reach_of(way, shapes)
        return self._reaches[way]

    def _reach_of(self, way: Strategy, shapes: Sequence[Shape]) -> int:
        def fitting(some: Sequence[Shape]) -> int:
            return sum(self._fits(way, nbytes, 0) for nbytes in self.forms.allocated(self.search, way, some))

        coarse = fitting(shapes[::STRIDE])  # the same for all cards; what is between is asked where it matters
        if not coarse:
            return 0
        start = (coarse - 1) * STRIDE + 1
        between = shapes[start : start + STRIDE - 1]
        return start + (fitting(between) if between else 0)

    def _fits(self, way: Strategy, allocated: int, beside: int) -> bool:
        question = self.search.question
        outside = question.gpu.context_bytes + self.forms.outside[way] + beside
        return margin.verdict(int(allocated * USUAL_LOSS) + outside, question.budget_bytes) == "fits"

    def _host_fits(self, shape: Shape, way: Strategy) -> bool:
        """Whether the host has the RAM; where GPU and CPU share one memory, beside what the GPU takes."""
        question = self.search.question
        if not (question.machine.unified or question.gpu.unified):
            return self.has_ram(shape, way)
        job = self.forms.at(shape)
        ram = self.search.screen.host_ram_bytes(job, way, question.machine)
        return self._fits(way, self.forms.allocated(self.search, way, [shape])[0], ram)

    def _encodes(self, shape: Shape, way: Strategy, lossless: bool) -> bool:
        found = self.encoding(shape, way)
        return found is not None and not (lossless and found != way)


def _last(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The largest count up to `high` for which something holds that holds for all smaller ones; `low` is known to."""
    if high <= low or holds(high):
        return max(low, high)
    while low < high - 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _at_most(limit: int, shape: Shape, known: Known, price: Callable[[], int]) -> bool:
    """Whether a shape needs at most that much: told by what larger or smaller ones need, or priced."""
    length, area = shape[0], shape[1] * shape[2]
    if any(nbytes <= limit for at, nbytes in known.items() if at[0] >= length and at[1] >= area):
        return True
    if any(nbytes > limit for at, nbytes in known.items() if at[0] <= length and at[1] <= area):
        return False
    known[length, area] = price()
    return known[length, area] <= limit


def longest(
    search: Search, forms: Forms, rungs: Sequence[Look], cards: Sequence[tuple[GpuProfile, Machine]]
) -> tuple[Longest, ...]:
    """The longest clip at the job's size for each card, by what is allocated and what the ways usually lose to
    fragmentation: nothing is replayed. Ways are those of the ladder there, which the RAM beside the card decides."""
    job, own = forms.job, search.question.machine
    ways = {own.host_ram: _ways(search, job, rungs)}
    found = []
    for card, machine in sorted(cards, key=lambda pair: -pair[0].allocatable_bytes):  # what it knows of, others share
        there = Search(replace(search.question, machine=machine, gpu=card), search.screen)
        if machine.host_ram not in ways:
            ways[machine.host_ram] = _ways(there, job, ladder(there, job, looks(there, job)))
        mapper = Mapper(there, forms)
        lossless, lossless_by = mapper.longest(ways[machine.host_ram], True)
        lossy, lossy_by = mapper.longest(ways[machine.host_ram], False)
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
            )
        )
    return tuple(reversed(found))


def _ways(search: Search, job: Job, rungs: Iterable[Look]) -> list[Strategy]:
    """The ladder's, each without swapped blocks and with as many as the RAM holds."""
    question = search.question
    swap = naive(job, question.strategy, question.machine, question.fixed).swap_blocks
    bare = dict.fromkeys(rung.strategy.replace(swap_blocks=swap) for rung in rungs)
    return list(dict.fromkeys([*bare, *(search.most_in_ram(job, strategy) for strategy in bare)]))
