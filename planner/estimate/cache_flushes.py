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
"""Lower and upper seconds for a segment to be freed and allocated again. ``cudaFree`` takes 0.41 ms on an RTX 4090
(median; 1.9 at the 99th percentile) and 1.1 on an A10, ``cudaMalloc`` 0.065 there: traces of PyTorch by Ingero
(dev.to/ingero, "Tracing torch.cuda.empty_cache() on an RTX 4090"; patrickluzdev/ingero,
docs/ml_eng_sample_investigation_session.md). Both are lower bounds: the wait for all kernels is not in them, and for
expandable segments, which unmap pages, no source was found."""


def runs_out(played: Sequence[ReplayedStage]) -> bool:
    """Whether a replay at a capacity ran out of memory."""
    return any(entry.replayed.oom_at is not None for entry in played)


def step_seconds(played: Sequence[ReplayedStage]) -> tuple[float, float]:
    """What flushes add to a later step, on average over those that were replayed: lower and upper."""
    later = [entry for entry in played if entry.phase in STEADY]
    segments = sum(entry.replayed.segments_freed for entry in later) / (_steps(played) or 1)
    return segments * SEGMENT_SECONDS[0], segments * SEGMENT_SECONDS[1]


def describe(played: Sequence[ReplayedStage]) -> str:
    """When the cache is emptied, in words."""
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
    """Later steps that were replayed."""
    return sum(entry.phase == "optimizer" for entry in played)
