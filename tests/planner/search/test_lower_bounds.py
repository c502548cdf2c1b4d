"""Bounds that rule plans out are bounds: of random questions' random plans, and of every model's trained parameters."""

from __future__ import annotations

import random

import pytest

from planner.catalog import lookup
from planner.catalog.shapes import grid
from planner.errors import NotEstimatedError, VplanError
from planner.layout.inputs import load_facts
from planner.search.lower_bounds import LEAST_TRAINED, walked
from planner.search.screening import Screen
from planner.spec.configuration import Configuration
from planner.spec.job import Machine, Strategy
from tests.benchmarks.optimality import Exhaustive, draw


def test_every_model_trains_nearly_all_of_its_parameters() -> None:
    shares = {}
    for name in lookup.model_names():
        model = lookup.model(name)
        try:
            job = lookup.job_for(model, {"method": "full"})
            configuration = Configuration.of(job, Strategy(gradient_checkpointing="full"), Machine(gpu="h200"))
            found = walked(load_facts(configuration).step, grid(model, job))
        except VplanError:  # trained in part, or as a LoRA alone
            continue
        shares[name] = found.gradients / 4 / model.parameters
    assert len(shares) > 25
    assert LEAST_TRAINED <= min(shares.values()) < 1


@pytest.mark.parametrize("seed", [3, 13, 17, 20])
def test_no_bound_is_above_what_it_bounds(seed: int) -> None:
    dice, checked = random.Random(seed), 0
    while checked < 6:
        try:
            question = draw(dice)
            screen = Screen(load_facts)
            plans = list(Exhaustive(question, screen, dice).plans(question.job, None))
        except VplanError:
            continue
        for strategy in dice.sample(plans, min(len(plans), 3)):
            candidate = question.candidate(question.job, strategy)
            try:
                quick = screen.quick_estimate(candidate)
            except NotEstimatedError:
                continue
            assert screen.floor_bytes(candidate) <= quick.device_bytes, candidate
            assert screen.floor_seconds(candidate) <= quick.step_seconds * (1 + 1e-9), candidate
            assert screen.floor_ram_bytes(candidate) <= quick.host_ram_bytes, candidate
            checked += 1
