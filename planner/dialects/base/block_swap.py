"""``blocks_to_swap`` of the trainers that count blocks in a way of their own (`planner.catalog.swapped_stacks`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from planner.catalog import lookup
from planner.catalog.swapped_stacks import setting_of, splits
from planner.dialects.base.bindings import Fields, InexpressibleError, UnsupportedValue
from planner.errors import VplanError


def swapped(trainer: str, model: str, blocks: int, word: str = "blocks_to_swap") -> int:
    """Blocks that leave the GPU for a setting. Raises a VplanError for more than the trainer swaps: it stops at an
    assertion."""
    profile = lookup.model(model)
    if not blocks:
        return 0
    known = splits(trainer, profile)
    if not known:
        raise VplanError(f"{trainer} swaps no blocks of {profile.title}", f"leave out {word}")
    if blocks not in known:
        fault = f"{word} {blocks}: {trainer} stops at more than {max(known)} of {profile.title}"
        raise VplanError(fault, f"write {word} {max(known)} or less")
    return sum(known[blocks])


def setting(trainer: str, fields: Fields) -> int:
    """``blocks_to_swap`` for the fields' `swap_blocks`; 0 for none. Raises an InexpressibleError for a number that no
    setting gives."""
    asked, profile = int(fields["swap_blocks"]), lookup.model(fields["model"])
    if not asked:
        return 0
    known = splits(trainer, profile)
    if not known:
        raise InexpressibleError(UnsupportedValue("swap_blocks", asked, 0, f"it swaps no blocks of {profile.title}"))
    blocks, done = setting_of(trainer, profile, asked)
    if done != asked:
        why = f"blocks_to_swap {blocks} of {max(known)} swaps {done} blocks of {profile.title}"
        raise InexpressibleError(UnsupportedValue("swap_blocks", asked, done, why))
    return blocks


def steps(trainer: str, settings: tuple[int, ...]) -> Callable[[Fields], tuple[Mapping[str, Any], ...]]:
    """The changes that a move with these settings tries in turn, as far as the model's blocks go, and its most."""

    def changes(fields: Fields) -> tuple[Mapping[str, Any], ...]:
        known = splits(trainer, lookup.model(fields["model"]))
        tried = [blocks for blocks in settings if blocks in known]
        tried += [max(known)] if known and max(known) not in tried else []
        return tuple({"swap_blocks": sum(known[blocks])} for blocks in sorted(tried))

    return changes


PARTS = 8


def in_parts(most: int, now: int) -> list[int]:
    """Numbers of swapped blocks to try: more than there are now, in eighths of the most that a trainer swaps."""
    tried = dict.fromkeys(-(-most * part // PARTS) for part in range(1, PARTS + 1))
    return [blocks for blocks in tried if blocks > now]
