"""Whether a plan on a Mac stays within the working set that macOS recommends for the GPU, exceeds it, or fails.

Metal's ``recommendedMaxWorkingSetSize`` is the budget. A run may exceed it: PyTorch fails at 1.7 times that size
(`planner.allocator.mps`), and until then macOS makes room by swapping memory to disk.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.allocator.mps import HIGH_WATERMARK, LOW_WATERMARK, watermark_bytes
from planner.catalog import apple_cards
from planner.estimate import cache_flushes
from planner.estimate.stages import ReplayedStage, replay_stages
from planner.layout.run import Run
from planner.spec.plan import Estimate
from planner.units import format_gib

SWAPS, MAY_SWAP, FAILS = "swaps: ", "may swap: ", "fails: "
"""Prefixes of the sentence about a plan that exceeds the working set."""

NOT_COMPARED = (
    "no run on a Mac was compared with an estimate: counted is what PyTorch's heaps take; the range goes 60 % further "
    "up, as much as MPSGraph took beside them in four of five public messages, and it may be more"
)
NOT_ENCODED = "prompts and clips are encoded before, in a run of its own: what MPS takes for that is not known"
NO_SECONDS = "no seconds: what PyTorch's kernels reach on Apple's GPUs is not published"


def with_macos_limits(estimate: Estimate, runs: Sequence[Run], played: Sequence[ReplayedStage]) -> Estimate:
    """The estimate for an Apple GPU, with a sentence about the working set among its assumptions; the verdict of a plan
    that fails is `no`. ``runs``: one for each shape; ``played``: their stages, replayed without a limit."""
    told = (NOT_COMPARED, NOT_ENCODED, NO_SECONDS)
    if fault := _failure(estimate, runs, played):
        words = (f"{FAILS}{fault}", *told)
        return estimate.replace(verdict="no", limit="gpu", assumptions=(*words, *estimate.assumptions))
    start = {"no": SWAPS, "tight": MAY_SWAP}.get(estimate.verdict)
    said = (f"{start}{_beyond(estimate)}",) if start else ()
    return estimate.replace(assumptions=(*said, *told, *estimate.assumptions))


def _beyond(estimate: Estimate) -> str:
    """Which limit a plan exceeds, and the consequence."""
    budget, usable = estimate.budget_bytes, estimate.machine.host_ram
    limit = format_gib(watermark_bytes(budget, HIGH_WATERMARK))
    moves = f"PyTorch does not fail below {limit}, but macOS moves memory to disk, which is slow"
    end = estimate.low_bytes if estimate.verdict == "no" else estimate.high_bytes
    if end > budget or usable is None:
        return f"macOS recommends {format_gib(budget)} for the GPU; {moves}"
    beside = format_gib(estimate.host_ram_bytes)
    return f"with {beside} of the process it is more than the {format_gib(usable)} of memory that can be used; {moves}"


def _failure(estimate: Estimate, runs: Sequence[Run], played: Sequence[ReplayedStage]) -> str:
    """Why PyTorch raises an error; empty if it does not."""
    gpu = runs[0].facts.gpu
    longest, most = max(map(_longest, runs)), apple_cards.max_buffer_bytes(gpu)
    if longest >= most:
        return f"one tensor has {format_gib(longest)}, and Metal's longest buffer is below {format_gib(most)}"
    limit = watermark_bytes(estimate.budget_bytes, HIGH_WATERMARK)
    if estimate.low_bytes <= limit:
        reserved = max(entry.replayed.reserved_peak_bytes for entry in played)
        if reserved <= watermark_bytes(estimate.budget_bytes, LOW_WATERMARK):
            return ""
        if not cache_flushes.runs_out(replay_stages(*runs, capacity_bytes=estimate.budget_bytes)):
            return ""
    return (
        f"PyTorch stops at {format_gib(limit)}, 1.7 times the {format_gib(estimate.budget_bytes)} that macOS recommends"
    )


def _longest(run: Run) -> int:
    """Bytes of a run's largest tensor."""
    return max(run.sizes[event] for _, stage in run.stages for event in stage.ops if event >= 0)


def headline(assumptions: Sequence[str]) -> str:
    """The sentence about swapping or failing among the assumptions; empty if there is none."""
    return next((note for note in assumptions if note.startswith((SWAPS, MAY_SWAP, FAILS))), "")
