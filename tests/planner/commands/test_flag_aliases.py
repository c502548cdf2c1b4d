"""Did you mean: our own names with slips, and other trainers' names."""

from __future__ import annotations

import click
import pytest

from planner.commands import cli
from planner.commands._shared.flag_aliases import FOREIGN, likely_options
from planner.spec.job import Job, Machine, Strategy

FIELDS = [field for record in (Job, Machine, Strategy) for field in record.model_fields]
OPTIONS = [f"--{field.replace('_', '-')}" for field in [*FIELDS, "resolution", "zero_stage"]]


def options_of(verb: str) -> list[str]:
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    return [option for parameter in command.params for option in parameter.opts if option.startswith("--")]


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
        ("--size", "--resolution"),
        ("--length", "--frames"),
        ("--fp8", "--weights-dtype fp8"),
        ("--lora", "--method lora"),
    ],
)
def test_meant(typed: str, ours: str) -> None:
    assert likely_options(typed, OPTIONS)[0] == ours


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("--train_data_dir", "--data"),
        ("--dataset", "--data"),
        ("--lr", "--learning-rate"),
        ("--network_alpha", "--lora-alpha"),
        ("--prompts", "--validation-prompts"),
        ("--checkpointing_steps", "--checkpoint-every"),
        ("--max_train_epochs", "--steps"),  # train has no --epochs
    ],
)
def test_what_is_meant_of_training(typed: str, ours: str) -> None:
    assert likely_options(typed, options_of("train")) == [ours]


def test_epochs_are_epochs_where_there_are_some() -> None:
    assert likely_options("--num_train_epochs", options_of("suggest")) == ["--epochs"]


def test_nothing_is_meant_by_nonsense() -> None:
    assert likely_options("--qqqqqqqqqq", OPTIONS) == []


def test_only_options_of_the_command_are_offered() -> None:
    assert likely_options("--blocks-to-swap", ["--json", "--help"]) == []


def test_the_table_names_options_we_have() -> None:
    flags = {option.lstrip("-") for verb in ("train", "suggest") for option in options_of(verb)}
    assert {ours.split()[0] for ours in FOREIGN.values()} <= flags
    assert list(FOREIGN) == sorted(FOREIGN)
