"""Where a step's blocks begin and end, and events woven in there: engines that gather a block's weights work so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.layout.run import STRATEGY_MOMENT
from planner.tape.program import Block, Stage

Span = tuple[int, int]
"""Index of a block's first and last stretch in one pass."""


def spans(stage: Stage, passes: str) -> dict[Block, Span]:
    """The blocks of a pass in the order they run, until the next block runs: what of a block is only freed later, with
    that of all blocks, is left out. Recomputation in backward belongs to backward."""
    by_block: dict[Block, Span] = {}
    running: Block | None = None
    for index, (moment, _) in enumerate(stage.stretches):
        if moment.passes != passes or moment.block < 0:
            continue
        block = (moment.module_list, moment.block)
        if block not in by_block:
            by_block[block], running = (index, index), block
        elif block == running:
            by_block[block] = (by_block[block][0], index)
        else:
            running = None
    return by_block


def first_backward(stage: Stage) -> int:
    """The index of the stretch with which backward begins; raises StopIteration when there is none."""
    return next(index for index, (moment, _) in enumerate(stage.stretches) if moment.passes == "backward")


class StageEditor:
    """Collects events to put before and after stretches of a stage, and puts them in all at once."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._before: dict[int, list[int]] = {}
        self._after: dict[int, list[int]] = {}

    def before(self, index: int, events: Sequence[int]) -> None:
        """Queues events to insert before a stretch, behind those queued there earlier. `insert` applies them."""
        self._before.setdefault(index, []).extend(events)

    def after(self, index: int, events: Sequence[int]) -> None:
        """Queues events to insert after a stretch, behind those queued there earlier. `insert` applies them."""
        self._after.setdefault(index, []).extend(events)

    def insert(self, name: str, inside: Mapping[int, list[int]] | None = None) -> None:
        """Rebuilds the stage with all queued events, in new stretches of this name. ``inside``: index of a stretch ->
        events that replace its own."""
        woven = []
        for index, (moment, events) in enumerate(self.stage.stretches):
            for added, place in ((self._before, -1), (None, 0), (self._after, 1)):
                if place == 0:
                    woven.append((moment, (inside or {}).get(index, events)))
                elif added and index in added:
                    woven.append((STRATEGY_MOMENT._replace(passes=name), added[index]))
        self.stage.stretches = woven
