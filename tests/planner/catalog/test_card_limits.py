"""What a card cannot do is refused by name, and 16 bits are fp16 where it has no bf16."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from planner.catalog import card_lookup, lookup
from planner.catalog.card_limits import refuse_on_card
from planner.catalog.shapes import job_for
from planner.commands import cli
from planner.errors import NotEstimatedError
from planner.estimate.estimate import estimate
from planner.layout.cublas import workspace_bytes
from planner.layout.recordings import load_facts
from planner.spec.configuration import Configuration
from planner.spec.job import Machine, Strategy
from planner.units import MIB


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
        refuse_on_card(configuration(card, **options), card_lookup.gpu(card), lookup.model("sdxl"))
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
def test_what_a_card_can_do_is_not_refused(card: str, options: dict[str, Any]) -> None:
    refuse_on_card(configuration(card, **options), card_lookup.gpu(card), lookup.model("sdxl"))


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"model": "sdxl"}, "MIOpen's workspaces"),
        ({"weights_dtype": "nf4"}, "nf4 on AMD"),
        ({"optimizer": "adamw-8bit"}, "adamw-8bit on AMD"),
        ({"compile": "blocks"}, "torch.compile on AMD"),
        ({"attention": "cudnn"}, "no cudnn attention"),
        ({"torch": "2.11"}, "no expandable segments on AMD"),
    ],
)
def test_what_nobody_published_of_amd_is_refused(options: dict[str, Any], fault: str) -> None:
    model = options.get("model", "flux.1-dev")
    with pytest.raises(NotEstimatedError) as caught:
        asked = configuration("mi300x", **{"model": model, **options})
        refuse_on_card(asked, card_lookup.gpu("mi300x"), lookup.model(model))
    assert fault in caught.value.message and caught.value.fix


def test_an_amd_card_is_priced_with_its_own_workspaces_and_a_wider_range() -> None:
    def told(card: str) -> Any:
        asked = configuration(card, model="flux.1-dev", gradient_checkpointing="full", expandable_segments=False)
        return estimate(asked, load_facts(asked))

    amd, nvidia = told("mi300x"), told("h200")
    assert amd.attention_kernel == "flash"
    assert amd.breakdown.workspace == 2 * (128 + 76) * MIB
    assert nvidia.breakdown.workspace == 2 * 32 * MIB
    assert amd.breakdown.context == card_lookup.gpu("mi300x").context_bytes
    for side in ("low_bytes", "high_bytes"):
        away = [abs(getattr(one, side) / one.peak.device_bytes - 1) for one in (amd, nvidia)]
        assert away[0] - away[1] == pytest.approx(0.05, abs=0.005), side


def test_a_smaller_card_of_a_class_without_bf16_has_the_plan_in_fp16() -> None:
    result = CliRunner().invoke(cli, ["suggest", "z-image", "--gpu", "16GB", "--json"])
    assert result.exit_code == 0, result.output
    assert {"gpu": "t4", "verdict": "tight"} in json.loads(result.output)["smaller_cards"]


def test_workspaces_by_the_generation_of_amd() -> None:
    cards = [card_lookup.gpu(name) for name in ("mi210", "mi250x", "mi325x", "mi355x")]
    assert {card.name: workspace_bytes(card) // MIB for card in cards} == {
        "mi210": 108,
        "mi250x": 108,
        "mi325x": 204,
        "mi355x": 204,
    }


def test_a_search_on_an_amd_card_finds_a_plan_without_growing_segments() -> None:
    result = CliRunner().invoke(cli, ["suggest", "flux.1-dev", "--gpu", "mi210", "--json"])
    assert result.exit_code == 0, result.output
    plan = json.loads(result.output)["plan"]
    assert plan["strategy"]["expandable_segments"] is False
    assert any("no run on AMD" in said for said in plan["assumptions"])


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
