"""planner/layout/adapters.py against direct recordings of adapters on layers that no shipped tape has them on."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.allocator.caching import CachingAllocator
from planner.catalog import lookup
from planner.catalog.shapes import grid, job_for
from planner.errors import VplanError
from planner.estimate.estimate import estimate
from planner.layout.adapters import is_named
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.layout.run import Run
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy
from trainers.recording.recordings import record_optimizer, record_step

PROFILE = lookup.model("wan2.1-t2v-1.3b")
ONE = Machine(gpu="h100-80gb", host_ram=2**38)
CASES = [
    (("to_q", "to_v"), "bf16", "none"),
    (("attn1.to_q",), "fp32", "full"),
    (("to_k", "ffn.net.2"), "fp32", "none"),
    (("ffn.net.0.proj", "condition_embedder.time_proj"), "bf16", "full"),
    (("blocks.3.attn2.to_out.0", "blocks.25.ffn.net.2"), "fp32", "full"),
]


def lora(*targets: str) -> Job:
    return job_for(PROFILE, {"method": "lora", "frames": 17, "lora_rank": 8, "lora_targets": targets or None})


def strategy(adapter: str, mode: str) -> Strategy:
    fields = {"weights_dtype": "bf16", "adapter_dtype": adapter, "autocast": "bf16"}
    return Strategy.read({**fields, "gradient_checkpointing": mode})


def run_of(job: Job, strategy: Strategy) -> Run:
    configuration = Configuration.of(job, strategy, ONE)
    return lay_out(configuration, load_facts(configuration), grid(PROFILE, job))


@pytest.mark.parametrize(("targets", "adapter", "mode"), CASES)
def test_a_direct_recording_is_within_the_range(targets: tuple[str, ...], adapter: str, mode: str) -> None:
    job, how = lora(*targets), strategy(adapter, mode)
    run = run_of(job, how)
    shape = grid(PROFILE, job)
    trace = record_step(PROFILE, job, how, shape)
    bytes_of = {"gradient": 0, "weight": 0}
    for alloc in trace.allocations:
        if alloc.category in bytes_of and ".lora_" in (alloc.name or ""):
            bytes_of[alloc.category] += alloc.nbytes

    added = sum(run.sizes[b] for b, op in enumerate(run.program.op) if op == "adapters on more layers")
    for category, nbytes in bytes_of.items():
        named = {name: run.sizes[buffer] for name, buffer in run.named(category).items() if ".lora_" in name}
        assert sum(named.values()) + added == nbytes, category

    states = record_optimizer(PROFILE, job, how, shape)
    direct = sum(alloc.nbytes for alloc in states.allocations if alloc.category == "optimizer")
    of_added = sum(run.sizes[b] for b, op in enumerate(run.program.op) if op == "states of more adapters")
    kept = sum(run.sizes[buffer] for buffer in run.named("optimizer").values())
    assert kept + of_added == pytest.approx(direct, rel=0.001)  # a step's count is a number for each of them

    direct_peak, ours = (CachingAllocator(expandable_segments=True) for _ in range(2))
    direct_peak.run(trace.events[: trace.pieces[-1][1]], [alloc.nbytes for alloc in trace.allocations])
    for stage in (run.load, run.step):
        ours.run(stage.ops, run.sizes)
    workspaces = sum(run.sizes[event] for event in run.load.ops if event >= 0 and run.program.op[event] == "cublas")
    told = ours.allocated_peak_bytes - workspaces
    less, more = run.device.kept_for_adapters
    assert told - less <= direct_peak.allocated_peak_bytes <= told + more


def test_a_name_that_no_layer_has_is_refused() -> None:
    with pytest.raises(VplanError, match=r"no layer of wan2.1-t2v-1.3b is called to_x, k"):
        run_of(lora("to_q", "to_x", "k"), strategy("fp32", "full"))


def test_recorded_choices_are_taken_as_they_are() -> None:
    for targets in (PROFILE.lora.targets, PROFILE.lora.wide):
        run = run_of(lora(*targets), strategy("fp32", "full"))
        assert run.device.kept_for_adapters == (0, 0)
        assert "adapters on more layers" not in run.program.op


def test_an_engine_that_splits_has_what_is_added_in_its_range() -> None:
    job, machine = lora("to_q", "condition_embedder.time_proj"), ONE.replace(gpus=2)
    alone, split = (
        lay_out(configuration, load_facts(configuration), grid(PROFILE, job))
        for sharding, where in (("none", ONE), ("zero-2", machine))
        for configuration in [
            Configuration.of(job, strategy("bf16", "full").replace(sharding=sharding, autocast="none"), where)
        ]
    )
    added = 8 * (6 * 1536 + 1536)
    assert split.device.kept_for_adapters[1] - alone.device.kept_for_adapters[1] == 16 * added


def test_the_answer_says_what_its_range_is_for() -> None:
    usual, some = (
        estimate(configuration, load_facts(configuration))
        for targets in ((), ("to_q", "ffn.net.2"))
        for configuration in [Configuration.of(lora(*targets), strategy("fp32", "full"), ONE)]
    )
    assert not any("just these layers" in word for word in usual.assumptions)
    assert any("just these layers" in word for word in some.assumptions)
    width = [(found.high_bytes - found.low_bytes) / found.peak.device_bytes for found in (usual, some)]
    assert width[1] > width[0]


LAYERS = st.lists(st.sampled_from(["blocks", "0", "attn", "to_q", "q"]), min_size=1, max_size=4).map(".".join)


@given(LAYERS, LAYERS)
@settings(max_examples=200)
def test_a_target_is_the_end_of_a_name_at_a_dot(layer: str, target: str) -> None:
    parts, end = layer.split("."), target.split(".")
    assert is_named(layer, [target]) == (parts[-len(end) :] == end)
