"""The parts of a page that take long, spread over the cores of this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from planner import capacity, extent
from planner.commands.spread import cores, spread
from planner.screen import Look
from reports.data import Builder, in_turn

PARTS = ("large", "small", "map", "steps", "compared")
"""The longest work first."""


def shared(builder: Builder, rungs: Sequence[Look]) -> tuple[Any, ...]:
    """As `reports.data.in_turn`, on several cores where there are some. A fork knows all that was looked at before."""
    if cores() < 2:
        return in_turn(builder, rungs)
    found = dict(zip(PARTS, spread(_worker, (builder, tuple(rungs)), PARTS, "report"), strict=True))
    return found["steps"], found["map"], found["small"] + found["large"], found["compared"]


def _worker(builder: Builder, rungs: Sequence[Look]) -> Callable[[str], Any]:
    forms = capacity.Forms(builder.screen, builder.plan.job, extent.axis(builder.model))
    work: dict[str, Callable[[], Any]] = {
        "steps": builder.steps,
        "map": lambda: builder.map(rungs, forms),
        "small": lambda: builder.longest(rungs, forms, large=False),
        "large": lambda: builder.longest(rungs, forms, large=True),
        "compared": builder.compared,
    }
    return lambda name: work[name]()
