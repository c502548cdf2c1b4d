"""The cost of cache flushes: when an allocation fails, PyTorch's allocator frees all unused segments and tries again
(c10/cuda/CUDACachingAllocator.cpp, ``release_cached_blocks``). DeepSpeed calls this a cache flush.

A plan may therefore run on a card that has less memory than the plan would reserve on a larger one.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.estimate.stages import ReplayedStage
from planner.units import plural

STEADY = ("train", "optimizer")
"""The phases of a step after the first."""

SEGMENT_SECONDS = 0.4e-3, 1.2e-3
"""Lower and upper seconds to free a segment and allocate it again. ``cudaFree`` takes 0.41 ms on an RTX 4090 (median;
1.9 at the 99th percentile) and 1.1 ms on an A10, ``cudaMalloc`` 0.065 ms on the A10: traces of PyTorch by Ingero
(dev.to/ingero, "Tracing torch.cuda.empty_cache() on an RTX 4090"; patrickluzdev/ingero,
docs/ml_eng_sample_investigation_session.md). Both are too low: they exclude the synchronisation with running kernels,
and no source was found for expandable segments, which unmap pages instead."""


def runs_out(played: Sequence[ReplayedStage]) -> bool:
    """Whether a replay with a capacity limit ran out of memory."""
    return any(entry.replayed.oom_at is not None for entry in played)


def step_seconds(played: Sequence[ReplayedStage]) -> tuple[float, float]:
    """(lower, upper) seconds that flushes add to a step after the first, averaged over the replayed ones."""
    later = [entry for entry in played if entry.phase in STEADY]
    segments = sum(entry.replayed.segments_freed for entry in later) / (_steps(played) or 1)
    return segments * SEGMENT_SECONDS[0], segments * SEGMENT_SECONDS[1]


def describe(played: Sequence[ReplayedStage]) -> str:
    """A sentence about when the cache is emptied. The replay must have at least one flush."""
    where = dict.fromkeys(entry.phase for entry in played if entry.replayed.retries)
    assert where, "it runs without a flush, so that nothing is short"
    times = sum(entry.replayed.retries for entry in played if entry.phase in STEADY)
    if times:
        least = step_seconds(played)[0]
        slower = f", at least {least:.2g} s a step" if least else ", which slows it down"
        steps = plural(_steps(played), "step")
        return f"memory is so short that PyTorch empties its cache {plural(times, 'time')} in {steps}{slower}"
    names = " and ".join(phase.replace("_", " ") for phase in where)
    return f"memory is so short that PyTorch empties its cache in {names}, and goes on"


def _steps(played: Sequence[ReplayedStage]) -> int:
    """The number of replayed steps after the first."""
    return sum(entry.phase == "optimizer" for entry in played)
