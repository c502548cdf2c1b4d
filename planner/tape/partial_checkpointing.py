"""Checkpointing of only the first blocks, combined from two recordings: without checkpointing, and of every block.

Forward runs the same operators either way, so both recordings make the same allocations there and differ only in what
they free; backward of each block comes from one or the other. Tensors that cross between a checkpointed block and one
that is not are matched across the recordings: in forward by their order of allocation, in backward by their size among
those that outlive their block. A tensor held by several blocks is freed by the last one.
tests/planner/tape/test_partial_checkpointing.py compares the result with direct recordings.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from planner.errors import NotRecordedError, VplanError
from planner.tape.program import Block, Moment, Program, Stage, renamed_events

Pair = tuple[Moment, list[int], list[int]]
"""A moment, and its events without checkpointing and with it."""


class Crossing(NamedTuple):
    """Buffers that a stretch makes or frees and on which it must agree with other stretches, or with its counterpart in
    the other recording."""

    made: frozenset[int]
    freed: frozenset[int]


class BothSteps:
    """A step without and with checkpointing, side by side: the part that is the same for any number of blocks."""

    def __init__(self, program: Program, model: str, plain: Stage, full: Stage) -> None:
        """``plain`` and ``full``: the steps of the model's two recordings, the second by `Program.unfold_beside`.

        Raises a NotRecordedError if the two recordings differ in forward.
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
        """(the step with the first ``count`` blocks checkpointed, those blocks). Callers must not modify them.

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
        """Keeps only the last free of each buffer, removes frees of buffers that were not made, and frees those that no
        chosen stretch frees at the end of the first stretch that does in either recording. Weights are exempt: they may
        be cast, freed and made again."""
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
    """For every pair of stretches, the buffers that are freed somewhere, without those that both recordings make and
    free within one and the same stretch."""
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
    """The blocks that backward recomputes, in the order they run."""
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
    """Pairs the stretches of the same moment. If one recording has none (because nothing happens there), its events are
    empty."""
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
    """A number for each buffer, equal for buffers of the same size, across tapes."""
    numbers: dict[object, int] = {}
    keys = (size if isinstance(size, int) else (size[0].atoms, size[1]) for size in program.sizes)
    table = [numbers.setdefault(key, len(numbers)) for key in keys]
    return [table[index] for index in program.buffers]


def _same_in_forward(program: Program, model: str, pairs: list[Pair], sizes: list[int]) -> dict[int, int]:
    """Buffer of the checkpointed recording's forward -> the other recording's, in order of allocation."""
    forward = [pair[1:] for pair in pairs if pair[0].passes == "forward"]
    ours, theirs = ([event for pair in forward for event in pair[which] if event >= 0] for which in (0, 1))
    operators = list(program.op)
    made = [[(operators[buffer], sizes[buffer]) for buffer in buffers] for buffers in (ours, theirs)]
    if made[0] != made[1]:
        fault = f"{model} does other work in forward when it is checkpointed, so a part cannot be put together"
        raise NotRecordedError(fault, "use --gradient-checkpointing full or none")
    return dict(zip(theirs, ours, strict=True))


def _same_in_backward(pairs: list[Pair], sizes: list[int]) -> dict[int, int]:
    """The same for buffers that outlive their stretch in backward (gradients for the previous block), matched by size
    and order. Gradients of weights already share their buffers (`Program.unfold_beside`) and are left out."""
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
