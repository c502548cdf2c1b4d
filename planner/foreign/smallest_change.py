"""The smallest changes of a command that make it fit: its trainer's moves, alone and together.

`smallest_changes` is the entry point. `moves_of` lists the moves, `fix_of_moves` estimates some of them together, and
`fix_of_changes` words the result in the trainer's flags.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from planner.dialects.base.bindings import Fields, Fixed, InexpressibleError
from planner.dialects.base.dialect import Dialect, Move
from planner.errors import NotRecordedError
from planner.foreign.case import Case
from planner.foreign.change_words import Costs, cost_words, costs_of, move_words
from planner.foreign.pricing import CheckedEstimate, Pricing
from planner.spec.job import Bucket

MOST_PARTS = 3
"""Changes of more parts are another way of training, not a small change."""


WORTH = 100 << 20
"""Bytes that a change must save to be told of when it is not enough."""


@dataclass(frozen=True)
class Fix:
    """A change of the command that is enough, and of which nothing can be left out."""

    change: tuple[str, ...]
    """flags or lines; what belongs together is one entry"""
    cost: str
    lossy: bool
    case: Case
    outcome: CheckedEstimate
    costs: Costs = field(default_factory=dict)
    """the same by option"""


def smallest_changes(case: Case, base: CheckedEstimate, pricing: Pricing) -> tuple[tuple[Fix, ...], tuple[Fix, ...]]:
    """Changes that are enough, smallest first; then single changes that help at the decisive moment but are not enough.

    Tight fixes are listed only if nothing fits. More moves are combined until one of the fixes is lossless, those of
    the last resort behind all others. Moves that everybody trains with (`Move.always`) are part of every fix; if they
    are enough, they are a fix of their own.
    """
    known = moves_of(case)
    always = [move for move in known if move.always]
    moves = sorted((move for move in known if not move.always), key=lambda move: move.last_resort)
    enough: dict[frozenset[int], Fix] = {}
    tight: dict[frozenset[int], Fix] = {}
    helps: list[Fix] = []
    first = 0 if always else 1
    for size, chosen in _combinations(moves, first, enough):
        fix = fix_of_moves(case, base, [*always, *(moves[at] for at in sorted(chosen))], pricing)
        verdict = fix.outcome.estimate.verdict if fix else ""
        if fix is None or verdict == "no":
            helps += [fix] if fix and size == first and _saved(base, fix) >= WORTH else []
        elif verdict == "fits":
            enough[chosen] = fix
        elif base.estimate.verdict == "no" and not any(done <= chosen for done in tight):
            tight[chosen] = fix
    useful = _without_idle(enough or tight)
    order = {id(fix): at for at, fix in enumerate(useful.values())}
    fixes = sorted(useful.values(), key=lambda fix: (_size(fix), fix.lossy, order[id(fix)]))
    return tuple(fixes), tuple(helps)


def _combinations(
    moves: Sequence[Move], first: int, enough: Mapping[frozenset[int], Fix]
) -> Iterator[tuple[int, frozenset[int]]]:
    """(size, moves by number), the smallest first, of which no part is enough, until one that is enough is lossless;
    and behind them those with moves of the last resort."""
    for last_resort in (False, True):
        for size in range(first, MOST_PARTS + 1):
            if any(not fix.lossy for fix in enough.values()):
                return
            for chosen in map(frozenset, itertools.combinations(range(len(moves)), size)):
                of_the_last = any(moves[at].last_resort for at in chosen)
                if of_the_last == last_resort and not any(done <= chosen for done in enough):
                    yield size, chosen


def _without_idle(fixes: dict[frozenset[int], Fix]) -> dict[frozenset[int], Fix]:
    """Leaves out fixes that contain another fix and more: the rest of them does nothing."""
    words = {chosen: frozenset(_flags(fix)) for chosen, fix in fixes.items()}
    return {chosen: fix for chosen, fix in fixes.items() if not any(other < words[chosen] for other in words.values())}


def _flags(fix: Fix) -> list[str]:
    """A change as single flags with their values, and lines."""
    return [flag for part in fix.change for flag in re.split(r"\s(?=--)|\n", part)]


def _saved(base: CheckedEstimate, fix: Fix) -> int:
    """How many bytes less are allocated at the decisive moment."""
    phases = (each.estimate.phases for each in (base, fix.outcome))
    before, after = (peaks.get(base.phase) for peaks in phases)  # type: ignore[call-overload]  # any text may be asked
    return before.allocated_bytes - after.allocated_bytes if before and after else 0


def _size(fix: Fix) -> int:
    """How much there is to type: flags, and lines of code."""
    return sum(flag.startswith("--") for flag in _flags(fix)) or len(fix.change)


def moves_of(case: Case) -> list[Move]:
    """The trainer's moves that this script has settings for and that change something in a case."""
    known = (*case.dialect.moves, *smaller_batches(case.dialect))
    return [_from_host_ram(case, move) for move in known if _is_change(case, move) and _has_words(case, move)]


