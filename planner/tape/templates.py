"""A tape's templates taken apart, and which block uses which."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from planner.tape.format import CATEGORIES, HEAD, KERNELS, TAIL, Tape

Item = Mapping[str, Any]
"""A part of a tape's piece: one template outside the blocks, or those of a sweep over a run of blocks."""


class Pattern(NamedTuple):
    """A template as it is laid out block by block; what it allocates is numbered by position.

    On a tape events are [size, category, op, kernel, named, (mode, run, block, name)], [item, mode, block, position]
    for a free, or [-1, category, mode, run, block, name] for the free of what another piece made.
    """

    sizes: list[int]
    categories: list[str]
    ops: list[str]
    bases: list[tuple[int, int, int]]
    """(item, mode, block) of what is freed"""
    origins: list[int]
    """Per event: 0 allocates, n frees what the n-th of ``bases`` made"""
    positions: list[int]
    """Per event: which of its template's allocations"""
    offsets: list[int]
    """Per event: what is added to the first buffer's number, ``~position`` for a free"""
    named: dict[tuple[int, int, int, int], list[tuple[int, int, str]]]
    """(category, mode, run, block) -> (which event, position or -1 for a free, name in its block)"""
    kernels: list[tuple[int, str]]
    growing: list[tuple[int, int]]
    """(position, size)"""

    @classmethod
    def of(cls, template: list[list[int]], tape: Tape, beside: bool) -> Pattern:
        """``beside``: whether it is of something beside the model, whose weights count as residents."""
        categories = ("residents" if beside else CATEGORIES[0], *CATEGORIES[1:])
        made: list[list[int]] = []
        named: dict[tuple[int, int, int, int], list[tuple[int, int, str]]] = {}
        origins: list[int] = []
        positions: list[int] = []
        offsets: list[int] = []
        bases: dict[tuple[int, int, int], int] = {}
        for event in template:
            if len(event) == 4:
                item, mode, block, position = event
                origins.append(bases.setdefault((item, mode, block), len(bases) + 1))
                positions.append(position)
                offsets.append(~position)
                continue
            position = len(made)
            if len(event) == 6:
                _, category, mode, run, block, leaf = event
                named.setdefault((category, mode, run, block), []).append((len(origins), -1, tape.names[leaf]))
                position = 0
            else:
                if event[4]:
                    mode, run, block, leaf = event[5:]
                    names = named.setdefault((event[1], mode, run, block), [])
                    names.append((len(origins), position, tape.names[leaf]))
                made.append(event)
            origins.append(0)
            positions.append(position)
            offsets.append(position)
        return cls(
            [event[0] for event in made],
            [categories[event[1]] for event in made],
            [tape.ops[event[2]] for event in made],
            list(bases),
            origins,
            positions,
            offsets,
            named,
            [(position, KERNELS[event[3]]) for position, event in enumerate(made) if event[3]],
            [(position, event[0]) for position, event in enumerate(made) if event[0] in tape.growing],
        )


def pattern_of(template: Mapping[str, Any], tape: Tape, beside: bool = False) -> Pattern:
    """The template, taken apart once; templates with the same events, which half of them are, share it."""
    key = (id(template), beside)
    if key not in tape.patterns:
        events = template["events"]
        as_long = tape.alike.setdefault((len(events), beside), [])
        found = next((pattern for known, pattern in as_long if known == events), None)
        if found is None:
            found = Pattern.of(events, tape, beside)
            as_long.append((events, found))
        tape.patterns[key] = found
    known: Pattern = tape.patterns[key]
    return known


def in_order(item: Item, counts: Sequence[int]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(block, -1 outside the blocks; its template) in the order an item walks them; ``counts``: blocks per run."""
    templates, run = item["templates"], item["run"]
    if run is None:
        yield -1, templates[0]
    elif not item.get("step"):
        yield item["block"] % counts[run], templates[0]
    else:
        count = counts[run]
        for block in range(count) if item["step"] > 0 else range(count - 1, -1, -1):
            yield block, templates[kept_template(item, block, count)]


def target_block(mode: int, target: int, run: int | None, block: int, counts: Sequence[int]) -> int:
    """The block an address means. Mode 0: none; 1: relative to this block; 2: from the first; 3: from the last."""
    if mode == 0 or run is None:
        return -1
    return block + target if mode == 1 else target % counts[run]


def kept_template(item: Mapping[str, Any], block: int, count: int) -> int:
    """Which template of a sweep a block of a run of ``count`` uses.

    A sweep over unlike blocks, all of them recorded, says so block by block in ``order``.
    """
    if "order" in item:
        assert len(item["order"]) == count, "a sweep over unlike blocks has one depth"
        return int(item["order"][block])
    return template_of(block, count, len(item["templates"]))


def template_of(block: int, count: int, kept: int) -> int:
    """Which kept template a block of a sweep uses: one of the first, a middle, or one of the last two."""
    if count == kept:
        return block
    head = kept - 1 - TAIL
    assert head >= HEAD and count >= head + TAIL, (kept, count)
    if block < head:
        return block
    return block - count + kept if block >= count - TAIL else head
