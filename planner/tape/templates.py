"""A tape's templates as columns for laying out, and which block of a sweep uses which template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from planner.tape.format import (
    ATTENTION_KERNELS,
    CATEGORIES,
    EVENT_TYPES,
    FROM_LAST,
    HEAD,
    NO_BLOCK,
    RELATIVE,
    TAIL,
    Allocation,
    Free,
    NamedAllocation,
    NamedFree,
    Section,
    Tape,
    Template,
)

FREE, NAMED_FREE, NAMED_ALLOCATION = (len(kind._fields) for kind in (Free, NamedFree, NamedAllocation))
"""Numbers of fields, by which the types of events are distinguished."""

SIZE, CATEGORY, OP, KERNEL = map(Allocation._fields.index, ("size", "category", "op", "kernel"))
"""Field indices, the same for named and unnamed allocations."""


class TemplateColumns(NamedTuple):
    """A template's events as columns: everything that is the same for all blocks that use it, computed once.

    A buffer's number is that of the template's first buffer at a block, plus the position of its allocation. So an
    event of the program is ``start + offset`` for an allocation and ``~(start + position)`` = ``offset - start`` for a
    free, where the start is that of the section and block in which the freed buffer was allocated.
    """

    sizes: list[int]
    """per allocation: index into the tape's sizes"""
    categories: list[str]
    """per allocation"""
    ops: list[str]
    """per allocation"""
    bases: list[tuple[int, int, int]]
    """(back, mode, block) that frees refer to, see `planner.tape.format.Free`"""
    highest: list[int]
    """per base: the highest position freed from it"""
    origins: list[int]
    """per event: 0 for an allocation, n for a free of what the n-th of ``bases`` allocated"""
    positions: list[int]
    """per event: index among its template's allocations"""
    offsets: list[int]
    """per event: ``position`` for an allocation, ``~position`` for a free"""
    named: dict[tuple[int, int, int, int], list[tuple[int, int, str]]]
    """(category, mode, run, block) -> (index of the event, position or -1 for a free, name in its block) of tensors"""
    kernels: list[tuple[int, str]]
    """(position, attention kernel) of allocations that happen with that kernel only"""
    growing: list[tuple[int, int]]
    """(position, size) of allocations whose size grows from block to block"""

    @classmethod
    def of(cls, arrays: list[list[int]], tape: Tape, resident: bool) -> TemplateColumns:
        """The columns of `planner.tape.format.Template.arrays`. ``resident``: of a part around the model (VAE, text
        encoder), whose weights count as residents. Raises a LookupError, TypeError or ValueError for arrays that are
        not events of this tape."""
        # Tables as dicts, so that a negative index is an error too.
        categories = dict(enumerate(("residents" if resident else CATEGORIES[0], *CATEGORIES[1:])))
        ops, names, kernels = (dict(enumerate(table)) for table in (tape.ops, tape.names, ATTENTION_KERNELS))
        allocations: list[list[int]] = []
        named: dict[tuple[int, int, int, int], list[tuple[int, int, str]]] = {}
        bases: dict[tuple[int, int, int], int] = {}
        highest: list[int] = []
        origins: list[int] = []
        positions: list[int] = []
        offsets: list[int] = []
        for array in arrays:
            if len(array) == FREE:
                back, mode, block, position = array
                if not back and (mode == NO_BLOCK or (mode == RELATIVE and not block)):  # `Free.is_own`
                    position = len(allocations) - 1 - position
                base = (back, mode, block)
                origin = bases.get(base)
                if origin is None:
                    origin = bases[base] = len(bases) + 1
                    highest.append(position)
                elif position > highest[origin - 1]:
                    highest[origin - 1] = position
                origins.append(origin)
                positions.append(position)
                offsets.append(~position)
                continue
            position = len(allocations)
            if len(array) == NAMED_FREE:
                _, category, mode, run, block, name = array
                named.setdefault((category, mode, run, block), []).append((len(origins), -1, names[name]))
                position = 0  # stands in: the layout puts the buffer of that name in its place
            else:
                if len(array) == NAMED_ALLOCATION:
                    _, category, _, _, _, mode, run, block, name = array
                    named.setdefault((category, mode, run, block), []).append((len(origins), position, names[name]))
                allocations.append(array)
            origins.append(0)
            positions.append(position)
            offsets.append(position)
        columns = cls(
            [array[SIZE] for array in allocations],
            [categories[array[CATEGORY]] for array in allocations],
            [ops[array[OP]] for array in allocations],
            list(bases),
            highest,
            origins,
            positions,
            offsets,
            named,
            [(position, kernels[array[KERNEL]]) for position, array in enumerate(allocations) if array[KERNEL]],
            [(position, array[SIZE]) for position, array in enumerate(allocations) if array[SIZE] in tape.growing],
        )
        columns._check(arrays, tape)
        return columns

    def _check(self, arrays: list[list[int]], tape: Tape) -> None:
        modes, runs = range(FROM_LAST + 1), range(-1, len(tape.runs))
        holds = (
            {*map(len, arrays)} <= EVENT_TYPES.keys()
            and {*map(type, chain.from_iterable(arrays))} <= {int}  # true is an index to Python, and a mask to numpy
            and min(self.sizes, default=0) >= 0
            and max(self.sizes, default=-1) < len(tape.sizes)
            and min(self.positions, default=0) >= 0
            and all(back >= 0 and mode in modes for back, mode, _ in self.bases)
            and all(category in range(len(CATEGORIES)) for category, _, _, _ in self.named)
            and all(mode in modes and run in runs for _, mode, run, _ in self.named)
        )
        if not holds:
            raise ValueError


