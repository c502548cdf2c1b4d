"""Values of other people's config files, which may be anything."""

from __future__ import annotations

from typing import Any

from planner.errors import VplanError, quoted

MOST = 10**9


def integer(value: Any, name: str) -> int:
    """A value as a whole number from 0 to `MOST`. Raises a VplanError that names the key for anything else."""
    integer = int(value.strip()) if isinstance(value, str) and value.strip().isdecimal() else value
    if isinstance(integer, float) and integer.is_integer():
        integer = int(integer)
    if not isinstance(integer, int) or isinstance(integer, bool) or not 0 <= integer <= MOST:
        raise VplanError(f"{name} {quoted(value)} is not a whole number", "use a number without a decimal point")
    return integer


def number(value: Any, name: str) -> float:
    """A value as a number. Raises a VplanError that names the key for anything else."""
    try:
        if not isinstance(value, int | float | str) or isinstance(value, bool) or not abs(float(value)) <= MOST:
            raise ValueError
        return float(value)
    except ValueError:
        raise VplanError(f"{name} {quoted(value)} is not a number", "write a number") from None


def as_list(value: Any) -> list[Any]:
    """A list as it is, and any other value as a list of one."""
    return list(value) if isinstance(value, list) else [value]
