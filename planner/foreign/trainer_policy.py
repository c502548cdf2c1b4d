"""Which strategies another trainer has settings for: the policy of a search about that trainer."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from planner import dialects
from planner.catalog.swapped_stacks import splits
from planner.dialects.base.bindings import InexpressibleError, UnsupportedValue
from planner.dialects.base.dialect import Dialect, nearest_fields
from planner.errors import ContradictionError
from planner.foreign.export import fields_of, settings_and_fields
from planner.search.policy import EstimatePolicy, Policy
from planner.search.question import Question
from planner.search.space import Space
from planner.spec.combinations.contradictions import contradictions
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Plan
from planner.spec.rules import ResolvedStrategy, resolve

OURS = "vplan"

PRECISION = ("adapter_dtype", "autocast")
"""Fields that depend on each other in what a trainer does."""

ITS_OWN = (*PRECISION, "optimizer_step")
"""Fields of which a trainer has one value for each base and optimizer."""

BY_BLOCK = frozenset({"gradient_checkpointing", "checkpointed_blocks", "swap_blocks"})
"""Fields that most trainers have settings for, whatever else they do in a way of their own."""

FEWEST_SWAPPED = (1, 2, 3)
"""What the setting 1 swaps: a block, or of models with two kinds of blocks as many of the smaller kind
(`planner.catalog.swapped_stacks`)."""


class TrainerPolicy(EstimatePolicy):
    """Allows only strategies that a trainer has settings for; the margin decides what fits.

    ``beside``: the plan whose alternatives are searched. It may come from a command that can be read but not written.
    Values of its strategy that no setting expresses are allowed in the alternatives too, and so is any value of such a
    field of the job.
    """

    def __init__(self, question: Question, dialect: Dialect, beside: Plan | None = None) -> None:
        super().__init__(question)
        self.dialect = dialect
        self.beside = beside
        self.trainer = beside.trainer if beside else OURS
        self.unwritten = {each.field: each.value for each in _unsaid(dialect.name, beside)} if beside else {}
        self.found = False
        """whether any candidate could be said"""
        self.unsaid: Counter[str] = Counter()
        """why others could not, in words"""

    def about(self, question: Question) -> TrainerPolicy:
        """The same trainer, asked something else."""
        return TrainerPolicy(question, self.dialect, self.beside)

    def strategies(self, job: Job, listed: Sequence[ResolvedStrategy]) -> Sequence[ResolvedStrategy]:
        """The listed ones; and, for those that the trainer cannot express, what it does instead, if that differs in
        `ITS_OWN` only. Our trainer does not do that, so it is not listed."""
        return list(dict.fromkeys(chain(listed, filter(None, (self._as_it_does(job, each) for each in listed)))))

    def _as_it_does(self, job: Job, strategy: ResolvedStrategy) -> ResolvedStrategy | None:
        """A strategy as the trainer does it, where it does not do it as it is."""
        machine = self.question.machine
        before = fields_of(plan_for(self.question, job, strategy, self.trainer))
        after = nearest_fields(self.dialect, before)
        changes = {field: after[field] for field in ITS_OWN if after[field] != before[field]}
        if not changes or changes.keys() & self.question.fixed:
            return None
        other = resolve(job, strategy.replace(**changes), machine)
        if not (self._says(job, other, False) or self._swaps(job, other, False)):
            return None
        return None if any(contradictions(Configuration(job, other, machine))) else other

    def candidates(self, job: Job, recorded: Sequence[ResolvedStrategy]) -> Sequence[ResolvedStrategy]:
        """Those that the trainer can express without swapped blocks, or with some."""
        said = [one for one in recorded if self._says(job, one) or self._swaps(job, one, False)]
        self.found = self.found or bool(said)
        return said

    def all_candidates(self) -> Sequence[ResolvedStrategy]:
        """All strategies that the search may answer with, assuming that everything is recorded."""
        job = self.question.job
        try:
            return self.candidates(job, self.strategies(job, list(Space(self.question).strategies(job, False))))
        except ContradictionError:
            return ()

    def loss(self, job: Job, strategy: Strategy) -> int:
        """Every lossy field, but for 16 bits of adapters where the trainer has no others."""
        given_up = super().loss(job, strategy)
        if "adapter_dtype" not in strategy.lossy_fields(job):
            return given_up
        return given_up - (not self._says(job, strategy.replace(adapter_dtype="fp32"), False))

    def may_swap(self, strategy: Strategy) -> bool:
        """Whether the trainer swaps blocks at all under such a strategy."""
        return self._swaps(self.question.job, strategy)

    def swap_count(self, blocks: int, up: bool) -> int:
        """As its setting counts: of models with two kinds of blocks not every number can be said."""
        known = [sum(split) for split in splits(self.dialect.name, self.question.model).values()]
        if not known or not blocks:
            return blocks
        fitting = (count for count in known if (count >= blocks if up else count <= blocks))
        return min(fitting, default=0) if up else max(fitting, default=0)

    def may_checkpoint_partly(self, job: Job, strategy: Strategy) -> bool:
        """Whether the trainer can checkpoint a part of the blocks."""
        return self._says(job, strategy.replace(gradient_checkpointing="partial", checkpointed_blocks=1))

    def is_open(self, job: Job, strategy: Strategy) -> bool:
        """Whether the trainer can express the very plan."""
        return self._says(job, strategy)

    def _swaps(self, job: Job, strategy: Strategy, counts: bool = True) -> bool:
        return any(self._says(job, strategy.replace(swap_blocks=blocks), counts) for blocks in FEWEST_SWAPPED)

    def _says(self, job: Job, strategy: Strategy, counts: bool = True) -> bool:
        plan = plan_for(self.question, job, strategy, self.trainer)
        unsaid = [each for each in _unsaid(self.dialect.name, plan) if not self._may_be_unsaid(each)]
        if counts:
            self.unsaid.update(each.message for each in unsaid)
        return not unsaid

    def _may_be_unsaid(self, unsaid: UnsupportedValue) -> bool:
        field = unsaid.field
        if field == "grad_buckets" and field not in self.question.fixed:  # SimpleTuner has others with swapped blocks
            return True
        return field in self.unwritten and (field in Job.model_fields or self.unwritten[field] == unsaid.value)


def other_ways_of(plan: Plan, question: Question) -> tuple[Question, Callable[[Question], Policy]]:
    """(question, policy) for a search over all ways in which a plan's trainer can train the plan's job.

    If nothing that is searched can be expressed, more and more of the plan's own strategy is kept fixed: its precision,
    then everything but how blocks are checkpointed and swapped, then all of it.
    """
    dialect = dialects.dialect(plan.trainer)
    own = dict(plan.configuration.strategy)

    def policy(asked: Question) -> TrainerPolicy:
        return TrainerPolicy(asked, dialect, plan)

    for held in ((), PRECISION, ITS_OWN, own.keys() - BY_BLOCK):
        narrowed = typed(question, {field: own[field] for field in held})
        if policy(narrowed).all_candidates():
            return narrowed, policy
    return typed(question, own), policy


def typed(question: Question, changes: Mapping[str, Any]) -> Question:
    """The question with these values as if they had been typed."""
    return question._replace(strategy=question.strategy.replace(**changes), fixed=question.fixed | changes.keys())


def plan_for(question: Question, job: Job, strategy: Strategy, trainer: str = OURS) -> Plan:
    """The plan for a strategy on the question's machine, with everything open filled in."""
    return Plan.under(Configuration(job, resolve(job, strategy, question.machine), question.machine), trainer)


def _unsaid(name: str, plan: Plan) -> tuple[UnsupportedValue, ...]:
    """The values of a plan that matter and that a dialect, given by name, cannot express."""
    # Of the machine only the number of GPUs matters, and a search asks the same for every card: so it is cached.
    machine = Machine(gpu="any", gpus=plan.machine.gpus, nodes=plan.machine.nodes)
    return _unsaid_of(name, replace(plan.configuration, machine=machine), plan.trainer)


@functools.lru_cache(maxsize=8192)
def _unsaid_of(name: str, configuration: Configuration, trainer: str) -> tuple[UnsupportedValue, ...]:
    try:
        settings_and_fields(dialects.dialect(name), Plan.under(configuration, trainer))
    except InexpressibleError as error:
        return error.values
    return ()
