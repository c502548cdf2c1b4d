"""Bytes and counts, in from text and out to text. Inside the program bytes are always `int`; GiB = 2**30."""

from __future__ import annotations

import math
import re

from planner.errors import VplanError, nearest, quoted

KIB = 2**10
MIB = 2**20
GIB = 2**30
GB = 10**9
MAX_BYTES = 2**60
"""More than any machine has; a larger number is a slip of the keyboard."""

_FACTORS = {
    "B": 1,
    "KiB": KIB,
    "MiB": MIB,
    "GiB": GIB,
    "TiB": 2**40,
    "kB": 10**3,
    "MB": 10**6,
    "GB": GB,
    "TB": 10**12,
}


def power_of_two(nbytes: int) -> int:
    """The next power of two at or above `nbytes`: pinned memory is handed out in these sizes
    (ATen/core/CachingHostAllocator.h, ``PowerOf2Ceil``)."""
    return 1 << max(0, nbytes - 1).bit_length()


def plural(count: int, noun: str) -> str:
    """A count and its noun: ``1 block``, ``2 blocks``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


UNITS = {unit.lower(): unit for unit in _FACTORS}
"""Units of size as people type them (in any case) -> as they are written."""

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|[+-]?nan|[+-]?inf(?:inity)?"
_QUANTITY = re.compile(rf"({_NUMBER})\s*([a-z]*)", re.IGNORECASE | re.ASCII)
_LONGEST_QUANTITY = 40
"""Characters. Python refuses to read integers of thousands of digits, and a size never needs them."""


def split_quantity(text: str) -> tuple[str, str] | None:
    """`"23.5 GiB"` as `("23.5", "gib")`, the unit in lower case; None when it is not a number with a unit."""
    if len(text) > _LONGEST_QUANTITY:
        return None
    match = _QUANTITY.fullmatch(text.strip())
    return (match[1], match[2].lower()) if match else None


def parse_bytes(text: str, what: str = "size") -> int:
    """Bytes named by a text: `23.5GiB`, `24GB` (10**9), `80000MiB`, `512MB`, `1024B`. The unit is required.

    A card class (`--gpu 24GB`) is not a size: `planner.catalog.card_lookup.gpu` resolves those.
    """
    fix = "write a number with a unit, as 23.5GiB, 24GB or 800MiB"
    parts = split_quantity(text)
    if parts is None:
        raise VplanError(f"{what} {quoted(text)} is not a size", fix)
    number, unit = parts
    if unit not in UNITS:
        if unit and (meant := nearest(unit, UNITS.keys() - {"b"}, 1)):
            fix = f"did you mean {number}{UNITS[meant[0]]}?"
        fault = "has an unknown unit" if unit else "has no unit"
        raise VplanError(f"{what} {quoted(text)} {fault}", fix)
    # Whole numbers stay integers: a float is exact only up to 2**53.
    value = int(number) if number.lstrip("+-").isdigit() else float(number)
    if not math.isfinite(value):
        raise VplanError(f"{what} {quoted(text)} is not a finite number", fix)
    if value < 0:
        raise VplanError(f"{what} {quoted(text)} is negative", fix)
    # The number alone first: a float times a large factor would overflow to infinity.
    size_bytes = value * _FACTORS[UNITS[unit]] if value <= MAX_BYTES else value
    if size_bytes > MAX_BYTES:
        raise VplanError(f"{what} {quoted(text)} is more than any machine has", fix)
    return round(size_bytes)


def gib(size_bytes: int) -> float:
    """Bytes as GiB (2**30)."""
    return size_bytes / GIB


def format_gib(size_bytes: int) -> str:
    """`"23.5 GiB"`: one decimal, two below 1 GiB, where the first alone would say little."""
    value = gib(size_bytes)
    return f"{value:.2f} GiB" if abs(value) < 0.995 else f"{value:.1f} GiB"


def parse_count(text: str, what: str, *, at_least: int = 1, at_most: int = 10**6) -> int:
    """A whole number named by a text, inside its range; `what` is how the message calls it (`--frames`)."""
    parts = split_quantity(text)
    if parts is None or parts[1] or not parts[0].lstrip("+-").isdigit():
        raise VplanError(f"{what} {quoted(text)} is not a whole number", f"write one from {at_least} to {at_most}")
    return check_count(int(parts[0]), what, at_least=at_least, at_most=at_most)


def check_count(value: int, what: str, *, at_least: int = 1, at_most: int = 10**6) -> int:
    """`value` itself when it lies in its range, else a VplanError that says the range."""
    if not at_least <= value <= at_most:
        side = "too small" if value < at_least else "too large"
        raise VplanError(f"{what} {quoted(value)} is {side}", f"write a whole number from {at_least} to {at_most}")
    return value


def format_seconds(seconds: float) -> str:
    """`"0.42 s"`, `"12.3 s"`, `"3 min 05 s"`, `"2 h 10 min"`."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
