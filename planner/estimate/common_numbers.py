"""A common numbering for the buffers of runs at several shapes that are replayed in turn on one allocator.

Buffers of a recording have the same numbers at every shape. Buffers that a trainer adds after them may not: two
products of equal size at one shape may share an adapter's output buffers there but not at another shape
(`planner.layout.adapters`), which shifts the numbers of all that follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from planner.layout.run import Run
from planner.tape.program import renamed_events


class CommonNumbers(NamedTuple):
    """The numbers of a run's buffers on the allocator of another run, where they differ."""

    renamed: dict[int, int]
    """buffer of the run -> number on the allocator"""

    first: int
    """buffers from here on are named by ``renamed``"""

    sizes: list[int]
    """bytes by number on the allocator"""

    streams: list[int] | None
    """CUDA stream by number on the allocator"""

    def events(self, ops: list[int]) -> list[int]:
        """The run's events in the allocator's numbers."""
        return renamed_events(ops, self.renamed) if self.renamed else ops

    def own(self, live: Sequence[int]) -> list[int]:
        """The buffers live on the allocator in the run's numbers, without those the run does not have."""
        if not self.renamed:
            return list(live)
        back = {number: buffer for buffer, number in self.renamed.items()}
        kept = [number for number in live if number < self.first or number in back]
        return [back.get(number, number) for number in kept]


def common_numbers(first: Run, run: Run) -> CommonNumbers:
    """The numbers of a run on the allocator that ``first`` was loaded on. A buffer that lives from one stage to the
    next gets the number it has in ``first``, matched by name; one that lives within a stage gets a new number."""
    alike = _alike(first, run)
    if alike == len(run.sizes) == len(first.sizes):
        return CommonNumbers({}, alike, run.sizes, run.streams)
    there: dict[tuple[str, str], list[int]] = {}
    for buffer in _across_stages(first, alike):
        there.setdefault(_name(first, buffer), []).append(buffer)
    waiting = {name: iter(buffers) for name, buffers in there.items()}
    renamed = {}
    for buffer in _across_stages(run, alike):
        if (number := next(waiting.get(_name(run, buffer), iter(())), None)) is not None:
            renamed[buffer] = number
    free = len(first.sizes)
    for buffer in range(alike, len(run.sizes)):
        if buffer not in renamed:
            renamed[buffer], free = free, free + 1
    sizes = [*run.sizes[:alike], *[0] * (free - alike)]
    streams = [0] * free
    for buffer, number in renamed.items():
        sizes[number] = run.sizes[buffer]
    for buffer, stream in run.side_streams.items():
        streams[renamed.get(buffer, buffer)] = stream
    return CommonNumbers(renamed, alike, sizes, streams if run.side_streams else None)


def _name(run: Run, buffer: int) -> tuple[str, str]:
    return run.program.category[buffer], run.program.op[buffer]


def _alike(first: Run, run: Run) -> int:
    """The number of leading buffers with the same names in both runs."""
    if first is run:
        return len(run.sizes)
    shortest = min(len(first.sizes), len(run.sizes))
    pairs = ((first.program.op, run.program.op), (first.program.category, run.program.category))
    different = (
        next((at for at, (one, other) in enumerate(zip(*both, strict=False)) if one != other), shortest)
        for both in pairs
    )
    return min(different)


def _across_stages(run: Run, behind: int) -> Iterator[int]:
    """The buffers from ``behind`` on that are live between two stages, each once, in order."""
    left: set[int] = set()
    for _, stage in run.stages:
        there: set[int] = set()
        for event in stage.ops:
            if event >= behind:
                there.add(event)
            elif event < 0:
                there.discard(~event)
        left |= there
    yield from sorted(left)
