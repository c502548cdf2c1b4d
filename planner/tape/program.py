"""A tape laid out at full depth: numbered buffers, allocated and freed in the order the real step does it.

A Program holds the buffers of all stages of a run; a Stage is one piece of a tape (load, step, optimizer), block by
block.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from planner.tape.cow_list import CowList
from planner.tape.format import CATEGORIES, Growing, Monomial, Section, Tape, Template, values_of
from planner.tape.templates import TemplateColumns, columns_of, in_order, sections_of, target_block

Block = tuple[str, int]
"""(module list, index)"""


def frees(buffers: Iterable[int]) -> list[int]:
    """The events that free these buffers, in their order (`Stage`)."""
    return [~buffer for buffer in buffers]


class Moment(NamedTuple):
    """The part of a run that a stretch of events belongs to: piece, pass (forward, backward, ...), module list and
    block."""

    piece: str
    passes: str
    module_list: str
    """"" outside the repeated blocks"""

    block: int


@dataclass
class Stage:
    """One piece at full depth: stretches of events, each with its moment.

    An event >= 0 allocates that buffer, < 0 frees ``~event``. A buffer may be allocated again later in the stage.
    Copies of a stage share their lists of events, so stretches are replaced, never modified in place.
    """

    name: str
    stretches: list[tuple[Moment, list[int]]]

    @property
    def ops(self) -> list[int]:
        """All events in order, as `planner.allocator.caching.CachingAllocator.run` takes them."""
        return list(itertools.chain.from_iterable(events for _, events in self.stretches))

    def copy(self) -> Stage:
        """A stage with the same stretches, which can be replaced independently."""
        return Stage(self.name, self.stretches.copy())

    def moment(self, index: int) -> Moment:
        """The moment of the index-th event. Raises an IndexError if there are fewer."""
        for moment, events in self.stretches:
            if index < len(events):
                return moment
            index -= len(events)
        raise IndexError(index)


@dataclass
class Program:
    """The buffers of a whole run, by number: sizes, categories and names. Its stages allocate and free them."""

    buffers: CowList[int] = field(default_factory=CowList)
    """Per buffer: index into ``sizes``."""

    category: CowList[str] = field(default_factory=CowList)
    """Per buffer: one of CATEGORIES, or a category that strategies add (residents, buckets)."""

    op: CowList[str] = field(default_factory=CowList)
    """Per buffer: the operator that made it."""

    kernel: dict[int, str] = field(default_factory=dict)
    """Buffer -> attention kernel, for buffers that only this kernel allocates."""

    sizes: list[tuple[Tape, Monomial] | int] = field(default_factory=list)
    """Sizes, symbolic (of tapes) or in bytes."""

    named: dict[str, dict[str, int]] = field(default_factory=dict)
    """Category -> full name -> buffer, for what outlives a stage: weights, gradients, optimizer states, the batch."""

    def bytes_of(self, grid: Mapping[str, int], known: Sequence[int] = ()) -> list[int]:
        """The size of every buffer in bytes, by number, at a shape. ``grid``: values of the atoms by name. ``known``:
        sizes of the first buffers, if this program extends another."""
        table = [size if isinstance(size, int) else 0 for size in self.sizes]
        symbolic = [(index, *size) for index, size in enumerate(self.sizes) if not isinstance(size, int)]
        for tape in {id(tape): tape for _, tape, _ in symbolic}.values():
            own = [(index, monomial) for index, of, monomial in symbolic if of is tape]
            values = values_of((monomial for _, monomial in own), tape.values(grid))
            for (index, _), nbytes in zip(own, values, strict=True):
                table[index] = nbytes
        return [*known, *map(table.__getitem__, itertools.islice(self.buffers, len(known), None))]

    def plain_bytes(self, buffer: int) -> int:
        """The size in bytes of a buffer that must have the same size at every shape."""
        size = self.sizes[self.buffers[buffer]]
        assert isinstance(size, int)
        return size

    def plain_from(self, first: int) -> list[int]:
        """The sizes in bytes of all buffers from ``first`` on, which must be the same at every shape."""
        table = self.sizes
        sizes = [table[index] for index in self.buffers[first:]]
        assert set(map(type, sizes)) <= {int}
        return sizes  # type: ignore[return-value]  # as just asserted

    def buffer(self, nbytes: int, category: str, op: str) -> int:
        """Adds a buffer of `nbytes` bytes at every shape, with its category and operator; returns its number."""
        self.sizes.append(nbytes)
        self.buffers.append(len(self.sizes) - 1)
        self.category.append(category)
        self.op.append(op)
        return len(self.buffers) - 1

    def add_buffers(self, sizes: Sequence[int], category: str, op: str) -> range:
        """Adds a buffer for each of ``sizes``, as `buffer` does; returns their numbers."""
        first_size, first, count = len(self.sizes), len(self.buffers), len(sizes)
        self.sizes += sizes
        self.buffers += range(first_size, first_size + count)
        self.category += [category] * count
        self.op += [op] * count
        return range(first, first + count)

    def copy(self) -> Program:
        """A copy whose buffers can be added and resized without changing this program."""
        named = {kind: buffers.copy() for kind, buffers in self.named.items()}
        parts = self.buffers.copy(), self.category.copy(), self.op.copy(), self.kernel.copy(), self.sizes.copy()
        return Program(*parts, named)

    def resize(self, buffer: int, nbytes: int) -> None:
        """Sets the size of a buffer to `nbytes`, the same at every shape."""
        self.sizes.append(nbytes)
        self.buffers[buffer] = len(self.sizes) - 1

    def resize_all(self, sizes: Mapping[int, int]) -> None:
        """Sets the sizes of several buffers, as `resize` does. ``sizes``: buffer -> bytes."""
        first = len(self.sizes)
        self.sizes += sizes.values()
        self.buffers.update(dict(zip(sizes, range(first, len(self.sizes)), strict=True)))

    def unfold(self, tape: Tape, piece: str, counts: Sequence[int] | None = None, part: Part | None = None) -> Stage:
        """Lays out a piece of a tape (load, step, optimizer_first, optimizer, denoise, encode, decode) at full depth.

        ``counts``: blocks per run, by default the full model's. ``part``: set for the tape of a VAE or text encoder.
        Buffers are added to this program; the stage allocates and frees them. Raises a VplanError if the tape frees
        what was not allocated.
        """
        first_size = len(self.sizes)
        values = tape.values(part.grid) if part else []
        for size in tape.sizes:
            if isinstance(size, Growing):
                self.sizes.append(0)  # one for each block, see _Unfolding._grown_size
            else:
                self.sizes.append(size.value(values) * part.batch if part else (tape, size))
        depths = list(counts or [run.count for run in tape.runs])
        try:
            return _Unfolding(self, tape, first_size, depths, part).stage(piece)
        except KeyError as error:  # a block of a section, or a name
            raise tape.damaged(f"{piece} refers to {error.args[0]}, which is not there") from None

    def unfold_beside(self, tape: Tape, piece: str) -> Stage:
        """Lays out a piece of a second recording that shares the named buffers (gradients, the batch) of the first."""
        first = {kind: buffers.copy() for kind, buffers in self.named.items()}
        stage = self.unfold(tape, piece)
        same: dict[int, int] = {}
        for kind, buffers in first.items():
            now = self.named[kind]
            same |= {now[name]: buffer for name, buffer in buffers.items() if now[name] != buffer}
            now |= buffers
        return Stage(stage.name, [(moment, renamed_events(events, same)) for moment, events in stage.stretches])


def renamed_events(events: Iterable[int], renamed: Mapping[int, int]) -> list[int]:
    """Events with some buffers replaced by others."""
    return [renamed.get(event, event) if event >= 0 else ~renamed.get(~event, ~event) for event in events]


class Part(NamedTuple):
    """A part around the model (a VAE, a text encoder) whose tape is unfolded at a shape of its own."""

    name: str
    """distinguishes its tensors from the model's in ``Program.named``"""

    grid: Mapping[str, int]
    batch: int = 1
    """multiplies every size: how many recorded samples are processed at once"""

    def __hash__(self) -> int:
        return hash((self.name, *self.grid.items(), self.batch))


