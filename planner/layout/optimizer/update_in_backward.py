"""Optimizers that step inside backward, one parameter at a time."""

from __future__ import annotations

import itertools

from planner.layout.run import Run
from planner.tape.program import Stage


def step_in_backward(run: Run) -> None:
    """The optimizer steps inside backward: what it does to one parameter follows where that parameter's gradient is
    made, and frees it (torch ``register_post_accumulate_grad_hook``). States are made in the first step's backward."""
    if run.strategy.optimizer_step != "backward":
        return
    first, later = _updates_by_gradient(run, run.optimizer_first), _updates_by_gradient(run, run.optimizer)
    run.first_step = _with_updates(run.step, first)
    run.step = _with_updates(run.step, later)


def _updates_by_gradient(run: Run, stage: Stage) -> dict[int, list[int]]:
    """Takes an optimizer's stage apart: the gradient freed at its end -> the events of one parameter's step.

    Neighbouring frees are on a tape in the order of allocation, so those behind the gradient's belong to it too.
    """
    gradients = set(run.named("gradient").values())
    updates: dict[int, list[int]] = {}
    events: list[int] = []
    freed: int | None = None
    for event in itertools.chain.from_iterable(events for _, events in stage.stretches[:-1]):
        ends = event < 0 and ~event in gradients
        if freed is not None and (event >= 0 or ends):
            updates[freed], events, freed = events, [], None
        events.append(event)
        freed = ~event if ends else freed
    if freed is not None:
        updates[freed] = events
    stage.stretches = stage.stretches[-1:]  # the end of the step, see `planner.layout.recorded_run.add_optimizer`
    return updates


def _with_updates(step: Stage, updates: dict[int, list[int]]) -> Stage:
    """A step in which a parameter's update follows the operator that made its gradient.

    Autograd accumulates a gradient once that operator has computed those of its other inputs and let go of what it
    saved (torch/csrc/autograd/engine.cpp: evaluate_function, call_function). A bias comes before its weight, whose
    gradient passes a transposition first. So an update waits for the first allocation behind a free; where nothing is
    freed, for the end of the stretch.
    """
    stretches = []
    for moment, events in step.stretches:
        merged: list[int] = []
        waiting: list[int] = []
        freed = False
        for event in events:
            if event >= 0 and freed and event not in updates:
                merged += _latest_first(waiting, updates)
                waiting = []
            merged.append(event)
            if event in updates:
                waiting.append(event)
            freed = event < 0 and bool(waiting)
        stretches.append((moment, merged + _latest_first(waiting, updates)))
    return Stage(step.name, stretches)


def _latest_first(gradients: list[int], updates: dict[int, list[int]]) -> list[int]:
    """The events of the updates that some gradients bring, the latest gradient's first."""
    return [event for gradient in reversed(gradients) for event in updates[gradient]]
