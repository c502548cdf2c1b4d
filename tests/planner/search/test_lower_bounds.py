"""Bounds that rule plans out are bounds: of random questions' random plans, and of every model's trained parameters."""

from __future__ import annotations

import random

import pytest

from planner.catalog import lookup
from planner.catalog.shapes import grid
from planner.errors import NotEstimatedError, VplanError
from planner.layout.recordings import load_facts
from planner.search.lower_bounds import walked
from planner.search.screening import Screen
from planner.spec.configuration import Configuration
from planner.spec.job import Machine, Strategy
from tests.benchmarks.optimality import Exhaustive, draw


def test_every_model_trains_as_many_of_its_parameters_as_its_profile_says() -> None:
    shares = {}
    for name in lookup.model_names():
        model = lookup.model(name)
        try:
            job = lookup.job_for(model, {"method": "full"})
            configuration = Configuration.of(job, Strategy(gradient_checkpointing="full"), Machine(gpu="h200"))
            found = walked(load_facts(configuration).step, grid(model, job), None)
        except VplanError:  # trained in part, or as a LoRA alone
            continue
        shares[name] = found.gradients / 4 / model.parameters
    assert len(shares) > 25
    assert min(shares.values()) < 1
    assert not {name: share for name, share in shares.items() if share < lookup.model(name).traits.trained_share}


@pytest.mark.parametrize("name", ["wan2.1-t2v-1.3b", "hunyuan-video", "flux.1-dev", "ltx-video-13b"])
def test_checkpoints_in_8_bits_are_bounded_by_what_is_left_of_them(name: str) -> None:
    model, screen = lookup.model(name), Screen(load_facts)
    job = lookup.job_for(model, {"batch_size": 2})
    strategy = Strategy.read({"gradient_checkpointing": "fp8", "weights_dtype": "fp8"})
    candidate = Configuration.of(job, strategy, Machine(gpu="h200"))
    inputs = walked(screen.facts(candidate).step, grid(model, job), model.hidden_size).inputs
    quick, floor = screen.quick_estimate(candidate).device_bytes, screen.floor_bytes(candidate)
    assert quick - inputs / 2 < floor <= quick
    assert inputs / 2 > quick / 50


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


@pytest.mark.parametrize("sharding", ["none", "zero-3"])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_no_bound_counts_adapters_that_are_left_out(mode: str, sharding: str) -> None:
    model, screen = lookup.model("qwen-image"), Screen(load_facts)
    job = lookup.job_for(model, {"lora_rank": 512, "lora_targets": ["img_mlp.net.0.proj"]})
    fields = {"gradient_checkpointing": mode, "sharding": sharding}
    machine = Machine(gpu="b200", gpus=1 if sharding == "none" else 2)
    candidate = Configuration.of(job, Strategy.read(fields), machine)
    quick = screen.quick_estimate(candidate)
    assert screen.floor_bytes(candidate) <= quick.device_bytes
    assert screen.floor_seconds(candidate) <= quick.step_seconds * (1 + 1e-9)
    assert screen.floor_ram_bytes(candidate) <= quick.host_ram_bytes
