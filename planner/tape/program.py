"""A tape laid out at full depth: numbered buffers, allocated and freed in the order the real step does it.

A Program holds the buffers of all stages of a run; a Stage is one piece of a tape (load, step, optimizer), block by
block.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from planner.tape.cow_list import Grown
from planner.tape.format import CATEGORIES, Growing, Monomial, Tape
from planner.tape.templates import Pattern, in_order, pattern_of, target_block

Block = tuple[str, int]
"""(module list, index)"""


class Moment(NamedTuple):
    """Where in the run a stretch of events belongs."""

    piece: str
    passes: str
    module_list: str
    """"" outside the repeated blocks"""

    block: int


@dataclass
class Stage:
    """One piece at full depth: stretches of events, each with its moment.

    An event >= 0 allocates that buffer, < 0 frees ``~event``. A buffer may be made again in a later round of the stage.
    Copies of a stage share their lists of events, so a stretch is never changed in place, only put in another's place.
    """

    name: str
    stretches: list[tuple[Moment, list[int]]]

    @property
    def ops(self) -> list[int]:
        """All events in order."""
        return list(itertools.chain.from_iterable(events for _, events in self.stretches))

    def copy(self) -> Stage:
        """One whose stretches can be put in others' places."""
        return Stage(self.name, self.stretches.copy())

    def moment(self, index: int) -> Moment:
        """The moment of the index-th event."""
        for moment, events in self.stretches:
            if index < len(events):
                return moment
            index -= len(events)
        raise IndexError(index)


@dataclass
class Program:
    """Numbered buffers, and stages that allocate and free them in the order a real run does."""

    buffers: Grown[int] = field(default_factory=Grown)
    """Per buffer: index into ``sizes``."""

    category: Grown[str] = field(default_factory=Grown)
    """Per buffer: one of CATEGORIES, or of what strategies add (residents, buckets)."""

    op: Grown[str] = field(default_factory=Grown)
    """Per buffer: the operator that made it."""

    kernel: dict[int, str] = field(default_factory=dict)
    """Buffer -> the attention kernel without which it is not there, of those that depend on one."""

    sizes: list[tuple[Tape, Monomial] | int] = field(default_factory=list)
    """Symbolic sizes of the tapes, and plain bytes."""

    named: dict[str, dict[str, int]] = field(default_factory=dict)
    """Category -> full name -> buffer, of what lives across stages: weights, gradients, optimizer states, the batch."""

    def bytes_of(self, grid: Mapping[str, int]) -> list[int]:
        """The size of every buffer at a shape."""
        values: dict[int, list[int]] = {}
        table = []
        for size in self.sizes:
            if isinstance(size, int):
                table.append(size)
            else:
                tape, monomial = size
                if id(tape) not in values:
                    values[id(tape)] = tape.values(grid)
                table.append(monomial.value(values[id(tape)]))
        return [table[index] for index in self.buffers]

    def plain_bytes(self, buffer: int) -> int:
        """The size of a buffer that is the same at every shape."""
        size = self.sizes[self.buffers[buffer]]
        assert isinstance(size, int)
        return size

    def plain_from(self, first: int) -> list[int]:
        """The same of all buffers from ``first`` on."""
        sizes = self.sizes
        found = [sizes[index] for index in self.buffers[first:]]
        assert all(type(size) is int for size in found)
        return found  # type: ignore[return-value]  # as just asserted

    def buffer(self, nbytes: int, category: str, op: str) -> int:
        """A new buffer of plain bytes; returns its number."""
        self.sizes.append(nbytes)
        self.buffers.append(len(self.sizes) - 1)
        self.category.append(category)
        self.op.append(op)
        return len(self.buffers) - 1

    def copy(self) -> Program:
        """One to add to and to resize in."""
        named = {kind: buffers.copy() for kind, buffers in self.named.items()}
        parts = self.buffers.copy(), self.category.copy(), self.op.copy(), self.kernel.copy(), self.sizes.copy()
        return Program(*parts, named)

    def resize(self, buffer: int, nbytes: int) -> None:
        """Gives a buffer another size, the same at every shape."""
        self.sizes.append(nbytes)
        self.buffers[buffer] = len(self.sizes) - 1

    def unfold(self, tape: Tape, piece: str, counts: Sequence[int] | None = None, part: Part | None = None) -> Stage:
        """Lays a piece (load, step, optimizer_first, optimizer, denoise, encode or decode) out.

        ``counts``: blocks per run, else the full model's. ``part``: of something beside the model, at its own shape.
        """
        first_size = len(self.sizes)
        values = tape.values(part.grid) if part else []
        for size in tape.sizes:
            if isinstance(size, Growing):
                self.sizes.append(0)  # one for each block, see _Piece._size
            else:
                self.sizes.append(size.value(values) * part.batch if part else (tape, size))
        counted = list(counts or [run.count for run in tape.runs])
        return _Piece(self, tape, first_size, counted, part).play(piece)


