"""Checks that vplan's own training step supports a plan; a probe or run of any other plan is refused with the reason.

`planner.spec.combinations.trainer_gaps` lists what it does not support.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.catalog import lookup
from planner.catalog.profiles import ModelProfile
from planner.catalog.shapes import check_blocks, check_job, model_summary
from planner.errors import VplanError
from planner.spec.combinations.combination import Refusal, refusals
from planner.spec.combinations.contradictions import refuse_contradictions
from planner.spec.combinations.trainer_gaps import TRAINER_GAPS, TrainerConfiguration
from planner.spec.configuration import Configuration
from planner.spec.job import Machine
from planner.spec.plan import Plan


def supported_plan(plan: Plan, *, trained: bool = False) -> Plan:
    """The plan with open fields filled in. Raises a VplanError for contradictions and for what is not supported.

    `trained`: for `vplan train`; else for a probe, which is a few steps on one computer.
    """
    configuration, profile = plan.configuration, lookup.model(plan.job.model)
    check_job(profile, plan.job)
    check_blocks(profile, configuration.strategy)
    refuse_contradictions(configuration)
    if plan.trainer != "vplan":
        does = "vplan trains with" if trained else "a probe runs"
        raise VplanError(f"the plan is for {plan.trainer}; {does} vplan's own step", 'set trainer = "vplan"')
    if not trained:
        check_computers(plan.machine)
    what_for = "training yet" if trained else "training step yet, so it cannot be measured"
    for reason, fix in trainer_gaps(profile, configuration, trained=trained):
        raise VplanError(f"{reason} is not supported by vplan's {what_for}", fix)
    return Plan.under(replace(configuration, job=plan.job.replace(model=profile.name))).replace(training=plan.training)


def check_computers(machine: Machine) -> None:
    """Raises a VplanError for a plan on several computers: a probe runs on one only."""
    if machine.nodes > 1:
        fault = f"the plan is for {machine.nodes} nodes, but only one is measured"
        raise VplanError(fault, "set nodes = 1: each GPU then needs as much (ddp) or more (sharded)")


def trainer_gaps(model: ModelProfile, configuration: Configuration, *, trained: bool) -> Iterator[Refusal]:
    """What our step does not support in a configuration, and what to write instead, in the order of `TRAINER_GAPS`."""
    job, strategy, machine = configuration.job, configuration.strategy, configuration.machine
    subject = TrainerConfiguration(job, strategy, machine, model_summary(model), is_probe=not trained)
    return refusals(TRAINER_GAPS, subject)
