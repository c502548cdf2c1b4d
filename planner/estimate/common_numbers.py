"""One numbering of the buffers of runs at several shapes, which are replayed in turn on one allocator.

Recordings give the same numbers at every shape. What trainers' terms add behind them need not: two products that take
the same bytes at one shape may share the buffers of an adapter's output there, and not at another
(`planner.layout.adapters`), and whatever is added after those has another number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from planner.layout.run import Run
from planner.tape.program import renamed_events


class CommonNumbers(NamedTuple):
    """The numbers that a run's buffers have on the allocator of another run, where they are others."""

    renamed: dict[int, int]
    """buffer of the run -> number on the allocator"""

    first: int
    """buffers from here on are named by ``renamed``"""

    sizes: list[int]
    """bytes by number on the allocator"""

    streams: list[int] | None
    """CUDA stream by number on the allocator"""

    def events(self, ops: list[int]) -> list[int]:
        """The run's events as the allocator counts."""
        return renamed_events(ops, self.renamed) if self.renamed else ops

    def own(self, live: Sequence[int]) -> list[int]:
        """What is live on the allocator, as the run counts, without what the run does not have."""
        if not self.renamed:
            return list(live)
        back = {number: buffer for buffer, number in self.renamed.items()}
        kept = [number for number in live if number < self.first or number in back]
        return [back.get(number, number) for number in kept]


def common_numbers(first: Run, run: Run) -> CommonNumbers:
    """The numbers of a run on the allocator that ``first`` was loaded on: what lives from one stage to the next has the
    number that it has there, found by its name, and what comes and goes within a stage has one of its own."""
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
    """How many of the first buffers are the same in both, by name and number."""
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
    """The buffers from ``behind`` on that are there between two stages, each once, in order."""
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
