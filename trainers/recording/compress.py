"""Turns a RawRecording into a Tape: sizes as products of the shape's atoms, one template per kind of block.

A step walks through identical blocks in order: upwards in forward, downwards in backward, and upwards again in every
foreach operator of the optimizer. Such a walk is a *sweep*. The first two, one middle and the last two blocks of a
sweep are kept; the others must repeat the middle one, which is checked against the recording. An allocation's address
is (section of the piece, position in it), relative to the block in a sweep, so that the same templates unfold to any
number of blocks. In a run recorded at its full depth, blocks may differ: then each different block is kept, and the
order of the blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from planner.tape.format import (
    ATTENTION_KERNELS,
    CATEGORIES,
    FROM_FIRST,
    FROM_LAST,
    HEAD,
    KINDS,
    NO_BLOCK,
    RELATIVE,
    TAIL,
    Allocation,
    BlockRun,
    Event,
    Free,
    NamedAllocation,
    NamedFree,
    OperatorWork,
    RoundedUp,
    Section,
    Sums,
    Tape,
    Template,
    counted_back,
)
from trainers.recording.block_places import Place
from trainers.recording.factoriser import Factoriser
from trainers.recording.op_cost import OpCost
from trainers.recording.recorder import RawRecording


class Header(NamedTuple):
    """The fields of a Tape that describe the recording, without its events."""

    model: str
    variant: str
    versions: Mapping[str, str]
    regime: Mapping[str, int]
    sums: Sums
    rounded: RoundedUp = {}
    tile: tuple[int, ...] | None = None


@dataclass
class _Stretch:
    """Consecutive events of one block (or of none)."""

    place: Place | None
    passes: str
    events: list[int] = field(default_factory=list)
    work: list[OpCost] = field(default_factory=list)


@dataclass
class _Walk:
    """A single stretch, or a sweep of similar stretches over a run. Becomes a section of the tape."""

    run: int | None
    stretches: list[_Stretch]
    step: int = 0
    """+1 or -1 for a sweep over all blocks of the run, 0 for one stretch."""

    first: int = 0
    """The block of a single stretch in a run."""


def compress(
    recording: RawRecording, header: Header, atoms: Mapping[str, int], counts: list[int], head: int = HEAD
) -> Tape:
    """The Tape of a recording made at pairwise-prime ``atoms``. ``counts``: the blocks per run of the full model;
    ``head``: how many blocks at the start of a sweep are kept individually.

    Raises an AssertionError if the middle blocks of a run differ although they stand for others, or if something
    outside a run refers to one of its middle blocks.
    """
    return _Compressor(recording, Factoriser(atoms), counts, head).tape(header)


class _Compressor:
    def __init__(self, recording: RawRecording, factoriser: Factoriser, counts: list[int], head: int) -> None:
        self.head = head
        self.recording = recording
        self.factoriser = factoriser
        self.counts = counts
        self.complete = [run.count == count for run, count in zip(recording.runs, counts, strict=True)]
        """per run: whether all its blocks were recorded"""
        self.freed_at = {~event: index for index, event in enumerate(recording.events) if event < 0}
        self.made_at = {event: index for index, event in enumerate(recording.events) if event >= 0}
        self.names: dict[str, int] = {}
        self.ops: dict[str, int] = {}
        self.address: dict[int, tuple[int, int, int]] = {}
        """allocation -> (section, block or -1, position) in the current piece"""
        self.growth: dict[int, tuple[int, int]] = {}
        """allocation -> (base, slope) if its size grows from block to block"""

    def tape(self, header: Header) -> Tape:
        bounds = self.recording.pieces
        pieces = {
            name: self._piece(start, stop)
            for (name, start), (_, stop) in itertools.pairwise(bounds)
            if name != "gradients"  # allocates what a step's tape allocates in a real run
        }
        return Tape(
            **header._asdict(),
            atoms=tuple(self.factoriser.atoms),
            sizes=tuple(self.factoriser.sizes),
            runs=tuple(self._runs()),
            names=tuple(self.names),
            ops=tuple(self.ops),
            pieces=pieces,
            operators=tuple(sorted(self.recording.ops)),
        )

    def _runs(self) -> Iterator[BlockRun]:
        """The runs at full depth. A run starts where the previous run in the same module list ends."""
        ends: dict[str, int] = {}
        for run, count in zip(self.recording.runs, self.counts, strict=True):
            start = ends.get(run.module_list, 0)
            yield BlockRun(run.module_list, start, count, run.count)
            ends[run.module_list] = start + count

    def _piece(self, start: int, stop: int) -> list[Section]:
        walks = self._walks(self._stretches(start, stop))
        self.address = {}
        for number, walk in enumerate(walks):
            for stretch in walk.stretches:
                position = 0
                block = stretch.place[1] if stretch.place and walk.run is not None else -1
                for event in stretch.events:
                    if event >= 0:
                        self.address[event] = (number, block, position)
                        position += 1
        return [
            section._replace(
                templates=[
                    template._replace(arrays=counted_back(template.arrays, number)) for template in section.templates
                ]
            )
            for number, section in enumerate(map(self._section, walks))
        ]

    def _stretches(self, start: int, stop: int) -> list[_Stretch]:
        recording = self.recording
        stretches: list[_Stretch] = []
        work = [(index, entry) for index, entry in recording.work if start <= index < stop]
        next_work = 0
        for index in range(start, stop):
            event = recording.events[index]
            if recording.allocations[event if event >= 0 else ~event].category == "host":
                continue
            place, passes = recording.places[index], recording.passes[index]
            if not stretches or stretches[-1].place != place or stretches[-1].passes != passes:
                stretches.append(_Stretch(place, passes))
            stretches[-1].events.append(event)
            while next_work < len(work) and work[next_work][0] <= index:
                stretches[-1].work.append(work[next_work][1])
                next_work += 1
        return [part for stretch in stretches for part in self._split(stretch)]

    def _split(self, stretch: _Stretch) -> list[_Stretch]:
        """Sorts consecutive frees by allocation, because autograd drops a node's tensors in the order of their
        addresses, which differs from run to run without changing the allocator's state. Frees of something of every
        block at once (such as autocast's cache of cast weights when its context exits) become a stretch per block."""
        parts = [_Stretch(stretch.place, stretch.passes, work=stretch.work)]
        for is_free, group in itertools.groupby(stretch.events, key=lambda event: event < 0):
            events = list(group)
            if is_free:
                events.sort(reverse=True)
            outside = stretch.place is None or stretch.passes == "optimizer"
            sweeps = self._sweeps(events, stretch.place) if is_free and outside else {}
            swept = {event for frees in sweeps.values() for event in frees}
            parts[-1].events += [event for event in events if event not in swept]
            if sweeps:
                parts += [_Stretch(place, stretch.passes, frees) for place, frees in sorted(sweeps.items())]
                parts.append(_Stretch(None, stretch.passes))
        return [part for part in parts if part.place not in (None, stretch.place) or part.events or part.work]

    def _sweeps(self, frees: list[int], place: Place | None) -> dict[Place, list[int]]:
        """Frees of what blocks allocated, by block, for the runs in which every block has some.

        In a run whose middle blocks stand for others, it is enough if all middle blocks have some: a last layer may
        differ (its state is normalised, and only the result is kept). While a middle block itself runs, all blocks must
        have some, because an optimizer frees in one block what it held of the block before.
        """
        by_block: dict[Place, list[int]] = {}
        for event in frees:
            allocation = self.recording.allocations[~event]
            made_in = allocation.place if allocation.name else self.recording.places[self.made_at[~event]]
            if made_in is not None:
                by_block.setdefault(made_in, []).append(event)
        swept: dict[Place, list[int]] = {}
        for number, run in enumerate(self.recording.runs):
            in_middle = place is not None and self.head <= place[1] < run.count - TAIL
            middles = range(self.head, run.count - TAIL) if not (self.complete[number] or in_middle) else ()
            if all((number, block) in by_block for block in middles or range(run.count)):
                swept |= {(number, block): by_block.get((number, block), []) for block in range(run.count)}
        return swept

    def _walks(self, stretches: list[_Stretch]) -> list[_Walk]:
        walks: list[_Walk] = []
        index = 0
        while index < len(stretches):
            place = stretches[index].place
            if place is None:
                walks.append(_Walk(None, [stretches[index]]))
                index += 1
                continue
            run, block = place
            count = self.recording.runs[run].count
            direction = 1 if block == 0 else -1
            expected = [(run, position) for position in range(count)][::direction]
            if [stretch.place for stretch in stretches[index : index + count]] == expected:
                walks.append(_Walk(run, stretches[index : index + count], direction))
                index += count
            else:
                walks.append(_Walk(run, [stretches[index]], 0, block))
                index += 1
        return walks

    def _section(self, walk: _Walk) -> Section:
        """A walk as a section of the tape.

        A sweep keeps its head, one middle block and its tail, after checking that all middle blocks are equal. If they
        are not, which is allowed only in a run recorded whole, it keeps the different blocks and their order.
        """
        self._find_growth(walk)
        templates = [self._template(stretch, walk) for stretch in walk.stretches]
        passes = walk.stretches[0].passes
        if not walk.step:
            block = walk.first
            if walk.run is not None and block >= self.head:
                block -= self.recording.runs[walk.run].count
            return Section(passes, walk.run, templates, block=block)
        ordered = templates[:: walk.step]
        if len(ordered) > self.head + TAIL:
            middle = ordered[self.head : -TAIL]
            if any(event in self.growth for stretch in walk.stretches for event in stretch.events):
                # Growing sizes make the work grow too; the work of the central block is used as the mean.
                middle = [candidate._replace(work=middle[len(middle) // 2].work) for candidate in middle]
            unlike = [self.head + position for position, candidate in enumerate(middle) if candidate != middle[0]]
            if unlike:
                assert walk.run is not None and self.complete[walk.run], f"blocks {unlike} of run {walk.run} differ"
                different = [template for index, template in enumerate(ordered) if template not in ordered[:index]]
                order = [different.index(candidate) for candidate in ordered]
                return Section(passes, walk.run, different, walk.step, order=order)
            ordered = [*ordered[: self.head], middle[0], *ordered[-TAIL:]]
        return Section(passes, walk.run, ordered, walk.step)

    def _find_growth(self, walk: _Walk) -> None:
        """Finds allocations whose size grows linearly over the middle blocks of a sweep, and those of both ends on the
        same line. Needs three middle blocks, because two points are always on a line.
        """
        allocations = [
            [event for event in stretch.events if event >= 0] for stretch in walk.stretches[:: walk.step or 1]
        ]
        middle = allocations[self.head : -TAIL]
        if len(middle) < 3 or len(set(map(len, middle))) > 1:
            return
        for position in range(len(middle[0])):
            sizes = [self.recording.allocations[numbers[position]].nbytes for numbers in middle]
            slope = sizes[1] - sizes[0]
            if not slope or any(after - before != slope for before, after in itertools.pairwise(sizes)):
                continue
            base = sizes[0] - self.head * slope
            for block, numbers in enumerate(allocations):
                same = len(numbers) == len(middle[0])
                if same and self.recording.allocations[numbers[position]].nbytes == base + block * slope:
                    self.growth[numbers[position]] = (base, slope)

    def _template(self, stretch: _Stretch, walk: _Walk) -> Template:
        events = [
            self._allocation(event, stretch, walk) if event >= 0 else self._free(~event, stretch, walk)
            for event in stretch.events
        ]
        return Template.of(events, self._work(stretch.work))

    def _allocation(self, number: int, stretch: _Stretch, walk: _Walk) -> Event:
        allocation = self.recording.allocations[number]
        name = self._name(number)
        owner = self._owner(number, stretch, walk) if name >= 0 else None
        growth = self.growth.get(number)
        if growth:
            size = self.factoriser.growing(*growth)
        else:
            size = self.factoriser.size(allocation.nbytes, allocation.rounded, allocation.samples)
        category = CATEGORIES.index(allocation.category or self._use(number))
        op = self.ops.setdefault(allocation.op.removeprefix("aten."), len(self.ops))
        kernel = ATTENTION_KERNELS.index(allocation.kernel)
        if owner is None:
            return Allocation(size, category, op, kernel)
        return NamedAllocation(size, category, op, kernel, 1, *owner, name)

    def _owner(self, number: int, stretch: _Stretch, walk: _Walk) -> tuple[int, int, int]:
        """(mode, run, block) of the block whose parameter an allocation belongs to; (NO_BLOCK, -1, -1) for none."""
        allocation = self.recording.allocations[number]
        if allocation.place is None or not allocation.name:
            return NO_BLOCK, -1, -1
        mode, block = self._block(allocation.place, stretch, walk)
        return mode, allocation.place[0], block

    def _use(self, number: int) -> str:
        """The category of an unlabelled allocation: ``activation`` if it is made in forward and freed in backward, else
        ``temporary``."""
        made_at, freed_at = self.made_at[number], self.freed_at.get(number)
        if freed_at is None:
            return "temporary"
        crosses = self.recording.passes[made_at] == "forward" and self.recording.passes[freed_at] == "backward"
        return "activation" if crosses else "temporary"

    def _name(self, number: int) -> int:
        """The index of an allocation's name, relative to its block, by which other pieces refer to it; -1 for none."""
        allocation = self.recording.allocations[number]
        name = allocation.name
        if allocation.place is not None and name:
            run = self.recording.runs[allocation.place[0]]
            prefix = f"{run.module_list}.{run.start + allocation.place[1]}."
            assert name.startswith(prefix), (name, prefix)
            name = name.removeprefix(prefix)
        return self.names.setdefault(name, len(self.names)) if name else -1

    def _free(self, number: int, stretch: _Stretch, walk: _Walk) -> Event:
        """A free by address, whose section is still absolute, or by name if another piece allocated it."""
        allocation = self.recording.allocations[number]
        if number not in self.address:
            category = CATEGORIES.index(allocation.category or self._use(number))
            return NamedFree(-1, category, *self._owner(number, stretch, walk), self._name(number))
        section, block, position = self.address[number]
        if block < 0:
            return Free(section, NO_BLOCK, 0, position)
        place = self.recording.places[self.made_at[number]]
        assert place is not None
        return Free(section, *self._block(place, stretch, walk), position)

    def _block(self, place: Place, stretch: _Stretch, walk: _Walk) -> tuple[int, int]:
        """(mode, block) that addresses a block from a stretch: relative in a sweep, else from the first or last."""
        run, block = place
        if walk.run == run and walk.step and stretch.place is not None:
            return RELATIVE, block - stretch.place[1]
        count = self.recording.runs[run].count
        inside = self.head <= block < count - TAIL and count > self.head + 1 + TAIL
        assert not inside or self.complete[run], f"run {run}: block {block} from outside"
        return (FROM_FIRST, block) if block < self.head else (FROM_LAST, block - count)

    def _work(self, costs: list[OpCost]) -> list[OperatorWork]:
        """The work of a stretch's operators, merged by kind and exponents; the number of kernel launches comes last."""
        merged: dict[tuple[int, int, tuple[int, ...]], list[int]] = {}
        for cost in costs:
            kind = KINDS.index(cost.kind)
            half = int(cost.dtype != "fp32")
            for flops, nbytes in [(cost.flops, 0), *((0, nbytes) for nbytes in cost.nbytes)]:
                if not flops and not nbytes:
                    continue
                coefficient, exponents = self.factoriser.factor(flops or nbytes)
                cell = merged.setdefault((kind, half, exponents), [0, 0])
                cell[0 if flops else 1] += coefficient
        work = [
            OperatorWork(kind, half, flops, nbytes, exponents)
            for (kind, half, exponents), (flops, nbytes) in merged.items()
        ]
        launches = OperatorWork(KINDS.index("kernels"), 0, len(costs), 0, (0,) * len(self.factoriser.atoms))
        return [*work, launches]
