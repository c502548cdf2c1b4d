"""What a run goes on as when memory runs out: less memory, the same global batch, a state that fits."""

from __future__ import annotations

from typing import Any

import pytest

from planner.estimate.estimate import estimate
from planner.launch.fallback import difference, next_plan
from planner.launch.supported import supported_plan
from planner.layout.recordings import load_facts
from planner.spec.job import Bucket, Job, Machine, Strategy
from planner.spec.plan import Plan

MODEL = "wan2.1-t2v-1.3b"


def plan(strategy: dict[str, Any] | None = None, **job: Any) -> Plan:
    shape = {"model": MODEL, "frames": 17, "height": 480, "width": 832, **job}
    found = Plan(job=Job.read(shape), strategy=Strategy.read(strategy or {}), machine=Machine(gpu="24GB"))
    return supported_plan(found, trained=True)


def test_without_a_ladder_it_checkpoints_then_offloads_then_halves_the_batch() -> None:
    found: Plan | None = plan(batch_size=4)
    seen = []
    while found := next_plan(found, None):
        strategy = found.strategy
        seen.append((strategy.gradient_checkpointing, found.job.batch_size, strategy.gradient_accumulation))
    assert seen == [("full", 4, 1), ("offload", 4, 1), ("offload", 2, 2), ("offload", 1, 4)]


def test_the_batch_of_every_shape_is_halved_or_none() -> None:
    buckets = (
        Bucket(frames=17, height=480, width=832, batch_size=2),
        Bucket(frames=1, height=480, width=832, batch_size=8),
    )
    found = next_plan(plan({"gradient_checkpointing": "offload"}, buckets=buckets), None)
    assert found is not None
    assert [shape.batch_size for shape in found.job.shapes] == [1, 4]
    odd = (buckets[0], buckets[1].replace(batch_size=3))
    assert next_plan(plan({"gradient_checkpointing": "offload"}, buckets=odd), None) is None


def test_a_step_inside_backward_cannot_accumulate() -> None:
    strategy = {"gradient_checkpointing": "offload", "optimizer_step": "backward"}
    assert next_plan(plan(strategy, method="full", batch_size=2), None) is None


def rung(**strategy: Any) -> Any:
    asked = plan(strategy)
    return estimate(asked.configuration, load_facts(asked.configuration))


def test_the_ladder_comes_first_where_the_checkpoint_fits() -> None:
    """Another optimizer's state would not; the rungs behind the one that is taken stay."""
    rungs = (
        rung(optimizer="lion"),
        rung(gradient_checkpointing="partial", checkpointed_blocks=7),
        rung(gradient_checkpointing="full"),
    )
    found = next_plan(plan().replace(ladder=rungs), None)
    assert found is not None
    assert (found.strategy.gradient_checkpointing, found.strategy.checkpointed_blocks) == ("partial", 7)
    assert found.ladder == rungs[2:]
    assert difference(plan(), found) == "gradient_checkpointing none -> partial, checkpointed_blocks None -> 7"


def test_a_rung_that_needs_more_than_what_ran_out_is_passed_over() -> None:
    """The ladder is by speed, and encoding needs as much for all of them."""
    more, less = rung(gradient_checkpointing="partial", checkpointed_blocks=7), rung(gradient_checkpointing="offload")
    ran_out = rung(gradient_checkpointing="full")
    assert ran_out.phases["encode"] == less.phases["encode"] and ran_out.peak.phase == "encode"
    failed = plan({"gradient_checkpointing": "full"}).replace(ladder=(more, less))
    found, unaware = next_plan(failed, ran_out), next_plan(failed, None)
    assert found is not None and found.strategy.gradient_checkpointing == "offload" and found.ladder == ()
    assert unaware is not None and unaware.strategy.gradient_checkpointing == "partial"


def test_the_data_stays_as_it_is_encoded() -> None:
    """Encoded otherwise, the samples would be others than the checkpoint's, which could not be taken up."""
    encoding = {"vae_tiling": True, "vae_dtype": "fp16", "text_encoder_dtype": "fp32"}
    found = next_plan(plan().replace(ladder=(rung(gradient_checkpointing="full", **encoding),)), None)
    assert found is not None
    assert found.strategy == plan({"gradient_checkpointing": "full"}).strategy


@pytest.mark.parametrize("mode", ["full", "offload"])
def test_what_already_keeps_less_is_not_weakened(mode: str) -> None:
    found = next_plan(plan({"gradient_checkpointing": mode}, batch_size=2), None)
    assert found is not None
    assert found.strategy.gradient_checkpointing == "offload"
