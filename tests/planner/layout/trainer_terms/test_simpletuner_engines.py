"""planner/layout/trainer_terms/simpletuner_engines.py: groups of parameters under DeepSpeed, and what FSDP2 keeps."""

from __future__ import annotations

from typing import Any

import pytest

from planner.allocator.implementation import alive, held
from planner.catalog.lookup import model
from planner.catalog.shapes import grid, job_for
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.layout.run import Run
from planner.layout.sharding.zero import trained_elements
from planner.spec.configuration import Configuration
from planner.spec.job import Machine, Strategy
from planner.spec.rules import resolve

GPUS = 2


def run_of(trainer: str, name: str, method: str = "full", **strategy: Any) -> Run:
    job = job_for(model(name), {"model": name, "method": method, "height": 512, "width": 512, "frames": 1})
    machine = Machine(gpu="b200", gpus=GPUS)
    found = Configuration.of(job, resolve(job, Strategy.read(strategy), machine), machine)
    return lay_out(found, load_facts(found), grid(model(name), job), trainer)


def sizes(run: Run, name: str) -> list[int]:
    return [run.sizes[buffer] for buffer, op in enumerate(run.program.op) if op == name]


def undecayed(name: str) -> bool:
    return any(part in name.lower() for part in ("bias", "norm", "embedding", "embed", "bn"))


@pytest.mark.parametrize("sharding", ["zero-1", "zero-2"])
def test_deepspeed_flattens_and_steps_one_group_after_another(sharding: str) -> None:
    """Of SD 3.5 medium a good third has no weight decay: modulation, which diffusers calls norms, and what embeds."""
    run = run_of("simpletuner", "sd3.5-medium", sharding=sharding, optimizer_step="fused")
    trained = trained_elements(run)
    apart = sum(elements for name, elements in trained.items() if undecayed(name))
    decayed = sum(trained.values()) - apart
    assert 0.3 < apart / decayed < 0.6
    assert sizes(run, "flat weights") == pytest.approx([2 * decayed, 2 * apart], abs=1024)
    assert sizes(run, "fp32 master") == pytest.approx([2 * decayed, 2 * apart], abs=1024)
    alone = run_of("vplan", "sd3.5-medium", sharding=sharding, optimizer_step="fused")
    first, whole = (
        held(each.optimizer.ops, each.sizes)[1] for each in (run, alone)
    )  # beside what is there before: gradients in 16 bits, then in fp32, of a share
    assert whole - first == pytest.approx((2 + 4) * apart / GPUS, rel=0.01)


def test_the_cache_is_emptied_before_the_second_group() -> None:
    run = run_of("simpletuner", "sd3.5-medium", sharding="zero-2", optimizer_step="fused")
    phases = [phase for phase, _ in run.stages]
    assert phases.count("load") == 2
    (second,) = run.phases.wrap
    assert run.empties_cache_after("load", run.load, validates=False)
    assert not run.empties_cache_after("load", second, validates=False)


def test_stage_3_steps_each_group_by_itself() -> None:
    run = run_of("simpletuner", "sd3.5-medium", sharding="zero-3", optimizer_step="fused")
    trained = trained_elements(run)
    apart = sum(elements for name, elements in trained.items() if undecayed(name))
    assert sum(sizes(run, "fp32 master")) == pytest.approx(4 * sum(trained.values()) / GPUS, abs=4096)
    assert sizes(run, "fp32 master")[-1] == pytest.approx(4 * apart / GPUS, abs=4096)


def test_fsdp_s_gradients_stay_for_the_next_step() -> None:
    ours, theirs = (run_of(trainer, "flux.1-dev", sharding="fsdp") for trainer in ("vplan", "simpletuner"))
    assert theirs.first_step is not None
    left = [
        sum(run.sizes[event] for event in alive(run.optimizer.ops, alive(run.step.ops, []))) for run in (ours, theirs)
    ]
    shares = sum(-(-elements // GPUS) for elements in trained_elements(theirs).values())
    kept = [event for event in alive(theirs.first_step.ops, []) if theirs.program.op[event] == "reduced gradients"]
    assert sum(theirs.sizes[event] for event in kept) == pytest.approx(4 * shares, rel=0.001)
    assert ~kept[0] not in theirs.optimizer.ops
    assert left[0] == left[1]  # what a step makes beside them goes again


@pytest.mark.parametrize("method", ["full", "lora"])
def test_what_is_trained_stays_whole_unless_one_rank_loads_it(method: str) -> None:
    """The trainer's own list keeps the parameters that FSDP2 replaces: in fp32, and where they were moved to."""
    by_one, by_all = (
        run_of(trainer, "flux.1-dev", method, sharding="fsdp") for trainer in ("simpletuner", "simpletuner@fsdp-whole")
    )
    more = held(by_all.load.ops, by_all.sizes)[0] - held(by_one.load.ops, by_one.sizes)[0]
    assert more == pytest.approx(4 * sum(trained_elements(by_all).values()), rel=0.01)
