"""Checkpointing of the first blocks only, put together from two recordings: nothing checkpointed, and every block.

Forward runs the same operators either way, so both recordings allocate the same there and differ in what they free;
backward of a block is the one or the other. What crosses the border between a block that is checkpointed and one that
is not is found by what it is: in forward by its place among its block's allocations, in backward by its size among
what leaves its block. Of a tensor that several blocks hold the last one frees it.
tests/planner/tape/test_partial_checkpointing.py compares with direct recordings.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from planner.errors import NotRecordedError, VplanError
from planner.tape.program import Block, Moment, Program, Stage, renamed_events

Pair = tuple[Moment, list[int], list[int]]
"""A moment, and its events without checkpointing and with it."""


class Crossing(NamedTuple):
    """Buffers that one stretch makes or frees and that the other stretches, or its other recording, must agree on."""

    made: frozenset[int]
    freed: frozenset[int]


class BothSteps:
    """A step without checkpointing and with it, side by side: what is the same for any number of blocks."""

    def __init__(self, program: Program, model: str, plain: Stage, full: Stage) -> None:
        """``plain`` and ``full``: the step of the model's either recording, the second unfolded beside the first.

        Raises a NotRecordedError where the two recordings do not walk alike.
        """
        pairs = list(_pairs(plain, full))
        self.full = full
        self.blocks = checkpointed_blocks(pairs)
        sizes = _sizes(program)
        renamed = _same_in_forward(program, model, pairs, sizes) | _same_in_backward(pairs, sizes)
        self.pairs = [(moment, events, renamed_events(recomputed, renamed)) for moment, events, recomputed in pairs]
        self.crossing = _crossing(self.pairs)
        self.weights = frozenset(program.named["weight"].values())
        self._steps: dict[int, tuple[Stage, frozenset[Block]]] = {}

    def first(self, count: int) -> tuple[Stage, frozenset[Block]]:
        """(the step in which the first ``count`` blocks are checkpointed, those blocks). Not to be changed.

        Raises a VplanError for more blocks than there are.
        """
        if count not in self._steps:
            self._steps[count] = self._first(count)
        return self._steps[count]

    def _first(self, count: int) -> tuple[Stage, frozenset[Block]]:
        blocks = self.blocks
        if count > len(blocks):
            fault = f"checkpointed_blocks {count}: the model has {len(blocks)} blocks that can be checkpointed"
            raise VplanError(fault, f"use at most {len(blocks)}, or --gradient-checkpointing full")
        chosen = frozenset(blocks[:count])
        if len(chosen) == len(blocks):
            return self.full, chosen
        sides = [int(_block(moment) in chosen) for moment, _, _ in self.pairs]
        stretches = [
            (moment, recomputed if side else events)
            for (moment, events, recomputed), side in zip(self.pairs, sides, strict=True)
        ]
        self._free_once(stretches, sides)
        return Stage("step", stretches), chosen

    def _free_once(self, stretches: list[tuple[Moment, list[int]]], sides: list[int]) -> None:
        """Leaves the last free of everything, takes away those of what was not made, and frees what nobody holds any
        more where either recording does, a little late. Weights that are cast away come back within a stretch."""
        chosen = [crossing[side] for crossing, side in zip(self.crossing, sides, strict=True)]
        made = frozenset().union(*(crossing.made for crossing in chosen))
        last = {buffer: position for position, crossing in enumerate(chosen) for buffer in crossing.freed}
        lost = made - last.keys()
        for position, crossing in enumerate(chosen):
            others = crossing.freed - self.weights
            gone = {~buffer for buffer in others if buffer not in made or last[buffer] != position}
            late = lost & (self.crossing[position][0].freed | self.crossing[position][1].freed)
            if gone or late:
                moment, events = stretches[position]
                kept = [event for event in events if event not in gone]
                stretches[position] = (moment, [*kept, *(~buffer for buffer in sorted(late))])
                lost -= late


def _crossing(pairs: list[Pair]) -> list[tuple[Crossing, Crossing]]:
    """Of every pair of stretches the buffers that are freed somewhere and are not made and freed in one stretch alone,
    in both recordings alike."""
    made = [[frozenset(event for event in events if event >= 0) for events in pair[1:]] for pair in pairs]
    freed = [[frozenset(~event for event in events if event < 0) for events in pair[1:]] for pair in pairs]
    places: dict[int, set[int]] = {}
    crossing: set[int] = set()
    for position, sides in enumerate(freed):
        for side, buffers in enumerate(sides):
            crossing |= buffers ^ made[position][side]
            for buffer in buffers:
                places.setdefault(buffer, set()).add(position)
    crossing |= {buffer for buffer, found in places.items() if len(found) > 1}
    crossing &= places.keys()
    return [
        (
            Crossing(made[at][0] & crossing, freed[at][0] & crossing),
            Crossing(made[at][1] & crossing, freed[at][1] & crossing),
        )
        for at in range(len(pairs))
    ]


def checkpointed_blocks(pairs: list[Pair]) -> list[Block]:
    """The blocks of which checkpointing keeps less, in the order they run."""
    found: dict[Block, None] = {}
    for moment, events, recomputed in pairs:
        if moment.passes == "backward" and moment.block >= 0 and _allocations(recomputed) > _allocations(events):
            found[_block(moment)] = None
    ran = dict.fromkeys(_block(moment) for moment, _, _ in pairs if moment.passes == "forward" and moment.block >= 0)
    return [block for block in ran if block in found]


def _allocations(events: list[int]) -> int:
    return sum(event >= 0 for event in events)


def _block(moment: Moment) -> Block:
    return moment.module_list, moment.block


def _pairs(without: Stage, with_it: Stage) -> Iterator[Pair]:
    """Stretches of the same moment side by side; where a recording has none (nothing is freed there), an empty one."""
    ours, theirs = without.stretches.copy(), with_it.stretches.copy()
    while ours or theirs:
        one, other = (stretches[0][0][1:] if stretches else None for stretches in (ours, theirs))
        if one == other:
            (moment, events), (_, recomputed) = ours.pop(0), theirs.pop(0)
            yield moment, events, recomputed
        elif one is None or any(one == moment[1:] for moment, _ in theirs):
            moment, recomputed = theirs.pop(0)
            yield moment, [], recomputed
        else:
            moment, events = ours.pop(0)
            yield moment, events, []


def _sizes(program: Program) -> list[int]:
    """For each buffer a number that those of the same size share, of whatever tape."""
    numbers: dict[object, int] = {}
    keys = (size if isinstance(size, int) else (size[0].atoms, size[1]) for size in program.sizes)
    table = [numbers.setdefault(key, len(numbers)) for key in keys]
    return [table[index] for index in program.buffers]


def _same_in_forward(program: Program, model: str, pairs: list[Pair], sizes: list[int]) -> dict[int, int]:
    """A buffer of the checkpointed recording's forward -> the other's, one by one in order."""
    forward = [pair[1:] for pair in pairs if pair[0].passes == "forward"]
    ours, theirs = ([event for pair in forward for event in pair[which] if event >= 0] for which in (0, 1))
    operators = list(program.op)
    made = [[(operators[buffer], sizes[buffer]) for buffer in buffers] for buffers in (ours, theirs)]
    if made[0] != made[1]:
        fault = f"{model} does other work in forward when it is checkpointed, so a part cannot be put together"
        raise NotRecordedError(fault, "use --gradient-checkpointing full or none")
    return dict(zip(theirs, ours, strict=True))


def _same_in_backward(pairs: list[Pair], sizes: list[int]) -> dict[int, int]:
    """The same of what leaves its stretch in backward: gradients for the block before, by size and order. Those of
    weights are one and the same already (`Program.unfold_beside`), and no other buffer may take their place."""
    found: dict[int, int] = {}
    for moment, events, recomputed in pairs:
        if moment.passes != "backward":
            continue
        waiting: dict[int, list[int]] = {}
        leaving, others = _leaving(events), _leaving(recomputed)
        same = set(leaving) & set(others)
        for buffer in leaving:
            if buffer not in same:
                waiting.setdefault(sizes[buffer], []).append(buffer)
        for buffer in others:
            if buffer not in same and (ours := waiting.get(sizes[buffer])):
                found[buffer] = ours.pop(0)
    return found


def _leaving(events: list[int]) -> list[int]:
    gone = {~event for event in events if event < 0}
    return [event for event in events if event >= 0 and event not in gone]
