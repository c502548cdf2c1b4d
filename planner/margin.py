"""How sure an estimate is: the interval around the device peak, from errors seen, not from a guess."""

from __future__ import annotations

from planner.job import Strategy

EXPANDABLE = (0.03, 0.04)
CLASSIC = (0.05, 0.05)
"""(below, above) as shares of the prediction."""


def interval(device_bytes: int, strategy: Strategy) -> tuple[int, int]:
    """low and high device bytes of a ``recorded`` estimate. Without expandable segments fragmentation is less certain."""
    below, above = EXPANDABLE if strategy.expandable_segments else CLASSIC
    return int(device_bytes * (1 - below)), int(device_bytes * (1 + above))
