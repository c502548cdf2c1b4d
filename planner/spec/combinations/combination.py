"""A row of the table of combinations, and what its condition sees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

from planner.spec.job import SPLIT, Job, Machine, Strategy, WeightsDtype

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


@dataclass(frozen=True, slots=True)
class Proposal:
    """A strategy that is proposed for a job on a machine: the subject of most rows. The strategy is a resolved one
    (`planner.spec.rules.resolve`)."""

    job: Job
    strategy: Strategy
    machine: Machine

    @property
    def weights(self) -> WeightsDtype:
        """The storage format of the model's weights (`fp32`, `bf16`, `nf4`, ...), as the strategy and method give
        it."""
        return self.strategy.weights(self.job.method)

    @property
    def trained(self) -> WeightsDtype:
        """The storage format of what is trained: the weights in full training, the adapters with LoRA."""
        return self.weights if self.job.method == "full" else self.strategy.adapter_dtype

    @property
    def zero(self) -> bool:
        """Whether the sharding is one of DeepSpeed's ZeRO stages."""
        return self.strategy.sharding.startswith("zero")

    @property
    def splits(self) -> bool:
        """Whether an engine splits states, gradients or weights between GPUs."""
        return self.strategy.sharding in SPLIT

    @property
    def autocasts(self) -> bool:
        """Whether autocast runs. Engines that split have 16 bits already: DeepSpeed's whole module is stored in them,
        and FSDP2 gathers its weights in them."""
        return self.strategy.autocast != "none" and not self.splits

    @property
    def both_experts(self) -> bool:
        """Whether one run trains both experts of a model, in turns."""
        return self.job.experts == "both"

    @property
    def trained_flag(self) -> str:
        """The start of the flag that says how what is trained is stored."""
        return "adapter" if self.job.method == "lora" else "weights"

    @property
    def host_optimizers(self) -> str:
        """The optimizers that can step in host RAM with this engine, worded for a fix: "adamw or lion"."""
        return "adamw or lion" if self.zero else "adamw or adafactor"

    @property
    def divisor(self) -> int:
        """The largest number of GPUs for a sample, below the one asked for, that divides all GPUs."""
        return next(n for n in range(self.strategy.context_parallel - 1, 0, -1) if self.machine.world % n == 0)

    @property
    def divisible_gpus(self) -> int:
        """The fewest GPUs of a node, from those there are upwards, that are a multiple of those for a sample."""
        parts = self.strategy.context_parallel
        return parts * -(-self.machine.gpus // parts)


class ModelSummary(NamedTuple):
    """The facts about a model that rows of the tables ask for; `planner.catalog.shapes.summary` takes them from a
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
