"""Measures how long each operator of a step keeps the GPU busy, by name and pass, with torch's profiler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.autograd.profiler_util import FunctionEvent

    from trainers.measuring.phases import ProbedTraining

MICRO = 1e-6
"""Seconds in a microsecond, the profiler's unit."""

LEAST_SHARE = 0.001
"""Operators with a smaller share of their pass's time are not listed."""


def operator_seconds(training: ProbedTraining) -> dict[str, Any]:
    """Runs one more step and returns, for ``forward``, ``backward`` (including recomputation) and ``optimizer``: the
    number of ``kernels``, their total ``seconds``, and ``operators``, [calls, seconds] by name.

    Empty if the profiler sees no kernels.
    """
    found = _passes(training.forward_backward, "forward", "backward")
    return found | _passes(training.optimizer_step, "optimizer", "optimizer") if found else {}


def _passes(run: Callable[[], None], here: str, elsewhere: str) -> dict[str, Any]:
    """The facts of the operators that ``run`` executes: those of this thread under the name ``here``, those of
    autograd's threads under ``elsewhere``."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        with torch.profiler.record_function(here):
            run()
        torch.cuda.synchronize()
    events = profile.events() or []
    mine = {event.thread for event in events if event.name == here and event.device_type.name == "CPU"}
    parts: dict[str, list[FunctionEvent]] = defaultdict(list)
    seen: set[int] = set()  # loading a kernel is a further event, with the same id and kernels as its operator
    for event in events:
        if event.device_type.name == "CPU" and event.kernels and not event.is_user_annotation:
            if event.id in seen:
                continue
            seen.add(event.id)
            parts[here if event.thread in mine else elsewhere].append(event)
    return {name: _facts(part) for name, part in parts.items()}


def _facts(events: list[FunctionEvent]) -> dict[str, Any]:
    """Operators of one pass, longest first."""
    operators: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in events:
        operators[event.name][0] += 1
        operators[event.name][1] += sum(kernel.duration for kernel in event.kernels) * MICRO
    total = sum(seconds for _, seconds in operators.values())
    ordered = sorted(operators.items(), key=lambda item: -item[1][1])
    return {
        "kernels": sum(len(event.kernels) for event in events),
        "seconds": round(total, 7),
        "operators": {name: [calls, round(s, 7)] for name, (calls, s) in ordered if s >= LEAST_SHARE * total},
    }