def _from_host_ram(case: Case, move: Move) -> Move:
    """The move without its cost of a forward pass, if checkpoints exist already, in host RAM."""
    if case.strategy.gradient_checkpointing == "offload" and move.changes == {"gradient_checkpointing": "full"}:
        return replace(move, cost="checkpoints stay on the GPU")
    return move


def _is_change(case: Case, move: Move) -> bool:
    fields = case.fields
    changed = any(fields.get(name) != value for step in move.steps(fields) for name, value in step.items())
    return move.when(fields) and changed


def fix_of_moves(case: Case, base: CheckedEstimate, moves: Sequence[Move], pricing: Pricing) -> Fix | None:
    """The fix that consists of these moves. Moves with several values use the mildest that are enough, or else those
    that need least of the replayed ones. None if the moves contradict each other, or none is close enough to be worth a
    replay."""
    plain = merged_changes(move.changes for move in moves if not move.counts)
    if plain is None:
        return None
    steps = itertools.product(*(move.steps(case.fields) for move in moves if move.counts))
    values = [changes for step in steps if (changes := merged_changes([plain, *step])) is not None]
    # Those that go as far as the model has blocks and the host RAM decide whether milder ones are worth a look.
    furthest = next((each for each in reversed(values) if pricing.device_bytes(case.changed(each)) is not None), None)
    if furthest is None:
        return None
    if not pricing.may_be("fits", case.changed(furthest)):
        alone = len(moves) == 1 and pricing.may_be("tight", case.changed(furthest))
        return fix_of_changes(case, base, moves, furthest, pricing) if alone else None
    nearest: Fix | None = None
    for changes in values:
        fix = (
            fix_of_changes(case, base, moves, changes, pricing)
            if pricing.may_be("fits", case.changed(changes))
            else None
        )
        if fix is not None and fix.outcome.estimate.verdict == "fits":
            return fix
        if fix is not None and (nearest is None or needs(fix) < needs(nearest)):
            nearest = fix
    return nearest


