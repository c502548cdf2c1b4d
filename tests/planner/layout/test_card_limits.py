"""What a card cannot do is refused by name, and 16 bits are fp16 where it has no bf16."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from planner.catalog import lookup
from planner.catalog.shapes import job_for
from planner.commands import cli
from planner.errors import NotEstimatedError
from planner.layout.card_limits import refuse_on_card
from planner.spec.configuration import Configuration
from planner.spec.job import Machine, Strategy


def configuration(card: str, *, torch: str | None = None, model: str = "sdxl", **strategy: Any) -> Configuration:
    job = job_for(lookup.model(model), {})
    return Configuration.of(job, Strategy.read(strategy), Machine(gpu=card, torch=torch))


@pytest.mark.parametrize(
    ("card", "options", "fault", "fix"),
    [
        ("t4", {}, "has no bf16", "--compute-dtype fp16"),
        ("v100-32gb", {"autocast": "bf16", "compute_dtype": "fp16"}, "has no bf16", "--compute-dtype fp16"),
        ("rtx2080ti", {"autocast": "none", "weights_dtype": "bf16"}, "has no bf16", "--compute-dtype fp16"),
        ("p100", {"autocast": "none", "weights_dtype": "nf4"}, "has no bf16", "--compute-dtype fp16"),
        ("titan-rtx", {"compute_dtype": "fp16", "attention": "flash"}, "has no flash", "--attention sdpa"),
        ("p100", {"compute_dtype": "fp16", "compile": "blocks"}, "too old for torch.compile", "--compile none"),
        ("gtx1080ti", {"compute_dtype": "fp16", "torch": "2.15"}, "is not built for", "torch 2.14 or older"),
    ],
)
def test_what_an_old_card_cannot_do_is_refused(card: str, options: dict[str, Any], fault: str, fix: str) -> None:
    with pytest.raises(NotEstimatedError) as caught:
        refuse_on_card(configuration(card, **options), lookup.gpu(card))
    assert fault in caught.value.message and fix in caught.value.fix


@pytest.mark.parametrize(
    ("card", "options"),
    [
        ("rtx3060", {}),
        ("t4", {"compute_dtype": "fp16", "torch": "2.15", "compile": "blocks"}),
        ("v100-32gb", {"compute_dtype": "fp16", "compile": "blocks"}),
        ("p100", {"compute_dtype": "fp16", "torch": "2.14"}),
        ("p100", {"autocast": "none", "weights_dtype": "fp32"}),
    ],
)
def test_what_a_card_can_do_is_not(card: str, options: dict[str, Any]) -> None:
    refuse_on_card(configuration(card, **options), lookup.gpu(card))


def test_fp16_is_the_format_of_all_that_nobody_said() -> None:
    resolved = configuration("t4", compute_dtype="fp16").strategy
    assert (resolved.weights_dtype, resolved.autocast, resolved.adapter_dtype) == ("fp16", "fp16", "fp32")
    assert configuration("t4", compute_dtype="fp16", weights_dtype="nf4").strategy.weights_dtype == "nf4"


def test_a_search_on_a_card_without_bf16_finds_a_plan_in_fp16() -> None:
    result = CliRunner().invoke(cli, ["suggest", "sdxl", "--gpu", "t4", "--json"])
    assert result.exit_code == 0, result.output
    plan = json.loads(result.output)["plan"]
    assert (plan["strategy"]["weights_dtype"], plan["strategy"]["autocast"]) == ("fp16", "fp16")
    assert "fp16, because Tesla T4 has no bf16" in plan["assumptions"]