class _Unfolding:
    """One piece of a tape while it is laid out."""

    def __init__(self, program: Program, tape: Tape, first_size: int, counts: list[int], part: Part | None) -> None:
        self.program = program
        self.tape = tape
        self.first_size = first_size
        """index in the program's sizes of the tape's first"""
        self.counts = counts
        self.part = part
        self.values = tape.values(part.grid) if part else []
        self.kinds = [f"{kind} of {part.name}" if part else kind for kind in CATEGORIES]
        """per category: under which key of ``Program.named`` its tensors are"""
        self.sections: list[Section] = []
        self.first_buffers: list[dict[int, int]] = []
        """per section: block -> number of its first buffer"""
        self.sizes: dict[int, list[int]] = {}
        """id of a template's columns -> its sizes as the program numbers them"""
        self.reloaded: dict[int, int] = {}
        """event -> the same event of the buffer that had the name before: a weight that is cast away and stored anew"""

    def stage(self, piece: str) -> Stage:
        """The piece at full depth, a stretch per section and block."""
        stage = Stage(piece, [])
        self.sections = sections_of(self.tape, piece, self.part is not None)
        for section in self.sections:
            starts: dict[int, int] = {}
            self.first_buffers.append(starts)
            run = None if section.run is None else self.tape.runs[section.run]
            for block, template in in_order(section, self.counts):
                starts[block] = len(self.program.buffers)
                moment = Moment(piece, section.passes, run.module_list if run else "", run.start + block if run else -1)
                stage.stretches.append((moment, self._events(template, block)))
        return stage

    def _events(self, template: Template, block: int) -> list[int]:
        program, columns = self.program, columns_of(template, self.tape, self.part is not None)
        first = len(program.buffers)
        program.buffers += self._sizes(columns)
        program.category += columns.categories
        program.op += columns.ops
        for position, kernel in columns.kernels:
            program.kernel[first + position] = kernel
        for position, size in columns.growing:
            program.buffers[first + position] = self._grown_size(size, block)
        starts, here = [first], len(self.first_buffers) - 1
        starts += [  # negative, because ~(start + position) is ~position - start
            -self.first_buffers[here - back][target_block(mode, to, self.sections[here - back].run, block, self.counts)]
            for back, mode, to in columns.bases
        ]
        events = list(map(operator.add, map(starts.__getitem__, columns.origins), columns.offsets))
        self._name(columns, block, first, events)
        return list(map(self.reloaded.get, events, events)) if self.reloaded else events

    def _name(self, columns: TemplateColumns, block: int, first: int, events: list[int]) -> None:
        """Enters the named tensors of a template into the program, and puts those that it frees into its events."""
        for (category, mode, run, target), tensors in columns.named.items():
            buffers = self.program.named.setdefault(self.kinds[category], {})
            prefix = self._prefix(mode, run, target, block)
            may_return = category == 0 and self.part is None
            for at, position, leaf in tensors:
                name = prefix + leaf
                if position < 0:
                    events[at] = ~buffers[name]
                elif may_return and name in buffers:
                    self.reloaded[first + position] = buffers[name]
                    self.reloaded[~(first + position)] = ~buffers[name]
                else:
                    buffers[name] = first + position

    def _sizes(self, columns: TemplateColumns) -> list[int]:
        """A template's sizes as the program numbers them."""
        if id(columns) not in self.sizes:
            self.sizes[id(columns)] = [self.first_size + size for size in columns.sizes]
        return self.sizes[id(columns)]

    def _grown_size(self, index: int, block: int) -> int:
        """Index in the program's sizes of a growing size at a block."""
        size = self.tape.sizes[index]
        assert self.part and isinstance(size, Growing), "only the chunks of a VAE grow"
        self.program.sizes.append(size.value(self.values, block) * self.part.batch)
        return len(self.program.sizes) - 1

    def _prefix(self, mode: int, number: int, target: int, block: int) -> str:
        """What the names of a block's tensors begin with: "blocks.3."."""
        if number < 0:
            return ""
        run = self.tape.runs[number]
        return f"{run.module_list}.{run.start + target_block(mode, target, number, block, self.counts)}."
