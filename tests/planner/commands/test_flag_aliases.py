"""Did you mean: our own names with slips, and other trainers' names."""

from __future__ import annotations

import pytest

from planner.commands._shared.flag_aliases import FOREIGN, likely_options
from planner.spec.job import Job, Machine, Strategy

FIELDS = [field for record in (Job, Machine, Strategy) for field in record.model_fields]
OPTIONS = [f"--{field.replace('_', '-')}" for field in [*FIELDS, "resolution", "zero_stage"]]


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("--blocks-to-swap", "--swap-blocks"),
        ("--blocks_to_swap", "--swap-blocks"),
        ("--block_to_swap", "--swap-blocks"),
        ("--train_batch_size", "--batch-size"),
        ("--lora_rank", "--lora-rank"),
        ("--lora_rank=32", "--lora-rank"),
        ("--num_frames", "--frames"),
        ("--frame", "--frames"),
        ("--use_gradient_checkpointing_offload", "--gradient-checkpointing offload"),
        ("--use-8bit-adam", "--optimizer adamw-8bit"),
    ],
)
def test_meant(typed: str, ours: str) -> None:
    assert likely_options(typed, OPTIONS)[0] == ours


def test_nothing_is_meant_by_nonsense() -> None:
    assert likely_options("--qqqqqqqqqq", OPTIONS) == []


def test_only_options_of_the_command_are_offered() -> None:
    assert likely_options("--blocks-to-swap", ["--json", "--help"]) == []


def test_the_table_names_options_we_have() -> None:
    flags = {option.lstrip("-") for option in OPTIONS} | {"steps"}
    assert {ours.split()[0] for ours in FOREIGN.values()} <= flags
    assert list(FOREIGN) == sorted(FOREIGN)
