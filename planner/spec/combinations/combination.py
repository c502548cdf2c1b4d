"""A row of the table of combinations, and what its condition sees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Literal, NamedTuple, TypeVar

Kind = Literal["contradiction", "model cannot", "not estimated", "our trainer cannot", "not worth searching"]

Subject = TypeVar("Subject")


class Refusal(NamedTuple):
    """Why a combination may not run, as one line, and what to type instead."""

    reason: str
    fix: str


class Combination(NamedTuple, Generic[Subject]):
    """A combination of values that cannot run, or is not worth trying: one row of a table, with the reason and the fix
    as format strings."""

    kind: Kind
    applies: Callable[[Subject], bool]
    """whether this is the combination"""
    reason: str
    """what is wrong with it, in one line. In braces stand attributes of the subject, as in `str.format`:
    "{0.strategy.sharding}" """
    fix: str = ""
    """what to type instead, written like the reason. Empty where nobody is told: of what a search leaves out"""
    fields: tuple[str, ...] = ()
    """of what a search leaves out: fields that it must be free to set. What the user typed stays"""

    def refusal(self, subject: Subject) -> Refusal:
        """The reason and fix of this row with the subject's values filled in."""
        return Refusal(self.reason.format(subject), self.fix.format(subject))


def refusals(rows: Iterable[Combination[Subject]], subject: Subject) -> Iterator[Refusal]:
    """The refusals of all rows that apply, in the order of the rows."""
    return (row.refusal(subject) for row in rows if row.applies(subject))


def first_refusal(rows: Iterable[Combination[Subject]], subject: Subject) -> Refusal | None:
    """The refusal of the first row that applies; None where none does."""
    return next(refusals(rows, subject), None)


class ModelSummary(NamedTuple):
    """The facts about a model that rows of the tables ask for; `planner.catalog.shapes.model_summary` takes them from a
    profile."""

    title: str
    blocks: int
    """in all stacks: what checkpointing and swapping count"""
    experts: int
    references: int
    """reference images that a sample has when the job does not say"""
    takes_references: bool
    """whether a sample may have some"""
    expert_boundary: bool
    """whether the noise level between two experts is known"""
    has_sound: bool
    """whether it takes sound: its pipeline is then not one of diffusers'"""
    splits_tokens: bool
    """whether diffusers can split the tokens of its samples between GPUs (context parallelism)"""
