"""Where a step's blocks begin and end, and events woven in there: engines that gather a block's weights work so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.run import SERVICE
from planner.tape import Stage

Block = tuple[str, int]
"""(module list, index)."""

Span = tuple[int, int]
"""Index of a block's first and last stretch in one pass."""


def spans(stage: Stage, passes: str) -> dict[Block, Span]:
    """The blocks of a pass in the order they run. Recomputation in backward belongs to backward."""
    found: dict[Block, Span] = {}
    for index, (moment, _) in enumerate(stage.stretches):
        if moment.passes == passes and moment.block >= 0:
            block = (moment.module_list, moment.block)
            first, _ = found.get(block, (index, index))
            found[block] = (first, index)
    return found


def first_backward(stage: Stage) -> int:
    """Index of the stretch with which backward begins."""
    return next(index for index, (moment, _) in enumerate(stage.stretches) if moment.passes == "backward")


class Weaver:
    """Collects events to put before and after stretches of a stage, and puts them in all at once."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._before: dict[int, list[int]] = {}
        self._after: dict[int, list[int]] = {}

    def before(self, index: int, events: Sequence[int]) -> None:
        """Puts events before a stretch; those put there earlier come first."""
        self._before.setdefault(index, []).extend(events)

    def after(self, index: int, events: Sequence[int]) -> None:
        """Puts events behind a stretch; those put there earlier come first."""
        self._after.setdefault(index, []).extend(events)

    def weave(self, name: str, inside: Mapping[int, list[int]] | None = None) -> None:
        """Rebuilds the stage. ``inside`` replaces the events of stretches."""
        woven = []
        for index, (moment, events) in enumerate(self.stage.stretches):
            for added, place in ((self._before, -1), (None, 0), (self._after, 1)):
                if place == 0:
                    woven.append((moment, (inside or {}).get(index, events)))
                elif added and index in added:
                    woven.append((SERVICE._replace(passes=name), added[index]))
        self.stage.stretches = woven
