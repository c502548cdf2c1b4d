"""Where the backward of a checkpointed block recomputes it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from planner.layout.checkpoints.block_inputs import block_inputs
from planner.layout.run import Run
from planner.tape.program import Block


class Recomputation(NamedTuple):
    """Where a block's recomputation begins and ends among the events of its backward, without the frees of its
    inputs."""

    begins: int
    ends: int | None
    """None where the block's input may be needed for longer than this stretch"""


Recomputations = tuple[Recomputation | None, ...]
"""What `recomputation` says of one of each of `alike_stretches`, by their numbers."""


def at_stretch(found: Recomputation | None, event_count: int, is_last: bool) -> Recomputation:
    """Where a stretch recomputes: all of it where that is not known, and then its block's input is needed until the end
    of the last stretch of the block. ``event_count``: of the stretch."""
    return found or Recomputation(0, event_count if is_last else None)


def recomputations(run: Run, alike: dict[int, int], forward: dict[Block, list[int]]) -> Recomputations:
    """By their numbers, `recomputation` of the stretches that are alike."""
    inputs = block_inputs(run)
    first: dict[int, int] = {}
    for at, number in alike.items():
        first.setdefault(number, at)
    found = []
    for at in first.values():
        moment, events = run.step.stretches[at]
        block = (moment.module_list, moment.block)
        found.append(recomputation(run, forward[block], without_frees(events, inputs[block])))
    return tuple(found)


def without_frees(events: list[int], freed: list[int]) -> list[int]:
    """Events without the frees of some buffers."""
    frees = {~buffer for buffer in freed}
    return events if frees.isdisjoint(events) else [event for event in events if event not in frees]


def forward_events(run: Run) -> dict[Block, list[int]]:
    """The forward of each block whose checkpoint keeps its input."""
    inputs = block_inputs(run)
    forward: dict[Block, list[int]] = {}
    for moment, events in run.step.stretches:
        if moment.passes == "forward" and (block := (moment.module_list, moment.block)) in inputs:
            forward.setdefault(block, []).extend(events)
    return forward


def alike_stretches(run: Run) -> dict[int, int]:
    """Place of a stretch of a block's backward -> a number, the same for all in which, whatever the shape, the same is
    allocated and freed, and was in that block's forward."""
    inputs, forward = block_inputs(run), forward_events(run)
    sizes = list(run.program.buffers)
    made: dict[tuple[str, int], int] = {}
    table = [made.setdefault(pair, len(made)) for pair in zip(run.program.op, sizes, strict=True)]
    table += [~size for size in reversed(sizes)]  # so that a free, ~buffer, finds its own by counting from the end

    def what(events: Iterable[int]) -> tuple[int, ...]:
        return tuple(map(table.__getitem__, events))

    in_forward = {block: what(events) for block, events in forward.items()}
    numbers: dict[object, int] = {}
    found = {}
    for at, (moment, events) in enumerate(run.step.stretches):
        block = (moment.module_list, moment.block)
        if moment.passes == "backward" and block in inputs:
            frees = {~buffer for buffer in inputs[block]}
            key = in_forward[block], what(event for event in events if event not in frees)
            found[at] = numbers.setdefault(key, len(numbers))
    return found


CAST = "_to_copy"
ALIKE = 3
"""Allocations in a row that show where a recomputation begins."""

APART = 8
"""Of two neighbouring allocations in forward, the most that a recomputation, which has gradients, puts between them."""


def recomputation(run: Run, forward_events: list[int], backward: list[int]) -> Recomputation | None:
    """Where a block's recomputation begins and ends among the events of its backward; None where its input may be
    needed for longer.

    It repeats the allocations of the forward and lets go of less than that does at the same place, as autograd keeps
    what it saved; until it ends, with the last tensor that backward needs (torch/utils/checkpoint.py, early stop), and
    everything else goes at once: the block's input too, unless an operator saved it. One that is cast first is not.
    """
    forward = _allocations(run, forward_events)
    made = _allocations(run, backward)
    names = [allocation.name for allocation in made]
    start = [allocation.name for allocation in forward[:ALIKE]]
    begins = next((at for at in range(len(names)) if names[at : at + ALIKE] == start), None)
    if begins is None or len(start) < ALIKE or start[0][0] != CAST:
        return None
    last = begins
    for now, later in itertools.pairwise(forward):
        reach = range(last + 1, min(last + 1 + APART, len(names)))
        following = next((at for at in reach if names[at] == later.name), None)
        freed = sum(allocation.freed_bytes for allocation in made[last : following or last + 1])
        if following is None or freed > now.freed_bytes:
            break
        last = following
    ends = made[last].at + 1
    while ends < len(backward) and backward[ends] < 0:
        ends += 1
    return Recomputation(made[begins].at, ends)


class _Allocation(NamedTuple):
    """An allocation among events: its place there, its operator and bytes, and the bytes freed before the next one."""

    at: int
    name: tuple[str, int]
    freed_bytes: int


def _allocations(run: Run, events: list[int]) -> list[_Allocation]:
    operators, sizes = run.program.op, run.sizes
    places: list[int] = []
    freed: list[int] = []
    for at, event in enumerate(events):
        if event >= 0:
            places.append(at)
            freed.append(0)
        elif freed:
            freed[-1] += sizes[~event]
    return [
        _Allocation(at, (operators[events[at]], sizes[events[at]]), nbytes)
        for at, nbytes in zip(places, freed, strict=True)
    ]
