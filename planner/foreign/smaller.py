"""Where no option of a trainer makes a command fit: a shorter clip or a smaller size that does, and the least it can
reach.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from planner.catalog import card_lookup
from planner.dialects.base.bindings import InexpressibleError
from planner.dialects.base.dialect import Move
from planner.errors import NotRecordedError, VplanError
from planner.foreign.case import Case
from planner.foreign.change_words import changed_words, cost_words, costs_of, move_words
from planner.foreign.check import Checked
from planner.foreign.pricing import CheckedEstimate, Pricing
from planner.foreign.smallest_change import Fix, moves_of
from planner.foreign.trainer_search import fitting_for
from planner.search import objectives
from planner.search.question import Question
from planner.search.suggester import Suggester
from planner.spec.job import Job, Strategy
from planner.spec.plan import Estimate

WORTH = 100 << 20
"""Bytes that one more change must save to be part of the least."""
REPLAYS = 6
"""Shapes that are replayed, the largest first, before it is given up: each is smaller by twice as many steps."""


def with_smaller(found: Checked) -> Checked:
    """The answer with what is left to do where no option is enough."""
    if found.fixes or found.outcome.estimate.verdict == "fits":
        return found
    pricing = Pricing(found.case)
    together = least(found.case, moves_of(found.case), pricing)
    if together is not None and together.outcome.estimate.verdict == "fits":  # of more parts than are tried
        return replace(found, fixes=(together,))
    smaller = tuple(shapes(found.case, pricing, together))
    return replace(found, least=together, smaller=smaller, larger_card=larger_card(found), as_lora=as_lora(found))


def as_lora(found: Checked) -> tuple[str, Estimate] | None:
    """A LoRA of the same model at the same size that fits the card, by the same trainer, else by ours; with the words
    that ask for it. None of what is one already, or where none fits."""
    case, job = found.case, found.case.job
    if job.method != "full" or job.buckets or case.machine.world > 1:
        return None
    wanted = Job(model=job.model, method="lora", frames=job.frames, height=job.height, width=job.width)
    question = Question(wanted, Strategy(), case.machine, case.model, case.gpu)
    frames = f"--frames {job.frames} " if case.model.kind == "video" else ""
    size = f"{frames}--resolution {job.height}x{job.width}"
    searches: dict[str, Callable[[], Estimate | None]] = {
        f" --for {case.dialect.name}": lambda: fitting_for(question, case.dialect.name),
        "": lambda: _fitting(question),
    }
    for words, search in searches.items():
        with contextlib.suppress(VplanError):  # that trainer does not, or nothing writes its files
            plan = search()
            if plan is not None and plan.verdict == "fits":
                return f"vplan suggest {job.model} --gpu {case.machine.gpu} {size}{words}", plan
    return None


def _fitting(question: Question) -> Estimate | None:
    suggester = Suggester()
    found = suggester.best(suggester.search(question), explain=False)
    return found.plan if found else None


def larger_card(found: Checked) -> CheckedEstimate | None:
    """The command as it is on the smallest class of card that it fits; None where the card is not what is short, or it
    fits none."""
    estimate = found.outcome.estimate
    if estimate.limit != "gpu" or found.case.gpu.unified:
        return None
    for group in card_lookup.gpu_classes():
        card = card_lookup.gpu(group.name)
        if card.unified or card.allocatable_bytes <= estimate.budget_bytes:
            continue
        case = replace(found.case, gpu=card, machine=found.case.machine.replace(gpu=group.name, unified=False))
        pricing = Pricing(case)
        if pricing.may_be("fits", case) and (outcome := pricing.outcome(case)).estimate.verdict == "fits":
            return outcome
    return None


def least(case: Case, moves: Sequence[Move], pricing: Pricing) -> Fix | None:
    """The changes that together need least device memory, by quick estimates: always the one that saves most is added.
    None where none saves anything."""
    changes: dict[str, Any] = {}
    chosen: list[Move] = []
    here = _device_bytes(case, pricing)
    while here is not None:
        best: tuple[int, Move, dict[str, Any]] | None = None
        for move in (move for move in moves if move not in chosen):
            added = _added(case, changes, move)
            there = _device_bytes(case.changed({**changes, **added}), pricing) if added else None
            if there is not None and there <= here - WORTH and (best is None or there < best[0]):
                best = there, move, added
        if best is None:
            break
        here = best[0]
        chosen.append(best[1])
        changes |= best[2]
    other = case.changed(changes)
    if not chosen:
        return None
    try:
        words = [tuple(move_words(case, other, move)) for move in chosen]
        outcome = pricing.outcome(other)
    except (InexpressibleError, NotRecordedError):
        return None
    cost = cost_words(costs_of(chosen, words), len(chosen) > 1)
    return Fix(tuple(itertools.chain(*words)), cost, bool(set(outcome.estimate.lossy) & changes.keys()), other, outcome)


def _device_bytes(case: Case, pricing: Pricing) -> int | None:
    """Device bytes of a case; None without an estimate, or where the host has not the RAM."""
    quick, ram = pricing.quick_estimate(case), case.machine.host_ram
    return None if quick is None or (ram is not None and quick.host_ram_bytes > ram) else quick.device_bytes


def _added(case: Case, changes: dict[str, Any], move: Move) -> dict[str, Any]:
    """What a move changes, as far as it goes; nothing where another move says otherwise."""
    added: dict[str, Any] = {}
    for step in move.steps(case.fields):
        added |= step
    return {} if any(changes.get(name, value) != value for name, value in added.items()) else added


def shapes(case: Case, pricing: Pricing, least: Fix | None) -> Iterator[Fix]:
    """The longest clip and the largest size that fit with the command's other options as they are; where none does,
    with those that need least."""
    if case.job.buckets:
        return
    wishes = [objectives.frames(case.model)] if case.model.kind == "video" else []
    for objective in (*wishes, objectives.smaller_sizes(case.model, case.job)):
        found = _largest(case, objective, pricing)
        if found is None and least is not None:
            found = _largest(least.case, objective, pricing)
            found = replace(found, change=(*found.change, *least.change), lossy=least.lossy) if found else None
        if found is not None:
            yield found


def _largest(case: Case, objective: objectives.Objective, pricing: Pricing) -> Fix | None:
    values = objective.below(case.job)
    low, high = 0, len(values)  # how many values, from the smallest, may fit
    while low < high:
        middle = (low + high + 1) // 2
        may = pricing.may_be("fits", _at(case, objective, values[middle - 1]))
        low, high = (middle, high) if may else (low, middle - 1)
    step = 1
    for _ in range(REPLAYS):
        if low <= 0:
            return None
        other = _at(case, objective, values[low - 1])
        outcome = pricing.outcome(other)
        if outcome.estimate.verdict == "fits":
            cost = "shorter clips" if objective.name == "frames" else "smaller pictures"
            return Fix(tuple(_words(case, other, objective)), cost, False, other, outcome)
        low, step = low - step, step * 2
    return None


def _at(case: Case, objective: objectives.Objective, value: objectives.Value) -> Case:
    return replace(case, job=objective.put(case.job, value))


def _words(case: Case, other: Case, objective: objectives.Objective) -> list[str]:
    """The flags of another shape; in words where the trainer takes it from its data."""
    try:
        words = list(changed_words(case, other.fields, frozenset(objective.fields)))
    except InexpressibleError:
        words = []
    job = other.job
    return words or [f"{job.frames} frames" if objective.name == "frames" else f"{job.height}x{job.width} pixels"]
