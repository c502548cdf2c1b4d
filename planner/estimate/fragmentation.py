"""Fragmentation: how far reserved memory varies with the free segments in the allocator's cache.

Which free segment a tensor lands in depends on everything allocated before it, and a recording does not contain all of
that: first calls of libraries, a logger, a sampler, a step at another shape. So the run is replayed several times, each
time with a few small free segments before its first step. Of 74 published peaks, 66 are within 0.6 % of the resulting
range, but only 52 of a single replay (docs/accuracy/reserved-memory.md).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from planner.estimate.stages import ReplayedStage, replay_stages
from planner.layout.correction import Correction
from planner.layout.margin import Sides
from planner.spec.plan import PhaseName
from planner.units import MIB

REPLAYS = 8
MOST_SEGMENTS = 3
SHARES = 0.001, 0.02
"""Range of a segment's size, as a share of all reserved memory. Together they are at most 6 %, so that the result
reflects fragmentation rather than the segments themselves."""

SEGMENT_BYTES = 2 * MIB
"""The allocator rounds segments up to this (c10/cuda/CUDACachingAllocator.cpp, ``kRoundLarge``)."""


def reserved_range(played: Sequence[ReplayedStage]) -> tuple[int, int]:
    """(least, most) reserved bytes at the run's peak, over replays with different free segments."""
    reserved = reserved_bytes(played)
    strategy = played[-1].run.strategy
    if strategy.expandable_segments:  # little fragmentation: 70 of 76 published runs would vary by less than 0.5 %
        return reserved, reserved
    rank = played[-1].run.configuration.rank
    played = [entry for entry in played if entry.run.configuration.rank == rank]
    # Encoding before training runs on an allocator of its own.
    runs = list({id(entry.run): entry.run for entry in played if entry.phase != "encode"}.values())
    own = {id(run) for run in runs}
    apart = max((entry.replayed.reserved_peak_bytes for entry in played if id(entry.run) not in own), default=0)
    others = [reserved_bytes(replay_stages(*runs, cached=False, spare=spare)) for spare in _spare(reserved)]
    return max(apart, min(reserved, *others)), max(reserved, *others)


def peak_sides(
    played: Sequence[ReplayedStage], correction: Correction, where: PhaseName, device_bytes: int, most_bytes: int
) -> Sides:
    """The margin of the device peak: that of measurements or recordings, widened by fragmentation and at least up to
    ``most_bytes``. ``where``: the phase of the peak."""
    lowest, highest = reserved_range(played)
    reserved, share = reserved_bytes(played), correction.share(where)
    more = max(round(share * (highest - reserved)), most_bytes - device_bytes)
    return widen(correction.sides_of(where), device_bytes, round(share * (reserved - lowest)), more)


def widen(sides: Sides, device_bytes: int, less_bytes: int, more_bytes: int) -> Sides:
    """The margin around a peak that may itself be ``less_bytes`` lower or ``more_bytes`` higher."""
    below, above = sides
    lowest, highest = 1 - less_bytes / device_bytes, 1 + more_bytes / device_bytes
    return 1 - (1 - below) * lowest, (1 + above) * highest - 1


def reserved_bytes(played: Sequence[ReplayedStage]) -> int:
    """The most bytes that any of the replayed stages reserves."""
    return max(entry.replayed.reserved_peak_bytes for entry in played)


def _spare(reserved_bytes: int) -> list[list[int]]:
    """Sizes of the free segments in each replay, drawn with a fixed seed."""
    lot = random.Random(0)
    shares = [[lot.uniform(*SHARES) for _ in range(lot.randint(1, MOST_SEGMENTS))] for _ in range(REPLAYS)]
    return [
        [round(reserved_bytes * share / SEGMENT_BYTES + 0.5) * SEGMENT_BYTES for share in replay] for replay in shares
    ]