def columns_of(template: Template, tape: Tape, resident: bool = False) -> TemplateColumns:
    """The template's columns (cached). Templates with the same events share them, which half of them do.

    Raises a VplanError for a template whose arrays are not events of the tape.
    """
    arrays = template.arrays
    key = (id(arrays), resident)
    if key not in tape.columns:
        # An optimizer inside backward has thousands of short templates: what their ends say leaves few to compare.
        looks = repr((arrays[:1], arrays[-1:], len(arrays), resident))
        of_these_looks = tape.alike.setdefault(looks, [])
        columns = next((columns for others, columns in of_these_looks if others == arrays), None)
        if columns is None:
            try:
                columns = TemplateColumns.of(arrays, tape, resident)
            except (LookupError, TypeError, ValueError) as error:
                raise tape.damaged(type(error).__name__) from None
            of_these_looks.append((arrays, columns))
        tape.columns[key] = columns
    shared: TemplateColumns = tape.columns[key]
    return shared


def sections_of(tape: Tape, piece: str, resident: bool = False) -> list[Section]:
    """The sections of a piece. Raises a VplanError if the tape lacks it, or frees what no section allocates."""
    if piece not in tape.pieces:
        raise tape.damaged(f"no {piece}")
    sections = tape.pieces[piece]
    if piece not in tape.sound:
        allocations: list[int] = []  # of each section's longest template
        for section in sections:
            templates = [columns_of(template, tape, resident) for template in section.templates]
            allocations.append(max(len(columns.sizes) for columns in templates))
            for columns in templates:
                for (back, _, _), position in zip(columns.bases, columns.highest, strict=True):
                    if back >= len(allocations) or position >= allocations[-1 - back]:
                        raise tape.damaged(f"{piece} frees what it does not allocate")
        tape.sound.add(piece)
    return sections


def in_order(section: Section, counts: Sequence[int]) -> Iterator[tuple[int, Template]]:
    """(block or -1 outside the blocks, template) in the section's order. ``counts``: blocks per run."""
    if section.run is None:
        yield -1, section.templates[0]
        return
    count = counts[section.run]
    if not section.step:
        yield section.block % count, section.templates[0]
        return
    for block in range(count)[:: section.step]:
        yield block, section.templates[kept_template(section, block, count)]


def target_block(mode: int, target: int, run: int | None, block: int, counts: Sequence[int]) -> int:
    """The block to which the address of an event at ``block`` refers; -1 for none. ``run``: of the section it refers
    to."""
    if mode == NO_BLOCK or run is None:
        return -1
    return block + target if mode == RELATIVE else target % counts[run]


def kept_template(section: Section, block: int, count: int) -> int:
    """Index of the template that a block of a run of ``count`` blocks uses in a sweep.

    For a sweep over blocks that differ, all of which are recorded, ``order`` has it for each block.
    """
    if section.order is not None:
        assert len(section.order) == count, "a sweep over unlike blocks has one depth"
        return section.order[block]
    return template_of(block, count, len(section.templates))


def template_of(block: int, count: int, kept: int) -> int:
    """Index of the one of a sweep's ``kept`` templates that a block uses: one of the first, the middle one, or one of
    the last two."""
    if count == kept:
        return block
    head = kept - 1 - TAIL
    assert head >= HEAD and count >= head + TAIL, (kept, count)
    if block < head:
        return block
    return block - count + kept if block >= count - TAIL else head
