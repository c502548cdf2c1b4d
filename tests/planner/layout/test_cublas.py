"""cuBLAS's workspaces: where those that stay are taken, and those of single products."""

from __future__ import annotations

from collections import Counter

import pytest

from planner.catalog import card_lookup
from planner.catalog.shapes import grids
from planner.estimate.estimate import estimate
from planner.layout.cublas import FUSED_PRODUCT, PRODUCTS, kept_workspaces
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.layout.run import Run
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy
from planner.units import MIB


def configuration(torch: str | None = None, weights: str = "bf16", gpu: str = "h100-80gb") -> Configuration:
    return Configuration.of(
        Job(model="cogvideox-5b", frames=9, height=480, width=720),
        Strategy(weights_dtype=weights, gradient_checkpointing="full"),
        Machine(gpu=gpu, torch=torch),
    )


def laid_out(asked: Configuration) -> Run:
    facts = load_facts(asked)
    return lay_out(asked, facts, next(iter(grids(facts.model, asked.job))))


@pytest.mark.parametrize(
    ("weights", "product"), [("bf16", {"addmm", "mm", "bmm"}), ("nf4", {"bitsandbytes.gemm_4bit"})]
)
def test_a_workspace_that_stays_comes_behind_the_output_of_the_first_product(weights: str, product: set[str]) -> None:
    run = laid_out(configuration(weights=weights))
    assert run.first_step is not None
    made = [event for event in run.first_step.ops if event >= 0]
    operators = [run.program.op[event] for event in made]
    forward, backward = [place for place, buffer in enumerate(made) if buffer in run.handover.workspaces]
    assert operators[forward - 1] in product
    assert operators[backward - 1] in PRODUCTS
    assert not any(operators[place] in PRODUCTS for place in range(forward - 1))
    assert run.program.category[made[forward - 1]] != "workspace"


KEPT = {None: 2, "2.11": 2, "2.14": 2, "2.15": 0, "2.15.1": 0, "3.0": 0}


@pytest.mark.parametrize(("torch", "kept"), KEPT.items())
def test_from_2_15_on_none_stays(torch: str | None, kept: int) -> None:
    assert kept_workspaces(card_lookup.gpu("h100-80gb"), torch) == kept


def test_on_a_mac_there_is_none() -> None:
    assert kept_workspaces(card_lookup.gpu("m4max-64gb"), None) == 0


def test_each_product_takes_one_and_gives_it_back() -> None:
    """In every stage, as large as the kernel behind it wants: a bias is added by cuBLASLt, whose workspace is small."""
    run = laid_out(configuration("2.15"))
    assert run.first_step is None
    events = run.step.ops
    followed = Counter[tuple[str, int]]()
    for at, event in enumerate(events):
        if event >= 0 and run.program.op[event] in PRODUCTS:
            workspace = events[at + 1]
            assert events[at + 2] == ~workspace
            followed[run.program.op[event], run.sizes[workspace]] += 1
    assert set(followed) == {(FUSED_PRODUCT, MIB), ("mm", 32 * MIB)}


@pytest.mark.parametrize(("gpu", "most"), [("h100-80gb", 64 * MIB), ("rtx-4090", 2 * 8320 * 1024)])
def test_the_peak_falls_by_no_more_than_what_stayed(gpu: str, most: int) -> None:
    before, after = (configuration(torch, gpu=gpu) for torch in ("2.13", "2.15"))
    fallen = (
        estimate(before, load_facts(before)).peak.allocated_bytes
        - estimate(after, load_facts(after)).peak.allocated_bytes
    )
    assert 0 < fallen <= most
