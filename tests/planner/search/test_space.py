"""Which strategies a job allows."""

from __future__ import annotations

import pytest

from planner.catalog import lookup
from planner.errors import VplanError
from planner.search.space import SEARCHED, baseline, effort, most_swapped, strategies, switched
from planner.spec.job import Job, Machine, Strategy
from planner.spec.rules import check

MODEL = lookup.model("cogvideox-2b")
LORA = lookup.job_for(MODEL, {})
FULL = lookup.job_for(MODEL, {"method": "full"})
ONE = Machine(gpu="24GB", host_ram=2**35)
FOUR = ONE.replace(gpus=4)


@pytest.mark.parametrize("job", [LORA, FULL])
@pytest.mark.parametrize("machine", [ONE, FOUR])
def test_every_strategy_is_allowed_and_none_comes_twice(job: Job, machine: Machine) -> None:
    found = strategies(job, Strategy(), machine, ())
    for strategy in found:
        check(job, strategy, machine)
    assert len(set(found)) == len(found) > 5


@pytest.mark.parametrize("job", [LORA, FULL])
@pytest.mark.parametrize("machine", [ONE, FOUR])
def test_the_naive_strategy_is_among_them(job: Job, machine: Machine) -> None:
    assert baseline(job, Strategy(), machine, ()) in strategies(job, Strategy(), machine, ())


@pytest.mark.parametrize("job", [LORA, FULL])
def test_there_are_lossless_and_lossy_ones(job: Job) -> None:
    lossy = {bool(strategy.lossy_fields(job)) for strategy in strategies(job, Strategy(), ONE, ())}
    assert lossy == {False, True}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gradient_checkpointing", "offload"),
        ("optimizer", "adamw-8bit"),
        ("optimizer_step", "loop"),
        ("autocast", "fp16"),
    ],
)
def test_what_was_typed_stays(field: str, value: str) -> None:
    typed = Strategy.read({field: value})
    found = strategies(LORA, typed, ONE, {field})
    assert found and all(getattr(strategy, field) == value for strategy in found)


def test_what_a_plan_file_says_may_be_traded_but_what_is_not_searched_stays() -> None:
    planned = Strategy(gradient_checkpointing="full", ema="cpu")
    found = strategies(LORA, planned, ONE, ())
    assert {strategy.gradient_checkpointing for strategy in found} == {"none", "full", "offload"}
    assert {strategy.ema for strategy in found} == {"cpu"}


def test_typed_contradictions_are_refused_by_name() -> None:
    typed = Strategy(gradient_checkpointing="none", swap_blocks=3)
    with pytest.raises(VplanError, match="swap_blocks without gradient checkpointing"):
        strategies(LORA, typed, ONE, {"gradient_checkpointing", "swap_blocks"})


@pytest.mark.parametrize(
    ("typed", "fault"),
    [
        ({"swap_blocks": 3, "offload_gradients": "cpu"}, "offload_gradients sends gradients where no optimizer is"),
        ({"checkpointed_blocks": 3}, "checkpointed_blocks says nothing with gradient_checkpointing none"),
        ({"swap_blocks": 3, "sharding": "zero-3"}, "swap_blocks and zero-3 would both move the weights"),
    ],
)
def test_of_all_that_is_refused_what_was_typed_is_named_and_nothing_a_search_set(
    typed: dict[str, object], fault: str
) -> None:
    with pytest.raises(VplanError) as caught:
        strategies(LORA, Strategy.read(typed), ONE, typed)
    assert caught.value.message == fault


def test_how_many_blocks_are_checkpointed_goes_with_the_checkpointing() -> None:
    planned = Strategy(gradient_checkpointing="partial", checkpointed_blocks=3)
    assert {strategy.checkpointed_blocks for strategy in strategies(LORA, planned, ONE, ())} == {None}
    typed = {"gradient_checkpointing", "checkpointed_blocks"}
    (kept, *rest) = strategies(LORA, planned, ONE, typed)
    assert not {strategy.checkpointed_blocks for strategy in rest} - {kept.checkpointed_blocks} - {3}
    assert most_swapped(LORA, kept, MODEL, typed) == 3


def test_several_gpus_are_sharded_and_one_is_not() -> None:
    assert {strategy.sharding for strategy in strategies(FULL, Strategy(), FOUR, ())} == {
        "ddp",
        "zero-1",
        "zero-2",
        "zero-3",
        "fsdp",
    }
    assert {strategy.sharding for strategy in strategies(LORA, Strategy(), ONE, ())} == {"none"}


def test_on_one_gpu_zero_3_is_only_there_to_offload_weights() -> None:
    alone = [strategy for strategy in strategies(FULL, Strategy(), ONE, ()) if strategy.sharding == "zero-3"]
    assert alone and all(strategy.offload_params == "cpu" for strategy in alone)


def test_deepspeed_keeps_an_fp32_master_and_so_is_lossless() -> None:
    sharded = [strategy for strategy in strategies(FULL, Strategy(), FOUR, ()) if strategy.sharding == "zero-2"]
    assert sharded and not any(strategy.lossy_fields(FULL) for strategy in sharded)


def test_blocks_swap_only_where_they_are_recomputed_and_nobody_said_how_many() -> None:
    checkpointed = Strategy(gradient_checkpointing="full")
    assert most_swapped(LORA, checkpointed, MODEL, ()) == MODEL.blocks - 1
    assert most_swapped(LORA, checkpointed, MODEL, {"swap_blocks"}) == 0
    assert most_swapped(LORA, Strategy(), MODEL, ()) == 0
    assert most_swapped(FULL, checkpointed, MODEL, ()) == 0


def test_of_two_experts_one_may_wait_and_then_blocks_may_swap_and_nothing_is_split() -> None:
    model = lookup.model("wan2.2-t2v-a14b")
    job = lookup.job_for(model, {"experts": "both"})
    for machine, sharding in ((ONE, "none"), (FOUR, "ddp")):
        found = strategies(job, Strategy(), machine, ())
        assert {strategy.sharding for strategy in found} == {sharding}
        assert {strategy.inactive_expert for strategy in found} == {"gpu", "cpu"}
        swaps = {s.inactive_expert for s in found if most_swapped(job, s, model, ())}
        assert swaps == {"cpu"}
    one = strategies(job.replace(experts="high"), Strategy(), ONE, ())
    assert {strategy.inactive_expert for strategy in one} == {"absent"}


def test_switches_are_told_in_an_order_in_which_each_is_allowed() -> None:
    before = baseline(LORA, Strategy(), ONE, ())
    after = before.replace(swap_blocks=3, gradient_checkpointing="full")
    assert switched(before, after) == ("gradient_checkpointing", "swap_blocks")
    assert set(SEARCHED) <= set(Strategy.model_fields)


def test_what_leans_on_host_ram_is_more_effort() -> None:
    plain = baseline(LORA, Strategy(), ONE, ())
    full, offloaded = (plain.replace(gradient_checkpointing=value) for value in ("full", "offload"))
    assert effort(plain, plain) < effort(plain, full) < effort(plain, offloaded)
