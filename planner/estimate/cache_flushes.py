"""What it costs that PyTorch's allocator empties its cache: where memory is short it gives all unused segments back and
asks again (c10/cuda/CUDACachingAllocator.cpp, ``release_cached_blocks``), which DeepSpeed calls a cache flush.

So a plan may run that would reserve more than the card has, if there were more.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.estimate.stages import ReplayedStage
from planner.units import plural

STEADY = ("train", "optimizer")
"""The phases of a later step."""

SEGMENT_SECONDS = 0.4e-3, 1.2e-3
"""To give a segment back and to get it again, from and to. ``cudaFree`` takes 0.41 ms on an RTX 4090 (median; 1.9 at
the 99th percentile) and 1.1 on an A10, ``cudaMalloc`` 0.065 there: traces of PyTorch by Ingero (dev.to/ingero, "Tracing
torch.cuda.empty_cache() on an RTX 4090"; its docs/ml_eng_sample_investigation_session.md). The least: the wait for all
kernels is not in it, and for expandable segments, which unmap pages, no source was found."""


def runs_out(played: Sequence[ReplayedStage]) -> bool:
    """Whether a replay at a capacity ran out of memory."""
    return any(entry.replayed.oom_at is not None for entry in played)


def step_seconds(played: Sequence[ReplayedStage]) -> tuple[float, float]:
    """What flushes add to a later step, from and to."""
    segments = sum(entry.replayed.segments_freed for entry in _last_step(played))
    return segments * SEGMENT_SECONDS[0], segments * SEGMENT_SECONDS[1]


def describe(played: Sequence[ReplayedStage]) -> str:
    """When the cache is emptied, in words."""
    a_step = sum(entry.replayed.retries for entry in _last_step(played))
    if a_step:
        least = step_seconds(played)[0]
        slower = f", at least {least:.2g} s" if least else ", which slows it down"
        return f"memory is so short that PyTorch empties its cache {plural(a_step, 'time')} a step{slower}"
    where = dict.fromkeys(entry.phase for entry in played if entry.replayed.retries)
    return f"memory is so short that PyTorch empties its cache in {', '.join(where)}, and goes on"


def _last_step(played: Sequence[ReplayedStage]) -> list[ReplayedStage]:
    last = {entry.phase: entry for entry in played}
    return [last[phase] for phase in STEADY if phase in last]
