"""Turns a raw Trace into a symbolic Tape: sizes as products of the shape's atoms, one template per kind of block.

A step walks through like blocks in order: forward up, backward down, and every foreach operator of the optimizer up
again. Such a walk is a *sweep*. The first two, one middle and the last two blocks of a sweep are kept; the others
repeat the middle one, which is checked against the trace, not assumed. An allocation's address is (item of the piece,
position in it), relative to the block in a sweep, so that the same templates unfold to any number of blocks. Blocks of
a run recorded at its full depth may differ: then each different one is kept, and which block is which.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainers.recording.block_places import Place
from trainers.recording.op_cost import OpCost
from trainers.recording.recorder import RawRecording

HEAD, TAIL = 2, 2
"""Blocks kept from either end of a sweep."""

CATEGORIES = ["weight", "gradient", "optimizer", "batch", "activation", "temporary", "workspace"]
KERNELS = ["any", "flash"]
KINDS = ["matmul", "attention", "convolution", "pointwise"]


@dataclass
class Segment:
    """Consecutive events of one block (or of none)."""

    place: Place | None
    passes: str
    events: list[int] = field(default_factory=list)
    work: list[OpCost] = field(default_factory=list)


@dataclass
class Item:
    """A segment, or a sweep of like segments over a run."""

    run: int | None
    segments: list[Segment]
    step: int = 0
    """+1 or -1 for a sweep over all blocks of the run, 0 for one segment."""

    first: int = 0
    """Block of a single segment inside a run."""


class Factoriser:
    """Reads sizes as ``coefficient * product of atoms`` from a recording at pairwise-prime atoms."""

    def __init__(self, atoms: Mapping[str, int]) -> None:
        self.atoms = dict(atoms)
        self.names = list(atoms)
        self.sizes: dict[tuple[Any, ...], int] = {}

    def factor(self, number: int) -> tuple[int, tuple[int, ...]]:
        exponents = []
        for prime in self.atoms.values():
            exponent = 0
            while prime > 1 and number and number % prime == 0:
                number //= prime
                exponent += 1
            exponents.append(exponent)
        return number, tuple(exponents)

    def size(self, nbytes: int, rounded: tuple[int, int, int] | None = None) -> int:
        """The index of a size in the tape's table. A rounded dimension is kept as (multiple, its own factors)."""
        if rounded is None:
            key: tuple[Any, ...] = self.factor(nbytes)
        else:
            exact, multiple, up = rounded
            key = (*self.factor(nbytes // up), multiple, *self.factor(exact))
        return self.sizes.setdefault(key, len(self.sizes))

    def growing(self, base: int, slope: int) -> int:
        """The index of a size that is ``base + slope * block``."""
        return self.sizes.setdefault(("grow", self.factor(base), self.factor(slope)), len(self.sizes))


def compress(trace: RawRecording, atoms: Mapping[str, int], counts: list[int], head: int = HEAD) -> dict[str, Any]:
    """The body of a tape: runs, tables and pieces. ``counts`` are the blocks per run of the full model.

    ``head`` blocks at the start of a sweep are kept as they are.
    """
    return _Compressor(trace, Factoriser(atoms), counts, head).tape()


class _Compressor:
    def __init__(self, trace: RawRecording, factoriser: Factoriser, counts: list[int], head: int) -> None:
        self.head = head
        self.trace = trace
        self.factoriser = factoriser
        self.counts = counts
        self.whole = [run.count == count for run, count in zip(trace.runs, counts, strict=True)]
        self.freed_at = {~event: index for index, event in enumerate(trace.events) if event < 0}
        self.made_at = {event: index for index, event in enumerate(trace.events) if event >= 0}
        self.names: dict[str, int] = {}
        self.ops: dict[str, int] = {}
        self.address: dict[int, tuple[int, int, int]] = {}
        """allocation -> (item, block or -1, position), within the piece at hand"""
        self.growth: dict[int, tuple[int, int]] = {}
        """allocation -> (base, slope), when its size grows from block to block"""

    def tape(self) -> dict[str, Any]:
        bounds = self.trace.pieces
        pieces = {
            name: self._piece(start, stop)
            for (name, start), (_, stop) in itertools.pairwise(bounds)
            if name != "gradients"
        }
        runs = []
        ends: dict[str, int] = {}
        for run, count in zip(self.trace.runs, self.counts, strict=True):
            start = ends.get(run.module_list, 0)
            runs.append({"list": run.module_list, "start": start, "recorded": run.count, "count": count})
            ends[run.module_list] = start + count
        return {
            "atoms": self.factoriser.names,
            "runs": runs,
            "names": list(self.names),
            "ops": list(self.ops),
            "pieces": pieces,
            "sizes": [list(map(_listed, key)) for key in self.factoriser.sizes],
        }

    def _piece(self, start: int, stop: int) -> list[dict[str, Any]]:
        items = self._items(self._segments(start, stop))
        self.address = {}
        for number, item in enumerate(items):
            for segment in item.segments:
                position = 0
                block = segment.place[1] if segment.place and item.run is not None else -1
                for event in segment.events:
                    if event >= 0:
                        self.address[event] = (number, block, position)
                        position += 1
        return [self._encode(item) for item in items]

    def _segments(self, start: int, stop: int) -> list[Segment]:
        trace = self.trace
        segments: list[Segment] = []
        work = [(index, entry) for index, entry in trace.work if start <= index < stop]
        next_work = 0
        for index in range(start, stop):
            event = trace.events[index]
            if trace.allocs[event if event >= 0 else ~event].category == "host":
                continue
            place, passes = trace.places[index], trace.passes[index]
            if not segments or segments[-1].place != place or segments[-1].passes != passes:
                segments.append(Segment(place, passes))
            segments[-1].events.append(event)
            while next_work < len(work) and work[next_work][0] <= index:
                segments[-1].work.append(work[next_work][1])
                next_work += 1
        return [part for segment in segments for part in self._split(segment)]

    def _split(self, segment: Segment) -> list[Segment]:
        """Orders neighbouring frees by allocation, because autograd drops a node's tensors in the order of their
        addresses, which differs from run to run and leaves the allocator the same; and gives those that let something
        of every block go at once (as autocast's cache of cast weights, when its context exits) a segment per
        block."""
        parts = [Segment(segment.place, segment.passes, work=segment.work)]
        for is_free, group in itertools.groupby(segment.events, key=lambda event: event < 0):
            events = list(group)
            if is_free:
                events.sort(reverse=True)
            outside = segment.place is None or segment.passes == "optimizer"
            sweeps = self._sweeps(events, segment.place) if is_free and outside else {}
            swept = {event for found in sweeps.values() for event in found}
            parts[-1].events += [event for event in events if event not in swept]
            if sweeps:
                parts += [Segment(place, segment.passes, found) for place, found in sorted(sweeps.items())]
                parts.append(Segment(None, segment.passes))
        return [part for part in parts if part.place not in (None, segment.place) or part.events or part.work]

    def _sweeps(self, frees: list[int], place: Place | None) -> dict[Place, list[int]]:
        """Frees of what was made in a block, by block, for the runs all of whose blocks are there.

        Of blocks that stand for others all middles are enough: the state behind a last layer is normed, and only that
        is kept with those of the others. Not in a middle: what an optimizer holds of one it drops in the next.
        """
        found: dict[Place, list[int]] = {}
        for event in frees:
            alloc = self.trace.allocs[~event]
            made = alloc.place if alloc.name else self.trace.places[self.made_at[~event]]
            if made is not None:
                found.setdefault(made, []).append(event)
        swept: dict[Place, list[int]] = {}
        for number, run in enumerate(self.trace.runs):
            others = place is not None and self.head <= place[1] < run.count - TAIL
            middles = range(self.head, run.count - TAIL) if not (self.whole[number] or others) else ()
            if all((number, block) in found for block in middles or range(run.count)):
                swept |= {(number, block): found.get((number, block), []) for block in range(run.count)}
        return swept

    def _items(self, segments: list[Segment]) -> list[Item]:
        items: list[Item] = []
        index = 0
        while index < len(segments):
            place = segments[index].place
            if place is None:
                items.append(Item(None, [segments[index]]))
                index += 1
                continue
            run, block = place
            count = self.trace.runs[run].count
            direction = 1 if block == 0 else -1
            wanted = [(run, position) for position in range(count)][::direction]
            if [segment.place for segment in segments[index : index + count]] == wanted:
                items.append(Item(run, segments[index : index + count], direction))
                index += count
            else:
                items.append(Item(run, [segments[index]], 0, block))
                index += 1
        return items

    def _encode(self, item: Item) -> dict[str, Any]:
        """An item as JSON.

        A sweep keeps its head, one middle and its tail after checking that all middles are equal; where they are not,
        in a run recorded whole, its different blocks and their order.
        """
        self._find_growth(item)
        templates = [self._template(segment, item) for segment in item.segments]
        if not item.step:
            block = item.first
            if item.run is not None and block >= self.head:
                block -= self.trace.runs[item.run].count
            return {"run": item.run, "block": block, "templates": templates, "pass": item.segments[0].passes}
        ordered = templates[:: item.step]
        sweep = {"run": item.run, "step": item.step, "pass": item.segments[0].passes}
        if len(ordered) > self.head + TAIL:
            middle = ordered[self.head : -TAIL]
            if any(event in self.growth for segment in item.segments for event in segment.events):
                middle = [{**other, "work": middle[len(middle) // 2]["work"]} for other in middle]  # on average
            unlike = [self.head + position for position, other in enumerate(middle) if other != middle[0]]
            if unlike:
                assert item.run is not None and self.whole[item.run], f"blocks {unlike} of run {item.run} differ"
                different = [template for index, template in enumerate(ordered) if template not in ordered[:index]]
                return {**sweep, "templates": different, "order": [different.index(other) for other in ordered]}
            ordered = [*ordered[: self.head], middle[0], *ordered[-TAIL:]]
        return {**sweep, "templates": ordered}

    def _find_growth(self, item: Item) -> None:
        """Marks allocations whose size is a line through the middle blocks of a sweep, and what of both ends is on it.

        Two points always are, so it takes three middles.
        """
        made = [[event for event in segment.events if event >= 0] for segment in item.segments[:: item.step or 1]]
        middle = made[self.head : -TAIL]
        if len(middle) < 3 or len(set(map(len, middle))) > 1:
            return
        for position in range(len(middle[0])):
            sizes = [self.trace.allocs[numbers[position]].nbytes for numbers in middle]
            slope = sizes[1] - sizes[0]
            if not slope or any(after - before != slope for before, after in itertools.pairwise(sizes)):
                continue
            base = sizes[0] - self.head * slope
            for block, numbers in enumerate(made):
                same = len(numbers) == len(middle[0])
                if same and self.trace.allocs[numbers[position]].nbytes == base + block * slope:
                    self.growth[numbers[position]] = (base, slope)

    def _template(self, segment: Segment, item: Item) -> dict[str, Any]:
        events = [
            self._alloc(event, segment, item) if event >= 0 else self._free(~event, segment, item)
            for event in segment.events
        ]
        return {"events": events, "work": self._work(segment.work)}

    def _alloc(self, number: int, segment: Segment, item: Item) -> list[int]:
        """[size, category, op, kernel, named], and [mode, run, block, name] behind it when other pieces refer to it."""
        alloc = self.trace.allocs[number]
        name = self._name(number)
        owner = [*self._owner(number, segment, item), name] if name >= 0 else []
        growth = self.growth.get(number)
        return [
            self.factoriser.growing(*growth) if growth else self.factoriser.size(alloc.nbytes, alloc.rounded),
            CATEGORIES.index(alloc.category or self._use(number)),
            self.ops.setdefault(alloc.op.removeprefix("aten."), len(self.ops)),
            KERNELS.index(alloc.kernel),
            len(owner) // 4,
            *owner,
        ]

    def _owner(self, number: int, segment: Segment, item: Item) -> tuple[int, int, int]:
        """(mode, run, block) of the block whose parameter an allocation belongs to; (0, -1, -1) for none."""
        alloc = self.trace.allocs[number]
        if alloc.place is None or not alloc.name:
            return 0, -1, -1
        mode, block = self._block(alloc.place, segment, item)
        return mode, alloc.place[0], block

    def _use(self, number: int) -> str:
        """Made in forward and freed in backward.

        Activation. Recomputed and freed by autograd: activation. Else temporary.
        """
        made, freed = self.made_at[number], self.freed_at.get(number)
        if freed is None:
            return "temporary"
        crosses = self.trace.passes[made] == "forward" and self.trace.passes[freed] == "backward"
        return "activation" if crosses else "temporary"

    def _name(self, number: int) -> int:
        """Index of the name an allocation has across pieces, relative to its block; -1 for none."""
        alloc = self.trace.allocs[number]
        name = alloc.name
        if alloc.place is not None and name:
            run = self.trace.runs[alloc.place[0]]
            prefix = f"{run.module_list}.{run.start + alloc.place[1]}."
            assert name.startswith(prefix), (name, prefix)
            name = name.removeprefix(prefix)
        return self.names.setdefault(name, len(self.names)) if name else -1

    def _free(self, number: int, segment: Segment, item: Item) -> list[Any]:
        """[item, mode, block, position], or [-1, category, mode, run, block, name] for what another piece made.

        Mode 0: no block; 1: relative to this block; 2: from the first block; 3: from the last.
        """
        alloc = self.trace.allocs[number]
        if number not in self.address:
            category = CATEGORIES.index(alloc.category or self._use(number))
            return [-1, category, *self._owner(number, segment, item), self._name(number)]
        made_item, block, position = self.address[number]
        if block < 0:
            return [made_item, 0, 0, position]
        run = self.trace.places[self.made_at[number]]
        assert run is not None
        return [made_item, *self._block(run, segment, item), position]

    def _block(self, place: Place, segment: Segment, item: Item) -> tuple[int, int]:
        run, block = place
        if item.run == run and item.step and segment.place is not None:
            return 1, block - segment.place[1]
        count = self.trace.runs[run].count
        inside = self.head <= block < count - TAIL and count > self.head + 1 + TAIL
        assert not inside or self.whole[run], f"run {run}: block {block} from outside"
        return (2, block) if block < self.head else (3, block - count)

    def _work(self, entries: list[OpCost]) -> list[list[int]]:
        """[kind, dtype is half, flops coefficient, bytes coefficient, *exponents], merged by exponents."""
        merged: dict[tuple[Any, ...], list[int]] = {}
        for entry in entries:
            kind = KINDS.index(entry.kind)
            half = int(entry.dtype != "fp32")
            for flops, nbytes in [(entry.flops, 0), *((0, nbytes) for nbytes in entry.nbytes)]:
                if not flops and not nbytes:
                    continue
                coefficient, exponents = self.factoriser.factor(flops or nbytes)
                cell = merged.setdefault((kind, half, exponents), [0, 0])
                cell[0 if flops else 1] += coefficient
        kernels = [[len(KINDS), 0, len(entries), 0, *[0] * len(self.factoriser.names)]]
        return [[kind, half, *cell, *exponents] for (kind, half, exponents), cell in merged.items()] + kernels


def _listed(value: Any) -> Any:
    return list(map(_listed, value)) if isinstance(value, tuple) else value
