"""The changes of a command that together need least, whatever phases they mend, and the part of them that is enough.

One change may show only beside another: where training and the decoding of a sample need much the same, neither helps
alone. So changes that do not raise the peak are added as well, and those that saved nothing in the end are taken out.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.dialects.base.bindings import InexpressibleError
from planner.dialects.base.dialect import Move
from planner.foreign.case import Case
from planner.foreign.change_words import move_words
from planner.foreign.pricing import CheckedEstimate, Pricing
from planner.foreign.smallest_change import (
    MOST_PARTS,
    WORTH,
    Fix,
    fix_of_changes,
    fix_of_moves,
    merged_changes,
    moves_of,
    needs,
)

STARTS = 3
"""Combinations of `MOST_PARTS` or fewer that more is added to: the one that needs least may shut out what saves most.
"""
UNSEEN = frozenset({"expandable_segments"})
"""Fields that save what the allocator loses between tensors, which a quick estimate does not count."""


@dataclass(frozen=True)
class Together:
    """Moves, as far as each goes, and the device bytes of the command with all of them by a quick estimate."""

    moves: tuple[Move, ...]
    changes: Mapping[str, Any]
    device_bytes: int


class LeastMemory:
    """The search for the least that a command reaches with its trainer's moves."""

    def __init__(
        self, case: Case, base: CheckedEstimate, pricing: Pricing, moves: Sequence[Move] | None = None
    ) -> None:
        self.case, self.base, self.pricing = case, base, pricing
        self.moves = moves_of(case) if moves is None else moves
        self.always = tuple(move for move in self.moves if move.always)

    def fix(self) -> Fix | None:
        """What needs least, replayed; where it fits, or is tight at least, as much of it as is enough. None where
        nothing saves anything."""
        best: tuple[Together, Fix] | None = None
        for sets in self._replayed():
            found = fix_of_changes(self.case, self.base, sets.moves, sets.changes, self.pricing)
            if found is not None and found.outcome.estimate.verdict == "fits":
                return self.enough(sets, found)
            if found is not None and (best is None or needs(found) + WORTH <= needs(best[1])):
                best = sets, found
        if best is None or best[1].outcome.estimate.verdict == "no":
            return best[1] if best else None
        return self.enough(*best)

    def unrecorded(self) -> Iterator[str]:
        """The changes that nothing was recorded of, so that nobody knows whether they are enough."""
        for move in self.moves:
            others = [self.case.changed(step) for step in move.steps(self.case.fields)]
            if all(self.pricing.is_unrecorded(other) for other in others):
                with contextlib.suppress(InexpressibleError):
                    yield from move_words(self.case, others[-1], move)

    @functools.cached_property
    def full(self) -> Together | None:
        """All that can be together and takes nothing more, around what needs least; None where nothing can be done."""
        grown = [each for each in map(self._grown, self._starts()) if each.moves]
        return min(grown, key=lambda each: (each.device_bytes, len(each.moves)), default=None)

    def _replayed(self) -> list[Together]:
        """The sets to replay: what needs least, the same with what only a replay sees, and all that can be together
        where that may fit."""
        if self.full is None:
            return []
        lean = self._lean(self.full)
        replayed = [lean, self._with(lean, [move for move in self.moves if move.changes.keys() <= UNSEEN])]
        if self.pricing.may_be("fits", self.case.changed(self.full.changes)):
            replayed.append(self.full)
        distinct = {frozenset(map(id, each.moves)): each for each in replayed}
        return [each for each in distinct.values() if each.moves]

    def _starts(self) -> list[Together]:
        """Nothing, and the combinations of few parts that need least."""
        free = [move for move in self.moves if not move.always]
        few = [
            found
            for size in range(MOST_PARTS + 1)
            for chosen in itertools.combinations(free, size)
            if (found := self._set([*self.always, *chosen])) is not None
        ]
        best = sorted(few, key=lambda each: each.device_bytes)[:STARTS]
        return [each for each in few if each in best or each.moves == self.always]

    def _set(self, moves: Sequence[Move]) -> Together | None:
        """The moves together, those that count as far as they go; None where they contradict each other."""
        changes = merged_changes(move.changes for move in moves if not move.counts)
        if changes is None:
            return None
        for move in (move for move in moves if move.counts):
            further = self._furthest(changes, move)
            if further is None:
                return None
            changes = further
        device_bytes = self._device_bytes(changes)
        return None if device_bytes is None else Together(tuple(moves), changes, device_bytes)

    def _furthest(self, changes: Mapping[str, Any], move: Move) -> dict[str, Any] | None:
        """The changes with those of a move, as far as the model has blocks and the host RAM; None where it cannot be
        made beside them."""
        for step in reversed(move.steps(self.case.fields)):
            together = merged_changes([changes, step])
            if together is not None and self._device_bytes(together) is not None:
                return together
        return None

    def _device_bytes(self, changes: Mapping[str, Any]) -> int | None:
        return self.pricing.device_bytes(self.case.changed(changes))

    def _grown(self, start: Together) -> Together:
        """With all that saves, what saves most first; then with what takes nothing more, beside which others may."""
        found, padded = start, False
        while True:
            longer = [self._with(found, [move]) for move in self.moves if move not in found.moves]
            best = min(longer, key=lambda each: each.device_bytes, default=found)
            if best.device_bytes <= found.device_bytes - WORTH:
                found = best
            elif padded:
                return found
            else:
                found, padded = self._with(found, self.moves), True

    def _with(self, together: Together, moves: Sequence[Move]) -> Together:
        """With those of the moves that can be made beside it and take nothing more, in turn."""
        for move in moves:
            changes = None if move in together.moves else self._furthest(together.changes, move)
            device_bytes = None if changes is None else self._device_bytes(changes)
            if changes is not None and device_bytes is not None and device_bytes <= together.device_bytes:
                together = Together((*together.moves, move), changes, device_bytes)
        return together

    def _lean(self, full: Together) -> Together:
        """Without what saves nothing there, the dearest out first."""
        found = full
        for move in self._dearest_first(full.moves, frozenset()):
            without = self._set([each for each in found.moves if each is not move])
            if without is not None and without.device_bytes < full.device_bytes + WORTH:
                found = without
        return found

    def enough(self, sets: Together, found: Fix | None = None) -> Fix | None:
        """A part of moves that fit together, of which nothing can be left out; in the order of the trainer's moves and
        as mild as is enough. ``found``: the fix that they are as far as they go. None where it cannot be said."""
        found = found or fix_of_changes(self.case, self.base, sets.moves, sets.changes, self.pricing)
        if found is None:
            return None
        kept, verdict = [move for move in self.moves if move in sets.moves], found.outcome.estimate.verdict
        best = found
        for move in self._dearest_first(kept, frozenset(found.outcome.estimate.lossy)):
            fewer = [each for each in kept if each is not move]
            fix = self._fitting(fewer, verdict)
            if fix is not None:
                kept, best = fewer, fix
        mildest = fix_of_moves(self.case, self.base, kept, self.pricing)
        return mildest if mildest is not None and mildest.outcome.estimate.verdict == verdict else best

    def _fitting(self, moves: Sequence[Move], verdict: str) -> Fix | None:
        """The fix that moves are as far as they go; None where it has not the verdict ("fits" or "tight")."""
        sets = self._set(moves) if moves else None
        if sets is None or not self.pricing.may_be(verdict, self.case.changed(sets.changes)):
            return None
        found = fix_of_changes(self.case, self.base, sets.moves, sets.changes, self.pricing)
        return found if found is not None and found.outcome.estimate.verdict == verdict else None

    def _dearest_first(self, moves: Sequence[Move], lossy: frozenset[str]) -> list[Move]:
        """The moves that may be left out: those that round numbers, then the trainer's last, which are dearer."""
        order = [move for move in reversed(self.moves) if move in moves and not move.always]
        return sorted(order, key=lambda move: not (move.lossy or lossy & move.changes.keys()))
