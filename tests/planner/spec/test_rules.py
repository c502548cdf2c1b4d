from __future__ import annotations

from typing import Any

import pytest

from planner.errors import VplanError
from planner.spec.combinations.contradictions import refuse_contradictions
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import (
    Plan,
    plan_from_toml,
    plan_to_toml,
)
from planner.spec.rules import DEPENDENTS, left_behind, resolve

JOB = {"model": "wan2.1-t2v-1.3b", "frames": 81, "height": 480, "width": 832}
ONE = Machine(gpu="rtx4090")
FOUR = Machine(gpu="h100-80gb", gpus=4)


def job(**fields: Any) -> Job:
    return Job.read({**JOB, **fields})


@pytest.mark.parametrize(
    ("fields", "strategy", "machine", "fault", "fix"),
    [
        ({}, {"offload_params": "cpu"}, ONE, "offload_params needs zero-3 or fsdp", "--sharding zero-3"),
        ({}, {"offload_params": "cpu", "sharding": "zero-2"}, FOUR, "offload_params needs zero-3", "--sharding zero-3"),
        ({}, {"offload_params": "nvme", "sharding": "fsdp"}, FOUR, "offload_params nvme needs zero-3", "cpu"),
        ({}, {"offload_optimizer": "nvme"}, ONE, "offload_optimizer nvme needs zero-3", "--offload-optimizer cpu"),
        ({}, {"offload_gradients": "cpu"}, ONE, "needs an offloaded optimizer", "--offload-optimizer cpu"),
        (
            {"method": "full"},
            {"swap_blocks": 4, "gradient_checkpointing": "full"},
            ONE,
            "inside backward",
            "--optimizer-step backward",
        ),
        ({}, {"swap_blocks": 4}, ONE, "without gradient checkpointing", "--gradient-checkpointing full"),
        (
            {},
            {"swap_blocks": 9, "gradient_checkpointing": "partial", "checkpointed_blocks": 8},
            ONE,
            "swap_blocks 9 exceeds the number of checkpointed blocks",
            "--swap-blocks 8",
        ),
        (
            {},
            {"swap_blocks": 4, "gradient_checkpointing": "full", "sharding": "zero-3"},
            FOUR,
            "both move the weights",
            "--offload-params cpu",
        ),
        ({}, {"offload_params": "cpu", "sharding": "fsdp"}, FOUR, "together", "--offload-optimizer cpu"),
        ({}, {"offload_optimizer": "cpu", "sharding": "fsdp"}, FOUR, "together", "--offload-params cpu"),
        ({}, {"validation_mode": "offload", "sharding": "zero-2"}, FOUR, "the engine holds the weights", "on"),
        ({}, {"optimizer": "adamw-8bit", "sharding": "fsdp"}, FOUR, "does not support fsdp", "--optimizer adamw"),
        ({}, {"autocast": "bf16", "sharding": "fsdp"}, FOUR, "casts the weights as it gathers", "--autocast none"),
        ({"method": "full"}, {"ema": "cpu", "sharding": "zero-3"}, FOUR, "no rank has them", "--sharding fsdp"),
        ({}, {"checkpointed_blocks": 4}, ONE, "checkpointed_blocks has no effect", "partial"),
        ({}, {"gradient_checkpointing": "partial"}, ONE, "needs a number of blocks", "--checkpointed-blocks N"),
        ({}, {"group_offload": "block"}, ONE, "no gradients", "--swap-blocks"),
        ({"method": "sample"}, {"group_offload_stream": True}, ONE, "needs group_offload", "--group-offload block"),
        ({"method": "sample"}, {"ema": "gpu"}, ONE, "ema has no effect with method sample", "leave out --ema"),
        ({"method": "sample"}, {"optimizer": "lion"}, ONE, "optimizer has no effect", "leave out --optimizer"),
        ({}, {"weights_dtype": "int4"}, ONE, "int4 has no backward", "--weights-dtype nf4"),
        ({"method": "full"}, {"weights_dtype": "fp8"}, ONE, "cannot be trained", "--method lora"),
        ({"method": "full"}, {"weights_dtype": "nf4"}, ONE, "cannot be trained", "--weights-dtype bf16"),
        ({"method": "full"}, {"master_weights": "fp32"}, ONE, "are fp32 already", "--master-weights"),
        ({}, {"master_weights": "fp32"}, ONE, "are fp32 already", "--master-weights"),
        ({"trainable": ["attn"]}, {}, ONE, "have no effect with method lora", "--method full"),
        (
            {"method": "full"},
            {"optimizer_step": "backward", "gradient_accumulation": 2},
            ONE,
            "none can accumulate",
            "--gradient-accumulation 1",
        ),
        (
            {},
            {"optimizer_step": "backward", "sharding": "zero-2"},
            FOUR,
            "DeepSpeed runs the optimizer step itself",
            "foreach",
        ),
        ({}, {"optimizer_step": "fused", "optimizer": "adamw-8bit"}, ONE, "has no fused step", "foreach"),
        ({}, {"sharding": "none"}, FOUR, "that many different models", "--sharding ddp"),
        ({}, {"context_parallel": 3}, FOUR, "does not divide 4 GPU", "--context-parallel 2"),
        ({}, {"fsdp_replicas": 2}, FOUR, "no effect with sharding ddp", "--sharding fsdp"),
        ({}, {"sharding": "fsdp", "fsdp_replicas": 3}, FOUR, "does not divide 4 GPU", "--fsdp-replicas 2"),
        ({}, {"sharding": "fsdp", "fsdp_replicas": 4}, FOUR, "nothing to shard over", "--sharding ddp"),
        ({}, {"sharding": "fsdp", "fsdp_replicas": 2}, ONE, "does not divide 1 GPU", "--fsdp-replicas 1"),
        (
            {},
            {"expandable_segments": True},
            Machine(gpu="rtx4090", os="windows"),
            "native Windows",
            "--no-expandable-segments",
        ),
    ],
)
def test_contradictions_say_what_to_type(
    fields: dict[str, Any], strategy: dict[str, Any], machine: Machine, fault: str, fix: str
) -> None:
    with pytest.raises(VplanError) as caught:
        refuse_contradictions(Configuration.of(job(**fields), Strategy.read(strategy), machine))
    assert fault in caught.value.message
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("fields", "strategy", "machine"),
    [
        ({}, {}, ONE),
        ({}, {}, FOUR),
        ({}, {}, Machine(gpu="rtx4090", os="windows")),
        ({"method": "full"}, {}, FOUR),
        ({"method": "sample"}, {"group_offload": "leaf", "group_offload_stream": True}, FOUR),
        ({}, {"sharding": "zero-3"}, ONE),
        ({}, {"offload_optimizer": "cpu", "offload_gradients": "cpu"}, ONE),
        ({}, {"sharding": "fsdp", "offload_params": "cpu", "offload_optimizer": "cpu"}, FOUR),
        ({"method": "full"}, {"sharding": "fsdp", "ema": "gpu"}, FOUR),
        ({"method": "full"}, {"sharding": "fsdp", "fsdp_replicas": 2}, FOUR),
        (
            {"method": "full"},
            {"swap_blocks": 20, "gradient_checkpointing": "full", "optimizer_step": "backward"},
            ONE,
        ),
        ({}, {"swap_blocks": 8, "gradient_checkpointing": "partial", "checkpointed_blocks": 8}, ONE),
        ({}, {"weights_dtype": "nf4", "optimizer": "adamw-8bit"}, ONE),
    ],
)
def test_what_goes_together_passes(fields: dict[str, Any], strategy: dict[str, Any], machine: Machine) -> None:
    refuse_contradictions(Configuration.of(job(**fields), Strategy.read(strategy), machine))


def test_the_sharding_of_a_resolved_plan_survives_the_file() -> None:
    settled = resolve(job(), Strategy(), FOUR)
    plan = Plan(job=job(), strategy=settled, machine=FOUR)
    refuse_contradictions(Configuration.of(job(), plan_from_toml(plan_to_toml(plan)).strategy, FOUR))


@pytest.mark.parametrize("row", DEPENDENTS, ids=lambda row: row.field)
def test_a_field_goes_with_the_value_that_it_says_more_about(row: Any) -> None:
    said = {"checkpointed_blocks": 3, "nested_checkpointing": True, "group_offload_stream": True, "fsdp_replicas": 2}
    fields = {row.field: said[row.field], row.of: next(iter(row.beside))}
    assert left_behind(fields) == {} == left_behind({row.field: said[row.field]})
    assert left_behind(fields | {row.of: "none"}) == {row.field: Strategy.model_fields[row.field].get_default()}
