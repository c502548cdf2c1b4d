"""Whether a tape on disk is what is recorded now: the first place where two trees of JSON differ, in words."""

from __future__ import annotations

from typing import Any

from planner.errors import quoted

NOT_COMPARED = ("versions",)
"""Keys of a tape that may differ: another torch may well record the same allocations."""


def first_difference(stored: Any, recorded: Any, where: str = "") -> str:
    """Where two trees of JSON first differ, and how, as ``tape.sizes[0] is 7, recorded 8``; "" when they are equal.

    ``where`` is the path of the two in the trees they were taken from.
    """
    if isinstance(stored, dict) and isinstance(recorded, dict):
        for key in sorted(stored.keys() | recorded.keys()):
            inside = f"{where}.{key}" if where else key
            if key not in stored or key not in recorded:
                return f"{inside} is {'recorded now only' if key in recorded else 'not recorded any more'}"
            if difference := first_difference(stored[key], recorded[key], inside):
                return difference
        return ""
    if isinstance(stored, list) and isinstance(recorded, list):
        for index, (left, right) in enumerate(zip(stored, recorded, strict=False)):
            if difference := first_difference(left, right, f"{where}[{index}]"):
                return difference
        if len(stored) != len(recorded):
            return f"{where} has {len(stored)} entries, recorded {len(recorded)}"
        return ""
    return "" if stored == recorded else f"{where} is {quoted(stored)}, recorded {quoted(recorded)}"
