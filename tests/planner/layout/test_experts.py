"""Two-expert models: what is there of the expert that a step does not run."""

from __future__ import annotations

from typing import Any

import pytest

from planner.catalog import lookup
from planner.catalog.shapes import grid, job_for
from planner.errors import VplanError
from planner.estimate.estimate import after_step_bytes, estimate
from planner.layout.experts import exchanged_bytes, expert_assumption, high_share
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.spec.combinations.contradictions import refuse_contradictions
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Estimate
from planner.units import GIB, MIB

MODEL = lookup.model("wan2.2-t2v-a14b")
BASE = 2 * MODEL.parameters
"""One expert in bf16, but for a few modules kept in fp32."""


def job(**fields: Any) -> Job:
    return job_for(MODEL, {"frames": 17, **fields})


def priced(asked: Job, gpus: int = 1, trainer: str = "vplan", **strategy: Any) -> Estimate:
    known = Strategy.read({"gradient_checkpointing": "full", "autocast": "none", "adapter_dtype": "bf16", **strategy})
    where = Machine.read({"gpu": "h200-141gb", "gpus": gpus, "host_ram": 2048 * GIB})
    configuration = Configuration.of(asked, known, where)
    return estimate(configuration, load_facts(configuration), trainer)


def test_the_expert_that_is_not_trained_is_absent_unless_asked_for() -> None:
    alone = priced(job())
    assert alone.strategy.inactive_expert == "absent"
    for expert in ("high", "low"):
        found = priced(job(experts=expert))
        assert (found.peak, found.breakdown) == (alone.peak, alone.breakdown)
    note = expert_assumption(MODEL, job())
    assert note and "one of the two experts" in note
    assert expert_assumption(MODEL, job(experts="high")) is None
    assert expert_assumption(lookup.model("wan2.1-t2v-14b"), job()) is None


def test_an_expert_kept_on_the_gpu_is_a_resident_and_in_host_ram_it_is_host_ram() -> None:
    alone, gpu, cpu = (priced(job(experts="high"), inactive_expert=place) for place in ("absent", "gpu", "cpu"))
    assert alone.breakdown.residents == cpu.breakdown.residents == 0
    assert gpu.breakdown.residents == pytest.approx(BASE, rel=0.01)
    assert gpu.peak.allocated_bytes - alone.peak.allocated_bytes == gpu.breakdown.residents
    assert cpu.peak == alone.peak
    assert cpu.host_ram_bytes - alone.host_ram_bytes == pytest.approx(BASE, rel=0.01)
    assert gpu.host_ram_bytes == alone.host_ram_bytes


def test_both_experts_have_weights_and_states_and_one_has_gradients() -> None:
    one, both = priced(job(experts="high")), priced(job(experts="both"))
    assert both.strategy.inactive_expert == "gpu"
    assert both.breakdown.weights == pytest.approx(2 * one.breakdown.weights, rel=1e-6)
    assert both.breakdown.optimizer == pytest.approx(2 * one.breakdown.optimizer, abs=MIB)
    assert both.breakdown.gradients == one.breakdown.gradients
    assert both.disk_bytes == 2 * one.disk_bytes
    in_turn = priced(job(experts="both"), inactive_expert="cpu")
    adapter = one.disk_bytes // 3  # a checkpoint is the adapter and its two states
    assert in_turn.breakdown.weights - one.breakdown.weights == pytest.approx(adapter, abs=MIB)
    # The other expert, and its part of the copy that a checkpoint is written from.
    assert in_turn.host_ram_bytes - one.host_ram_bytes == pytest.approx(BASE + one.disk_bytes, rel=0.005)


@pytest.mark.parametrize("sharding", ["zero-1", "zero-2", "zero-3", "fsdp"])
def test_both_experts_are_not_split(sharding: str) -> None:
    with pytest.raises(VplanError, match="both experts under"):
        priced(job(method="full", experts="both"), gpus=8, sharding=sharding)


@pytest.mark.parametrize("buckets", ["copy", "view"])
def test_ddp_has_buckets_for_both(buckets: str) -> None:
    one, both = (priced(job(experts=which), gpus=2, sharding="ddp", grad_buckets=buckets) for which in ("low", "both"))
    assert both.breakdown.buckets == 2 * one.breakdown.buckets > 0


def test_micro_batches_of_both_experts_leave_gradients_of_both() -> None:
    """Where each may be another one's turn, as musubi-tuner has it. A LoRA's 16-bit gradients take as much as a state;
    AdamW's foreach step copies both experts' at once."""
    once, twice, often = (
        priced(job(experts="both"), trainer="musubi-tuner", gradient_accumulation=steps) for steps in (1, 2, 3)
    )
    alone = priced(job(experts="high"), gradient_accumulation=2)
    gradients = once.disk_bytes // 6
    grown = twice.phases["train"].allocated_bytes - once.phases["train"].allocated_bytes
    assert grown == pytest.approx(gradients, abs=2 * MIB)
    assert often.phases["train"].allocated_bytes >= twice.phases["train"].allocated_bytes
    step, bare = (found.phases["optimizer"].allocated_bytes for found in (twice, once))
    assert step - bare == pytest.approx(2 * gradients, abs=2 * MIB)
    assert alone.phases["optimizer"] == priced(job(experts="high")).phases["optimizer"]


