"""What another trainer can do, beside a plan of its own: only what it has settings for, and some of it always."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest

from planner import dialects
from planner.catalog import card_lookup, lookup
from planner.catalog.shapes import job_for
from planner.dialects.base.bindings import InexpressibleError
from planner.foreign.check import check_case
from planner.foreign.export import settings_and_fields
from planner.foreign.trainer_policy import FEWEST_SWAPPED, other_ways_of
from planner.foreign.trainer_search import suggest_for
from planner.layout.recordings import load_facts
from planner.search.question import Question
from planner.search.screening import Screen
from planner.search.search import Search
from planner.search.space import typed_only
from planner.spec.job import Machine, Strategy
from planner.spec.plan import Plan
from planner.units import GIB
from tests.covering import covering
from tests.tools.rehearsed_commands import case_of, facts, rows


def search_about(plan: Plan) -> Search:
    """A search about all ways of a plan's trainer, as a report makes it."""
    model, card = lookup.model(plan.job.model), card_lookup.parse_gpus(plan.machine.gpu)[1]
    typed = typed_only(plan.job.method, plan.strategy, ())
    question, policy = other_ways_of(plan, Question(plan.job, typed, plan.machine, model, card))
    return Search(question, Screen(load_facts, plan.trainer), policy(question))


def unsaid(plan: Plan) -> set[str]:
    """The fields of a plan that its trainer's settings cannot say."""
    try:
        settings_and_fields(dialects.dialect(plan.trainer), plan)
    except InexpressibleError as error:
        return {each.field for each in error.values}
    return set()


def scripts(row: dict[str, Any]) -> set[Hashable]:
    """A trainer, and the script of it that a row runs."""
    return {row["trainer"]["repository"], *(fact for fact in facts(row) if str(fact).endswith(".py')"))}


ROWS = covering(rows(), scripts)


@pytest.mark.parametrize("row", ROWS, ids=[row["id"] for row in ROWS])
def test_beside_every_trainers_command_there_are_ways_that_it_has(row: dict[str, Any], tmp_path: Path) -> None:
    case = case_of(row, tmp_path)
    plan = Plan.of(check_case(case, search=False).outcome.estimate, trainer=case.trainer)
    found = search_about(plan).candidates(plan.job)
    assert found
    for strategy in found:
        counts = (strategy.swap_blocks, *FEWEST_SWAPPED)
        ways = [plan.replace(strategy=strategy.replace(swap_blocks=count), estimate=None) for count in counts]
        assert any(unsaid(way) <= unsaid(plan) for way in ways), strategy


def test_two_experts_of_a_trainer_that_swaps_both_are_searched_with_swapped_blocks() -> None:
    """musubi-tuner's --blocks_to_swap is for both experts, and excludes --offload_inactive_dit (30c658c
    wan_train_network.py)."""
    model = lookup.model("wan2.2-t2v-a14b")
    job = job_for(model, {"experts": "both", "frames": 33})
    machine = Machine(gpu="24GB", host_ram=64 * GIB)
    question = Question(job, Strategy(), machine, model, card_lookup.gpu("24GB"))
    plan = suggest_for(question, "musubi-tuner")[1].plan
    assert plan.verdict == "fits" and not plan.lossy
    assert plan.strategy.swap_blocks and plan.strategy.inactive_expert == "gpu"


def test_a_version_of_a_trainers_scripts_is_of_those_scripts() -> None:
    assert dialects.dialect("sd-scripts@unet@te").name == "sd-scripts@unet"
    assert dialects.dialect("ai-toolkit@quantised-whole").name == "ai-toolkit"
