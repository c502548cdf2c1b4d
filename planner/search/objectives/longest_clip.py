"""The longest clip (of an image model: the largest batch) that each class of card takes, by the search behind
`vplan suggest --frames max` and `--prefer batch`. Pure, given a suggester."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from planner.catalog.card_profiles import GpuProfile
from planner.search.capacity_axes import axis
from planner.search.objectives.largest import largest_by, other_kind
from planner.search.objectives.objective import Value
from planner.search.question import Question
from planner.search.search import Search
from planner.search.suggester import Suggester
from planner.spec.job import Machine
from planner.spec.rules import ResolvedStrategy


@dataclass(frozen=True)
class Longest:
    """The longest clip (of an image model: the largest batch) that one class of card takes; 0 when none."""

    card: str
    title: str
    budget_bytes: int
    host_ram: int | None
    lossless: int
    lossless_by: ResolvedStrategy | None
    """a plan that takes it, not the fastest"""
    lossy: int
    """0 where loss takes no longer ones"""
    lossy_by: ResolvedStrategy | None
    capped: bool
    """more would fit than was tried"""
    unified: bool = False
    """GPU and CPU share one memory"""


def longest(suggester: Suggester, question: Question, cards: Iterable[tuple[GpuProfile, Machine]]) -> Iterator[Longest]:
    """What the question's job, with its length open, comes to on each of the cards."""
    for card, machine in cards:
        yield _longest(suggester.search(question._replace(machine=machine, gpu=card)))


def _longest(search: Search) -> Longest:
    question, objective = search.question, axis(search.question.model)
    plain = largest_by(search, question.job, objective, False, fastest=False)
    if plain is None:
        other = largest_by(search, question.job, objective, True, fastest=False)
    else:
        other = next((wish.plan for wish in other_kind(search, plain, objective, fastest=False)), None)
    lengths = [_length(objective.read(plan.job)) if plan else 0 for plan in (plain, other)]
    ways = [plan.configuration.strategy if plan else None for plan in (plain, other)]
    return Longest(
        question.gpu.name,
        question.gpu.title,
        question.budget_bytes,
        question.machine.host_ram,
        lengths[0],
        ways[0],
        lengths[1],
        ways[1],
        capped=objective.values[-1] in lengths,
        unified=question.gpu.unified,
    )


def _length(value: Value) -> int:
    assert isinstance(value, int)
    return value