def test_a_step_of_ours_is_of_one_expert() -> None:
    once, twice = (priced(job(experts="both"), gradient_accumulation=steps) for steps in (1, 2))
    alone = [priced(job(experts="high"), gradient_accumulation=steps) for steps in (1, 2)]
    assert twice.phases["optimizer"] == once.phases["optimizer"]
    grown = [
        two.phases["train"].allocated_bytes - one.phases["train"].allocated_bytes for one, two in ((once, twice), alone)
    ]
    assert grown[0] == grown[1] > 0


def test_what_waits_for_both_experts_is_freed_with_the_step() -> None:
    asked, where = job(experts="both"), Machine.read({"gpu": "h200-141gb", "host_ram": 2048 * GIB})
    strategies = [Strategy(gradient_checkpointing="full", gradient_accumulation=steps) for steps in (1, 2, 3)]
    left = [
        after_step_bytes(Configuration.of(asked, known, where), load_facts(Configuration.of(asked, known, where)))
        for known in strategies
    ]
    assert left == left[:1] * 3


def exchanged(**strategy: Any) -> int:
    known = Strategy.read({"gradient_checkpointing": "full", "inactive_expert": "cpu", **strategy})
    configuration = Configuration.of(job(experts="both"), known, Machine.read({"gpu": "h200-141gb"}))
    facts = load_facts(configuration)
    return exchanged_bytes(lay_out(configuration, facts, grid(facts.model, configuration.job)))


def test_an_expert_that_comes_back_takes_its_time_on_the_link() -> None:
    """Every second step or so both change places: 2 p (1 - p) of them, with p the share of levels above 0.875, which
    before the shift of 5 is 0.583."""
    stays, waits = (priced(job(experts="both"), inactive_expert=place) for place in ("gpu", "cpu"))
    assert high_share(MODEL.training) == pytest.approx(1 - 0.875 / (5 - 4 * 0.875), abs=1e-9)
    logit = lookup.model("wan2.1-t2v-14b").training.replace(boundary=0.5, training_shift=1.0)
    assert high_share(logit) == pytest.approx(0.5)
    link = waits.step_seconds - stays.step_seconds
    gbps = 2 * 2 * (5 / 12) * (7 / 12) / MODEL.training.expert_steps * BASE / link / 1e9
    assert 20 < gbps < 64
    assert exchanged(swap_blocks=30) < exchanged() / 3  # swapped blocks of either stay where they are
    assert exchanged(inactive_expert="gpu") == 0
    often = priced(job(experts="both"), inactive_expert="cpu", gradient_accumulation=4)
    assert often.step_seconds - 4 * stays.step_seconds < 2 * link  # once in ten steps, however many micro-batches


def sampled(**fields: Any) -> Estimate:
    asked = job(method="sample", **{key: fields.pop(key) for key in ("experts",) if key in fields})
    known, where = Strategy.read(fields), Machine.read({"gpu": "h200-141gb", "host_ram": 2048 * GIB})
    configuration = Configuration.of(asked, known, where)
    refuse_contradictions(configuration)
    return estimate(configuration, load_facts(configuration))


def test_a_sample_goes_through_both_experts_or_waits_for_the_other() -> None:
    one, both = sampled(experts="high"), sampled(experts="both")
    away = sampled(experts="both", inactive_expert="cpu")
    for phase in ("denoise", "decode"):
        more = both.phases[phase].allocated_bytes - one.phases[phase].allocated_bytes
        assert more == pytest.approx(BASE, rel=0.01)
        assert away.phases[phase] == one.phases[phase]
    assert away.host_ram_bytes - one.host_ram_bytes == pytest.approx(BASE, rel=0.01)
    assert both.step_seconds == one.step_seconds


def test_group_offload_keeps_both_experts_in_host_ram() -> None:
    one, both = (sampled(experts=which, group_offload="block") for which in ("high", "both"))
    assert both.phases["denoise"] == one.phases["denoise"]
    assert both.host_ram_bytes - one.host_ram_bytes == pytest.approx(BASE, rel=0.01)


def test_an_expert_that_a_sample_needs_is_somewhere() -> None:
    with pytest.raises(VplanError, match="both experts are used"):
        sampled(experts="both", inactive_expert="absent")


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"inactive_expert": "absent"}, "must be kept somewhere"),
        ({"gradient_accumulation": 2, "master_weights": "fp32", "adapter_dtype": "bf16"}, "over both experts"),
    ],
)
def test_what_both_experts_cannot_do(fields: dict[str, Any], fault: str) -> None:
    asked = job(experts="both")
    with pytest.raises(VplanError) as caught:
        machine = Machine.read({"gpu": "h200-141gb"})
        refuse_contradictions(Configuration.of(asked, Strategy.read({**fields}), machine))
        priced(asked, **fields)
    assert fault in caught.value.message and caught.value.fix