class Part(NamedTuple):
    """Something beside the model (a VAE, a text encoder) whose tape is unfolded at a shape of its own."""

    name: str
    """keeps its tensors apart from the model's in ``Program.named``"""

    grid: Mapping[str, int]
    batch: int = 1
    """how many of what was recorded run side by side: every size is multiplied"""

    def __hash__(self) -> int:
        return hash((self.name, *self.grid.items(), self.batch))


class _Piece:
    """One piece being laid out."""

    def __init__(self, program: Program, tape: Tape, first_size: int, counts: list[int], part: Part | None) -> None:
        self.program = program
        self.tape = tape
        self.first_size = first_size
        self.counts = counts
        self.part = part
        self.kinds = [f"{kind} of {part.name}" if part else kind for kind in CATEGORIES]
        self.items: list[dict[str, Any]] = []
        self.made: list[dict[int, int]] = []
        """Per item: block -> number of its first buffer."""

        self.sizes: dict[int, list[int]] = {}
        self.again: dict[int, int] = {}
        """Event -> the same of the buffer of its name that an earlier piece made: a weight that was cast away and
        stored anew."""

    def play(self, piece: str) -> Stage:
        stage = Stage(piece, [])
        self.items = self.tape.pieces[piece]
        for item in self.items:
            bases: dict[int, int] = {}
            self.made.append(bases)
            run = None if item["run"] is None else self.tape.runs[item["run"]]
            for block, template in in_order(item, self.counts):
                bases[block] = len(self.program.buffers)
                moment = Moment(piece, item["pass"], run.module_list if run else "", run.start + block if run else -1)
                stage.stretches.append((moment, self._events(template, block)))
        return stage

    def _events(self, template: Mapping[str, Any], block: int) -> list[int]:
        program, pattern = self.program, pattern_of(template, self.tape, self.part is not None)
        first = len(program.buffers)
        program.buffers += self._sizes(pattern)
        program.category += pattern.categories
        program.op += pattern.ops
        for position, kernel in pattern.kernels:
            program.kernel[first + position] = kernel
        for position, size in pattern.growing:
            program.buffers[first + position] = self._grown(size, block)
        starts = [first]  # ~(start + position) is ~position - start
        starts += [
            -self.made[item][target_block(mode, to, self.items[item]["run"], block, self.counts)]
            for item, mode, to in pattern.bases
        ]
        events = list(map(operator.add, map(starts.__getitem__, pattern.origins), pattern.offsets))
        for (category, mode, run, target), tensors in pattern.named.items():
            known = program.named.setdefault(self.kinds[category], {})
            prefix = self._prefix(mode, run, target, block)
            may_return = category == 0 and self.part is None
            for at, position, leaf in tensors:
                name = prefix + leaf
                if position < 0:
                    events[at] = ~known[name]
                elif may_return and name in known:
                    self.again[first + position] = known[name]
                    self.again[~(first + position)] = ~known[name]
                else:
                    known[name] = first + position
        return list(map(self.again.get, events, events)) if self.again else events

    def _sizes(self, pattern: Pattern) -> list[int]:
        """Its sizes as the program numbers them."""
        if id(pattern) not in self.sizes:
            self.sizes[id(pattern)] = [self.first_size + size for size in pattern.sizes]
        return self.sizes[id(pattern)]

    def _grown(self, index: int, block: int) -> int:
        size = self.tape.sizes[index]
        assert self.part and isinstance(size, Growing), "only the chunks of a VAE grow"
        self.program.sizes.append(size.value(self.tape.values(self.part.grid), block) * self.part.batch)
        return len(self.program.sizes) - 1

    def _prefix(self, mode: int, number: int, target: int, block: int) -> str:
        """What the names of a block's tensors begin with."""
        if number < 0:
            return ""
        run = self.tape.runs[number]
        return f"{run.module_list}.{run.start + target_block(mode, target, number, block, self.counts)}."