def merged_changes(changes: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """All changes as one; None if two of them set a field to different values."""
    together: dict[str, Any] = {}
    for each in changes:
        if any(together.get(name, value) != value for name, value in each.items()):
            return None
        together |= each
    return together


def _has_words(case: Case, move: Move) -> bool:
    for step in move.steps(case.fields):
        with contextlib.suppress(InexpressibleError):
            list(move_words(case, case.changed(step), move))
            return True
    return False


def fix_of_changes(
    case: Case, base: CheckedEstimate, moves: Sequence[Move], changes: Mapping[str, Any], pricing: Pricing
) -> Fix | None:
    """The fix that moves with these changes make; None if the trainer's script cannot express one of them, refuses them
    together, or nothing was recorded for the result."""
    other = case.changed(changes)
    if case.dialect.clashing(other.fields):
        return None
    try:
        words = [tuple(move_words(case, other, move)) for move in moves]
        outcome = pricing.outcome(other)
    except (InexpressibleError, NotRecordedError):
        return None
    changed = {name for name, value in changes.items() if case.fields.get(name) != value}
    rounds = any(move.lossy for move in moves) or bool(set(outcome.estimate.lossy) & changed)
    lossy = rounds or _global_batch(other) != _global_batch(case)
    costs = costs_of(moves, words, faster=outcome.estimate.step_seconds < base.estimate.step_seconds)
    change = tuple(itertools.chain(*words))
    return Fix(change, cost_words(costs, len(moves) > 1), lossy, other, outcome, costs)


def needs(fix: Fix) -> int:
    """Device bytes of a command with a change."""
    return fix.outcome.estimate.peak.device_bytes


def _global_batch(case: Case) -> list[int]:
    """Samples of one GPU in one optimizer step, of each of its shapes."""
    return [(each.batch_size or 1) * case.strategy.gradient_accumulation for each in case.job.shapes]


def smaller_batches(dialect: Dialect) -> tuple[Move, ...]:
    """Fewer samples per pass, and correspondingly more passes before the optimizer steps: the mean gradient is the
    same. If the trainer cannot accumulate gradients, fewer samples per step, which changes the training."""
    settable = {name for binding in dialect.bindings if not isinstance(binding, Fixed) for name in binding.fields}
    if "batch_size" not in settable:
        return ()
    accumulates = "gradient_accumulation" in settable

    def parts(fields: Fields) -> tuple[Fields, ...]:
        passes, batches = int(fields["gradient_accumulation"]), _batches(fields)
        changes = []
        for times in range(2, min(batches) + 1):
            if not any(batch % times for batch in batches):
                more = {"gradient_accumulation": passes * times} if accumulates else {}
                changes.append({**_with_batches(fields, partial(_share, times)), **more})
        return tuple(changes)

    fewer = "fewer samples per step: changes training"
    cost = "same samples per step, in several passes" if accumulates else fewer
    fields = ("batch_size", "gradient_accumulation") if accumulates else ("batch_size",)
    of_each_shape = any({"batch_size", "buckets"} <= set(binding.fields) for binding in dialect.bindings)
    capped = (Move({"batch_size": None}, fewer, by_fields=_capped),) if of_each_shape else ()
    return (Move(dict.fromkeys(fields), cost, by_fields=parts), *capped)


def _batches(fields: Fields) -> list[int]:
    """The batch of each shape."""
    return [each.batch_size or fields["batch_size"] for each in fields["buckets"]] or [int(fields["batch_size"])]


def _with_batches(fields: Fields, batch: Callable[[Bucket], int]) -> Fields:
    """The fields for smaller batches: the job's own batch, and that of each shape that has one. ``batch``: computes a
    shape's new batch."""
    shapes = tuple(each.replace(batch_size=each.batch_size and batch(each)) for each in fields["buckets"])
    buckets = {"buckets": shapes} if any(each.batch_size for each in shapes) else {}
    return {"batch_size": batch(_own(fields)), **buckets}


def _own(fields: Fields) -> Bucket:
    return Bucket.read({name: fields[name] for name in ("frames", "height", "width", "batch_size")})


def _capped(fields: Fields) -> tuple[Fields, ...]:
    """Smaller batches with fewer samples per step: no batch has more pixels than a fraction of the largest one's. For
    shapes with different batches, when nothing accumulates because the step runs inside backward."""
    if len(set(_batches(fields))) < 2 and fields.get("optimizer_step") != "backward":
        return ()
    most = max(_pixels(each) for each in (*fields["buckets"], _own(fields)))
    caps = [cap for halves in range(most.bit_length()) for cap in (most * 3 >> halves + 2, most >> halves + 1)]
    changes = (_with_batches(fields, partial(_within, cap)) for cap in caps)
    distinct = {tuple(change.items()): change for change in changes}
    return tuple(change for change in distinct.values() if any(fields[name] != change[name] for name in change))


def _pixels(shape: Bucket) -> int:
    """Pixels of a whole batch."""
    return (shape.batch_size or 1) * shape.pixels


def _share(parts: int, shape: Bucket) -> int:
    return (shape.batch_size or 1) // parts


def _within(pixels: int, shape: Bucket) -> int:
    """The batch of a shape that stays within so many pixels; at least one sample."""
    batch = shape.batch_size or 1
    return max(1, min(batch, pixels * batch // _pixels(shape)))
