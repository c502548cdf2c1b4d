"""LyCORIS' adapters that a layer's input goes through one factor after another (``bypass_mode``), which never make the
change of its weight: what a LoKr keeps where a recorded LoRA has ``rank`` numbers a token."""

from __future__ import annotations

from planner.layout.adapters import OUTPUT, PRODUCT, SCALED_OUTPUT
from planner.layout.run import Run

SCALED = "mul"
"""Operator of an adapter's forward behind its two products."""


def between_factors(run: Run) -> None:
    """A LoKr's second factor reads what the first gives with its axes turned, a copy as large as the layer's output
    where the factor divides both sides (lycoris-lora 3.4.0 lycoris/modules/lokr.py ``bypass_forward_diff``: ``hb``,
    ``h_cross_group``)."""
    for first, second in _pairs(run):
        run.resize(first, run.sizes[second])


def nothing_between(run: Run) -> None:
    """An adapter that makes its change whole has one product with its layer's input."""
    for first, _ in _pairs(run):
        run.resize(first, 0)


def _pairs(run: Run) -> set[tuple[int, int]]:
    """A recorded LoRA's two products: buffers, one behind the other."""
    if run.job.method != "lora":
        return set()
    operators, sizes = run.program.op, run.sizes
    found = set()
    for stage in filter(None, (run.first_step, run.step, run.accumulate)):
        for _, events in stage.stretches:
            made = [event for event in events if event >= 0 and operators[event] not in (OUTPUT, SCALED_OUTPUT)]
            for first, second, scaled in zip(made, made[1:], made[2:], strict=False):
                ours = (operators[first], operators[second], operators[scaled]) == (PRODUCT, PRODUCT, SCALED)
                if ours and sizes[first] < sizes[second] == sizes[scaled]:
                    found.add((first, second))
    return found
