"""planner/layout/partial_training.py against direct recordings of training a part of the weights."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from planner.allocator.caching import CachingAllocator
from planner.catalog import lookup
from planner.catalog.shapes import grid, job_for
from planner.errors import VplanError
from planner.layout.partial_training import matches
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.layout.run import Facts, Run
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy
from trainers.recording.recordings import record_optimizer, record_step

PROFILE = lookup.model("wan2.1-t2v-1.3b")
BLOCKS = 6
ONE = Machine(gpu="h100-80gb", host_ram=2**38)
HALF = Strategy(weights_dtype="bf16", autocast="none", gradient_checkpointing="full")


def full(trainable: list[str]) -> Job:
    return job_for(PROFILE, {"method": "full", "frames": 17, "trainable": trainable})


def run_of(job: Job, strategy: Strategy) -> Run:
    configuration = Configuration.of(job, strategy, ONE)
    known = load_facts(configuration)
    tapes = {
        name: replace(tape, runs=tuple(replace(run, count=BLOCKS) for run in tape.runs))
        for name, tape in (("step", known.step), ("optimizer", known.optimizer))
    }
    shallow = Facts(known.model, known.gpu, tapes["step"], tapes["optimizer"], known.parameters)
    return lay_out(configuration, shallow, grid(PROFILE, job))


def kinds(run: Run, category: str) -> int:
    return sum(run.sizes[buffer] for buffer in run.named(category).values())


@pytest.mark.parametrize("patterns", [("attn1",), ("blocks.0", "blocks.5"), ("*norm*", "proj_out")])
def test_gradients_and_states_are_those_of_a_direct_recording(patterns: tuple[str, ...]) -> None:
    job = full(list(patterns))
    run = run_of(job, HALF)
    shape, config = grid(PROFILE, job), {**PROFILE.config, "num_layers": BLOCKS}
    trace = record_step(PROFILE, job, HALF, shape, config)
    recorded = {alloc.name: alloc.nbytes for alloc in trace.allocations if alloc.category == "gradient"}
    assert {name: run.sizes[buffer] for name, buffer in run.named("gradient").items()} == recorded

    stepped = record_optimizer(PROFILE, job, HALF, shape, config)
    states = {alloc.name: alloc.nbytes for alloc in stepped.allocations if alloc.category == "optimizer"}
    assert {name: run.sizes[buffer] for name, buffer in run.named("optimizer").items()} == states

    bounds = itertools.pairwise([start for _, start in trace.pieces])
    direct, ours = (CachingAllocator(expandable_segments=True) for _ in range(2))
    for start, stop in bounds:
        direct.run(trace.events[start:stop], [alloc.nbytes for alloc in trace.allocations])
    for stage in (run.load, run.step):
        ours.run(stage.ops, run.sizes)
    workspaces = sum(run.sizes[event] for event in run.load.ops if event >= 0 and run.program.op[event] == "cublas")
    assert direct.allocated_peak_bytes <= ours.allocated_peak_bytes - workspaces


def lent(run: Run) -> int:
    """What the optimizer's later step takes at most beside what is there."""
    own = {event for event in run.optimizer.ops if event >= 0}
    events = (event for event in run.optimizer.ops if event >= 0 or ~event in own)
    return max(itertools.accumulate(run.sizes[e] if e >= 0 else -run.sizes[~e] for e in events), default=0)


@pytest.mark.parametrize("master", ["none", "fp32"])
def test_a_foreach_step_lends_for_what_is_trained_only(master: str) -> None:
    strategy = HALF.replace(master_weights=master)
    whole, part = (run_of(full(names), strategy) for names in ([], ["ffn"]))
    share = kinds(part, "gradient") / kinds(whole, "gradient")
    assert 0.3 < share < 0.7
    assert lent(part) == pytest.approx(share * lent(whole), rel=0.02)  # norms in fp32 have no master


def test_patterns_are_whole_parts_of_names_and_one_must_match() -> None:
    assert matches("blocks.0.attn1.to_q.weight", ["attn1"]) and matches("blocks.0.attn1.to_q.weight", ["blocks.0"])
    assert not matches("blocks.10.attn1.to_q.weight", ["blocks.1", "attn"])
    with pytest.raises(VplanError, match="no weight matches trainable nothing"):
        run_of(full(["nothing"]), HALF)
    with pytest.raises(VplanError, match="trainable under autocast"):
        run_of(full(["attn1"]), HALF.replace(autocast="bf16"))
