"""What holes decide: how far reserved memory moves when other pieces lie free in the allocator's cache.

Which hole a tensor falls into depends on everything that was allocated before it, and a recording does not know all of
that: libraries' first calls, a logger, a sampler, a step at another size. So the run is replayed again with a few small
segments free before its first step. Of 74 published peaks 66 lie within 0.6 % of what comes out, 52 of the one replay
(docs/accuracy/reserved-memory.md).
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
"""How large one is, of all that is reserved: together never more than 6 %, so it is holes that move it, not they."""

SEGMENT_BYTES = 2 * MIB
"""What the allocator rounds segments to (c10/cuda/CUDACachingAllocator.cpp, ``kRoundLarge``)."""


def reserved_range(played: Sequence[ReplayedStage]) -> tuple[int, int]:
    """The least and the most that the run's peak reserves, in bytes, over replays with other holes."""
    reserved = reserved_bytes(played)
    strategy = played[-1].run.strategy
    if strategy.expandable_segments:  # few holes: 70 of 76 published runs would not move by half a per cent
        return reserved, reserved
    rank = played[-1].run.configuration.rank
    played = [entry for entry in played if entry.run.configuration.rank == rank]
    # What is encoded before has an allocator of its own.
    runs = list({id(entry.run): entry.run for entry in played if entry.phase != "encode"}.values())
    own = {id(run) for run in runs}
    apart = max((entry.replayed.reserved_peak_bytes for entry in played if id(entry.run) not in own), default=0)
    others = [reserved_bytes(replay_stages(*runs, cached=False, spare=spare)) for spare in _spare(reserved)]
    return max(apart, min(reserved, *others)), max(reserved, *others)


def peak_sides(
    played: Sequence[ReplayedStage], correction: Correction, where: PhaseName, device_bytes: int, most_bytes: int
) -> Sides:
    """How sure the device peak is: what measurements or recordings say, around what holes may make of it, and the most
    that may be there. ``where``: the phase of the peak."""
    lowest, highest = reserved_range(played)
    reserved, share = reserved_bytes(played), correction.share(where)
    more = max(round(share * (highest - reserved)), most_bytes - device_bytes)
    return widen(correction.sides_of(where), device_bytes, round(share * (reserved - lowest)), more)


def widen(sides: Sides, device_bytes: int, less_bytes: int, more_bytes: int) -> Sides:
    """The margin around what holes may make of a peak: so much less, so much more."""
    below, above = sides
    lowest, highest = 1 - less_bytes / device_bytes, 1 + more_bytes / device_bytes
    return 1 - (1 - below) * lowest, (1 + above) * highest - 1


def reserved_bytes(played: Sequence[ReplayedStage]) -> int:
    """The most that replayed stages reserve, bytes."""
    return max(entry.replayed.reserved_peak_bytes for entry in played)


def _spare(reserved_bytes: int) -> list[list[int]]:
    """Sizes of the segments that lie free in each replay, by a lot that is always the same."""
    lot = random.Random(0)
    shares = [[lot.uniform(*SHARES) for _ in range(lot.randint(1, MOST_SEGMENTS))] for _ in range(REPLAYS)]
    return [
        [round(reserved_bytes * share / SEGMENT_BYTES + 0.5) * SEGMENT_BYTES for share in replay] for replay in shares
    ]
