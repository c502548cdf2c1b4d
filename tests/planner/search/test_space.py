"""Which strategies a job allows."""

from __future__ import annotations

import pytest

from planner.catalog import card_lookup, lookup
from planner.errors import VplanError
from planner.search.policy import EstimatePolicy
from planner.search.question import Question
from planner.search.space import SAMPLED, SEARCHED, baseline, effort, most_swapped, strategies, switched
from planner.spec.combinations.contradictions import refuse_contradictions
from planner.spec.combinations.search_exclusions import (
    SAMPLING_EXCLUSIONS,
    TRAINING_EXCLUSIONS,
    SearchCandidate,
    exclusions,
)
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy

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
        refuse_contradictions(Configuration.of(job, strategy, machine))
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
    assert {strategy.gradient_checkpointing for strategy in found} == {"none", "full", "offload", "fp8"}
    assert {strategy.ema for strategy in found} == {"cpu"}


def test_typed_contradictions_are_refused_by_name() -> None:
    typed = Strategy(gradient_checkpointing="none", swap_blocks=3)
    with pytest.raises(VplanError, match="swap_blocks without gradient checkpointing"):
        strategies(LORA, typed, ONE, {"gradient_checkpointing", "swap_blocks"})


@pytest.mark.parametrize(
    ("typed", "fault"),
    [
        ({"swap_blocks": 3, "offload_gradients": "cpu"}, "offload_gradients needs an offloaded optimizer"),
        ({"checkpointed_blocks": 3}, "checkpointed_blocks has no effect with gradient_checkpointing none"),
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
    lossless = [strategy for strategy in sharded if strategy.gradient_checkpointing != "fp8"]
    assert lossless and not any(strategy.lossy_fields(FULL) for strategy in lossless)


def test_blocks_swap_only_where_they_are_recomputed_and_nobody_said_how_many() -> None:
    checkpointed = Strategy(gradient_checkpointing="full")
    assert most_swapped(LORA, checkpointed, MODEL, ()) == MODEL.blocks - 1
    assert most_swapped(LORA, checkpointed, MODEL, {"swap_blocks"}) == 0
    assert most_swapped(LORA, Strategy(), MODEL, ()) == 0
    assert most_swapped(FULL, checkpointed, MODEL, ()) == 0
    stepping_inside = Strategy(gradient_checkpointing="full", optimizer_step="backward")
    assert most_swapped(FULL, stepping_inside, MODEL, ()) == MODEL.blocks - 1
    assert most_swapped(FULL.replace(method="sample"), checkpointed, MODEL, ()) == 0


@pytest.mark.parametrize("machine", [ONE, FOUR])
def test_what_gives_up_most_is_searched_as_a_last_resort_alone(machine: Machine) -> None:
    usual = set(strategies(FULL, Strategy(), machine, ()))
    last = set(strategies(FULL, Strategy(), machine, (), last_resort=True))
    assert usual < last
    for strategy in last - usual:
        assert strategy.optimizer == "adafactor" or strategy.optimizer_step == "backward"
        assert strategy.lossy_fields(FULL)
    inside = {strategy.sharding for strategy in last if strategy.optimizer_step == "backward"}
    # DDP sums gradients behind backward, and DeepSpeed steps itself.
    assert inside == ({"none"} if machine.world == 1 else {"fsdp"})
    lora = [set(strategies(LORA, Strategy(), machine, (), last_resort=last)) for last in (False, True)]
    assert lora[0] == lora[1]


def test_of_two_experts_one_may_wait_and_then_blocks_may_swap_and_nothing_is_split() -> None:
    model = lookup.model("wan2.2-t2v-a14b")
    job = lookup.job_for(model, {"experts": "both"})
    for machine, sharding in ((ONE, "none"), (FOUR, "ddp")):
        found = strategies(job, Strategy(), machine, ())
        assert {strategy.sharding for strategy in found} == {sharding}
        assert {strategy.inactive_expert for strategy in found} == {"gpu", "cpu"}
        question = Question(job, Strategy(), machine, model, card_lookup.gpu("rtx4090"))
        swaps = {s.inactive_expert for s in found if EstimatePolicy(question).may_swap(s)}
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


def test_fields_that_a_search_sets_in_the_order_they_are_switched_on() -> None:
    assert SEARCHED == (
        "vae_tiling",
        "gradient_checkpointing",
        "sharding",
        "weights_dtype",
        "autocast",
        "adapter_dtype",
        "master_weights",
        "optimizer",
        "optimizer_step",
        "offload_optimizer",
        "offload_gradients",
        "offload_params",
        "inactive_expert",
        "swap_blocks",
        "adapter_inputs",
        "nested_checkpointing",
        "fsdp_replicas",
    )
    assert SAMPLED == ("vae_tiling", "vae", "group_offload", "group_offload_stream")


# ---- what is not worth searching

PLAIN: dict[str, object] = {
    "vae_tiling": False,
    "weights_dtype": "bf16",
    "autocast": "bf16",
    "adapter_dtype": "fp32",
    "master_weights": "none",
    "gradient_checkpointing": "none",
    "optimizer": "adamw",
    "optimizer_step": "foreach",
    "sharding": "ddp",
    "offload_optimizer": "none",
    "offload_gradients": "none",
    "offload_params": "none",
    "adapter_inputs": "cast",
    "nested_checkpointing": False,
    "fsdp_replicas": 1,
}
ZERO: dict[str, object] = {"sharding": "zero-3", "autocast": "none", "adapter_dtype": "bf16", "master_weights": "fp32"}
FSDP: dict[str, object] = {"sharding": "fsdp", "autocast": "none"}
INSIDE: dict[str, object] = {"weights_dtype": "fp32", "optimizer": "adafactor", "optimizer_step": "backward"}
NVME: dict[str, object] = {"offload_params": "cpu", "offload_optimizer": "cpu"}


def reasons(job: Job, machine: Machine, values: dict[str, object], fixed: tuple[str, ...] = ()) -> list[str]:
    """Why a choice is not searched, by every row that applies."""
    choice = SearchCandidate(job, machine, values)
    return [row.reason for row in exclusions(job, fixed) if row.applies(choice)]


@pytest.mark.parametrize("values", [{}, {"adapter_dtype": "bf16", "autocast": "none"}, ZERO, FSDP, {**FSDP, **NVME}])
def test_what_is_searched(values: dict[str, object]) -> None:
    assert reasons(LORA, FOUR, {**PLAIN, **values}) == []


EXCLUDED: list[tuple[Job, Machine, dict[str, object], str, str]] = [
    (
        LORA,
        FOUR,
        {**ZERO, "master_weights": "none"},
        "master_weights",
        "DeepSpeed trains a module in 16 bits with an fp32 master of its own",
    ),
    (
        LORA,
        FOUR,
        {"adapter_dtype": "bf16", "autocast": "none", "master_weights": "fp32"},
        "master_weights",
        "outside DeepSpeed the trained weights are kept in fp32, which needs no master",
    ),
    (
        LORA,
        FOUR,
        {**ZERO, "adapter_dtype": "fp32", "autocast": "bf16"},
        "adapter_dtype",
        "DeepSpeed trains a module in 16 bits",
    ),
    (
        LORA,
        FOUR,
        {**FSDP, "weights_dtype": "nf4"},
        "weights_dtype",
        "a quantised base under an engine that splits is not estimated",
    ),
    (
        LORA,
        FOUR,
        {"weights_dtype": "nf4", "adapter_dtype": "bf16"},
        "adapter_dtype",
        "beside a quantised base another adapter_dtype saves only megabytes",
    ),
    (
        LORA,
        FOUR,
        {"weights_dtype": "int8", "optimizer": "adamw-8bit"},
        "optimizer",
        "beside a quantised base another optimizer saves only megabytes",
    ),
    (
        LORA,
        FOUR,
        {"weights_dtype": "fp8", "optimizer_step": "fused"},
        "optimizer_step",
        "beside a quantised base another optimizer_step saves only megabytes",
    ),
    (
        LORA,
        FOUR,
        {"adapter_dtype": "bf16"},
        "autocast",
        "autocast does nothing for a model that is in 16 bits throughout, and FSDP2 casts as it gathers",
    ),
    (
        LORA,
        FOUR,
        {"sharding": "fsdp"},
        "autocast",
        "autocast does nothing for a model that is in 16 bits throughout, and FSDP2 casts as it gathers",
    ),
    (
        LORA,
        FOUR,
        {"autocast": "none"},
        "autocast",
        "without autocast what is stored in fp32 computes in fp32",
    ),
    (
        FULL,
        FOUR,
        {"weights_dtype": "fp32", "optimizer": "adamw-8bit", "offload_optimizer": "cpu"},
        "optimizer",
        "8-bit AdamW has no CPU kernel",
    ),
    (
        LORA,
        FOUR,
        {**ZERO, "optimizer": "adamw-8bit"},
        "optimizer",
        "over DeepSpeed's flat shares 8-bit states lose more",
    ),
    (LORA, FOUR, {**FSDP, "optimizer": "adamw-8bit"}, "optimizer", "8-bit AdamW does not run over FSDP2's shares"),
    (
        FULL,
        FOUR,
        {"weights_dtype": "fp32", "optimizer_step": "fused", "offload_optimizer": "cpu"},
        "optimizer_step",
        "the kernels of another step are the GPU's, and the optimizer is in host RAM",
    ),
    (
        LORA,
        FOUR,
        {**FSDP, "offload_params": "cpu"},
        "sharding",
        "FSDP2 offloads weights, gradients and optimizer together",
    ),
    (
        LORA,
        FOUR,
        {**FSDP, "offload_optimizer": "cpu"},
        "sharding",
        "FSDP2 offloads weights, gradients and optimizer together",
    ),
    (
        FULL,
        ONE,
        ZERO,
        "sharding",
        "one GPU has nobody to split with: of ZeRO-3 only the offload of weights is new",
    ),
    (
        FULL,
        FOUR,
        {"weights_dtype": "fp32", "offload_gradients": "cpu"},
        "offload_gradients",
        "gradients stay whole until all GPUs have summed them",
    ),
    (
        FULL,
        FOUR,
        {**ZERO, "sharding": "zero-1", "offload_gradients": "cpu"},
        "offload_gradients",
        "gradients stay whole until all GPUs have summed them",
    ),
    (
        FULL,
        FOUR,
        {**FSDP, **NVME, "offload_gradients": "cpu"},
        "offload_gradients",
        "FSDP2's offload moves gradients anyway",
    ),
    (
        FULL,
        FOUR,
        {**ZERO, "offload_params": "cpu"},
        "offload_params",
        "in full training the optimizer's states are larger than the weights, and go first",
    ),
    (
        LORA,
        ONE,
        {"adapter_inputs": "shared", "weights_dtype": "nf4"},
        "adapter_inputs",
        "only adapters in fp32 under autocast make copies of their inputs",
    ),
    (
        LORA.replace(lora_dropout=0.1),
        ONE,
        {"adapter_inputs": "shared"},
        "adapter_inputs",
        "only adapters in fp32 under autocast make copies of their inputs",
    ),
    (
        LORA,
        ONE,
        {"nested_checkpointing": True, "adapter_inputs": "shared"},
        "nested_checkpointing",
        "only what is recomputed holds a whole block at once",
    ),
    (
        LORA,
        ONE,
        {"nested_checkpointing": True, "gradient_checkpointing": "full"},
        "adapter_inputs",
        "to go without copies of inputs costs nothing, and nested checkpoints a forward",
    ),
    (LORA, FOUR, {"fsdp_replicas": 2}, "fsdp_replicas", "only FSDP2 shards copies"),
    (FULL, FOUR, {**INSIDE, **FSDP}, "optimizer", "a share of a matrix has not all its rows"),
    (
        FULL,
        ONE,
        {"weights_dtype": "fp32", "optimizer": "adafactor"},
        "optimizer_step",
        "behind backward, beside all gradients, 8-bit AdamW is what people take",
    ),
]


@pytest.mark.parametrize(("job", "machine", "values", "field", "reason"), EXCLUDED)
def test_what_is_not_searched_and_why(
    job: Job, machine: Machine, values: dict[str, object], field: str, reason: str
) -> None:
    assert reasons(job, machine, {**PLAIN, **values}) == [reason]
    assert reason not in reasons(job, machine, {**PLAIN, **values}, (field,)), "what was typed stays"


def test_what_trains_a_part_of_the_weights_may_have_masters_outside_deepspeed() -> None:
    part = FULL.replace(trainable=("attn1",))
    values = {**PLAIN, "autocast": "none", "master_weights": "fp32"}
    assert reasons(part, FOUR, values) == []
    assert reasons(part, FOUR, {**values, "master_weights": "none"}) == []


@pytest.mark.parametrize(
    ("values", "field", "reason"),
    [
        (
            {"group_offload_stream": True},
            "group_offload_stream",
            "without group_offload there is no next group to fetch",
        ),
        (
            {"group_offload": "leaf", "vae": "swapped"},
            "vae",
            "with group_offload the model has left already when the VAE comes",
        ),
    ],
)
def test_what_is_not_searched_of_sampling(values: dict[str, object], field: str, reason: str) -> None:
    job = LORA.replace(method="sample")
    plain = {"vae_tiling": False, "vae": "cached", "group_offload": "none", "group_offload_stream": False}
    assert reasons(job, ONE, plain) == []
    assert reasons(job, ONE, {**plain, **values}) == [reason]
    assert reasons(job, ONE, {**plain, **values}, (field,)) == []


def test_copies_of_a_model_are_of_whole_nodes() -> None:
    def copies(nodes: int, gpus: int) -> set[tuple[str, int]]:
        machine = Machine(gpu="h100-80gb", gpus=gpus, nodes=nodes)
        found = strategies(FULL, Strategy(), machine, ())
        return {(strategy.sharding, strategy.fsdp_replicas) for strategy in found if strategy.sharding == "fsdp"}

    assert copies(1, 8) == {("fsdp", 1)}
    assert copies(4, 8) == {("fsdp", 1), ("fsdp", 2), ("fsdp", 4)}
    assert copies(2, 1) == {("fsdp", 1)}  # each GPU would have all of it


def test_every_row_of_what_is_not_searched_is_tested() -> None:
    shown = {reason for *_, reason in EXCLUDED}
    assert {row.reason for row in TRAINING_EXCLUSIONS} == shown
    assert len(TRAINING_EXCLUSIONS) == len(shown) and len(SAMPLING_EXCLUSIONS) == 2


@pytest.mark.parametrize(
    ("job", "machine", "count"),
    [
        (LORA, ONE, 57),
        (LORA, FOUR, 89),
        (FULL, ONE, 48),
        (FULL, FOUR, 108),
        (FULL.replace(trainable=("attn1",)), FOUR, 120),
        (LORA.replace(method="sample"), ONE, 12),
    ],
)
def test_how_many_strategies_are_searched(job: Job, machine: Machine, count: int) -> None:
    assert len(strategies(job, Strategy(), machine, ())) == count
