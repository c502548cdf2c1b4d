"""Change and peak of the allocated bytes over a tape of a text encoder or a VAE, without laying it out.

A clip is encoded in up to 250 chunks, and laying out gives every chunk its own buffers. The effect of a chunk on the
allocated bytes is the same for all chunks, except for the few tensors that grow from one to the next, so the events
between those tensors are summed up once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from planner.allocator.caching import BLOCK_ROUND_BYTES
from planner.tape.format import Growing, Tape
from planner.tape.program import Part
from planner.tape.templates import TemplateColumns, columns_of, in_order, sections_of, target_block


class Level(NamedTuple):
    """The effect of events on the allocated bytes, with buffers rounded up to the allocator's blocks."""

    rise: int
    """change after the last event"""
    peak: int
    """largest change on the way; 0 without events"""


class _Between(NamedTuple):
    """The events of a template up to the next one whose size depends on the block."""

    level: Level
    event: int
    """index of that event; -1 at the template's end"""


class PartLevels:
    """The levels of one part's pieces."""

    def __init__(self, tape: Tape, part: Part) -> None:
        self.tape = tape
        self.part = part
        self.values = tape.values(part.grid)
        self.outputs: dict[str, int] = {}
        """bytes of the named tensors outside the blocks allocated so far"""
        self.frees_by_name = False
        """whether a tensor of another piece was freed by name so far; no level includes it"""
        self._whole: dict[int, int] = {}
        """index into the tape's sizes -> bytes, rounded up to the allocator's blocks"""
        self._between: dict[tuple[int, ...], list[_Between]] = {}

    def piece(self, name: str, counts: Sequence[int] | None = None) -> Level:
        """The level of a piece. ``counts``: blocks per run, by default the full model's. Raises a VplanError if the
        tape frees what was not allocated."""
        try:
            return self._piece(name, list(counts or [run.count for run in self.tape.runs]))
        except KeyError as error:
            raise self.tape.damaged(f"{name} refers to {error.args[0]}, which is not there") from None

    def _piece(self, name: str, counts: list[int]) -> Level:
        sections = sections_of(self.tape, name, resident=True)
        there: list[dict[int, TemplateColumns]] = []
        level = peak = 0
        for section in sections:
            here: dict[int, TemplateColumns] = {}
            there.append(here)
            for block, template in in_order(section, counts):
                columns = here[block] = columns_of(template, self.tape, resident=True)
                if section.run is None:
                    self._name(columns)
                rows = [(columns, block)]
                for back, mode, to in columns.bases:
                    at = target_block(mode, to, sections[len(there) - 1 - back].run, block, counts)
                    rows.append((there[-1 - back][at], at))
                for between, event in self._stretch(rows):
                    peak = max(peak, level + between.peak)
                    level += between.rise
                    if event >= 0:
                        row, position = columns.origins[event], columns.positions[event]
                        made, at = rows[row]
                        nbytes = whole_blocks(self._bytes(made.sizes[position], at))
                        level += -nbytes if row else nbytes
                        peak = max(peak, level)
        return Level(level, peak)

    def _stretch(self, rows: list[tuple[TemplateColumns, int]]) -> list[_Between]:
        """The levels of a template between the events of growing tensors. ``rows``: its own columns, then those of the
        templates whose tensors it frees, each with the block."""
        key = tuple(id(columns) for columns, _ in rows)
        if key not in self._between:
            columns = rows[0][0]
            gone = {at for tensors in columns.named.values() for at, position, _ in tensors if position < 0}
            self.frees_by_name |= bool(gone)
            growing = [{position for position, _ in each.growing} for each, _ in rows]
            sizes = [[self._whole_bytes(size) for size in each.sizes] for each, _ in rows]
            changes, apart = [], []
            for event, (row, position) in enumerate(zip(columns.origins, columns.positions, strict=True)):
                if position in growing[row] and event not in gone:
                    apart.append(event)
                changes.append(0 if event in gone else -sizes[row][position] if row else sizes[row][position])
            self._between[key] = list(_parts(changes, apart))
        return self._between[key]

    def _name(self, columns: TemplateColumns) -> None:
        for tensors in columns.named.values():
            for _, position, leaf in tensors:
                if position >= 0:
                    self.outputs[leaf] = self._bytes(columns.sizes[position], -1)

    def _whole_bytes(self, index: int) -> int:
        if index not in self._whole:
            grows = index in self.tape.growing
            self._whole[index] = 0 if grows else whole_blocks(self._bytes(index, -1))
        return self._whole[index]

    def _bytes(self, index: int, block: int) -> int:
        size = self.tape.sizes[index]
        nbytes = size.value(self.values, block) if isinstance(size, Growing) else size.value(self.values)
        return nbytes * self.part.batch


def _parts(changes: list[int], apart: list[int]) -> Iterator[_Between]:
    """The levels between the events at the indices ``apart``, and after the last of them."""
    start = 0
    for event in (*apart, len(changes)):
        between = changes[start:event]
        level = Level(sum(between), max(itertools.accumulate(between), default=0))
        yield _Between(level, event if event < len(changes) else -1)
        start = event + 1


def whole_blocks(nbytes: int) -> int:
    """Bytes rounded up to the allocator's blocks."""
    return -(-nbytes // BLOCK_ROUND_BYTES) * BLOCK_ROUND_BYTES
