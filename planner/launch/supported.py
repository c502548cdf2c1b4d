"""Whether vplan's own training step applies a plan; a probe or a training of any other plan is refused by name.

What it does not apply is in `planner.spec.combinations.trainer_gaps`.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.catalog import lookup
from planner.catalog.profiles import ModelProfile
from planner.catalog.shapes import check_blocks, check_job, summary
from planner.errors import VplanError
from planner.spec.combinations.combination import Refusal, refusals
from planner.spec.combinations.trainer_gaps import TRAINER_GAPS, TrainerProposal
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Plan
from planner.spec.rules import check, resolve


def settled(plan: Plan, *, trained: bool = False) -> Plan:
    """The plan's three records with open fields filled in, or a VplanError for what contradicts or is not applied.

    `trained`: by `vplan train`; else by a probe, which is a few steps on one computer.
    """
    strategy = resolve(plan.job, plan.strategy, plan.machine)
    profile = lookup.model(plan.job.model)
    check_job(profile, plan.job)
    check_blocks(profile, strategy)
    check(plan.job, strategy, plan.machine)
    if plan.trainer != "vplan":
        does = "vplan trains with" if trained else "a probe runs"
        raise VplanError(f"the plan is for {plan.trainer}; {does} vplan's own step", 'set trainer = "vplan"')
    if not trained:
        check_computers(plan.machine)
    what_for = "training yet" if trained else "training step yet, so it cannot be measured"
    for reason, fix in trainer_gaps(profile, plan.job, strategy, plan.machine, trained=trained):
        raise VplanError(f"{reason} is not supported by vplan's {what_for}", fix)
    return Plan(job=plan.job.replace(model=profile.name), strategy=strategy, machine=plan.machine)


def check_computers(machine: Machine) -> None:
    """A VplanError where a plan is for more than the one computer that a probe runs on."""
    if machine.nodes > 1:
        fault = f"the plan is for {machine.nodes} nodes, but only one is measured"
        raise VplanError(fault, "set nodes = 1: each GPU then needs as much (ddp) or more (sharded)")


def trainer_gaps(
    model: ModelProfile, job: Job, strategy: Strategy, machine: Machine, *, trained: bool
) -> Iterator[Refusal]:
    """What of a resolved strategy our step does not apply, and what to write instead, in the order of the table."""
    return refusals(TRAINER_GAPS, TrainerProposal(job, strategy, machine, summary(model), is_probe=not trained))
