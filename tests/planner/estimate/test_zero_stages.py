"""A higher stage of ZeRO needs no larger card, also where torch's allocator reserves more for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.catalog import lookup
from planner.catalog.shapes import grids, job_for
from planner.estimate import cache_flushes
from planner.estimate.estimate import assess, replay
from planner.estimate.stages import replay_stages
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.spec.configuration import Configuration
from planner.spec.job import Machine, Strategy
from planner.units import GIB, MIB

RAISED = [("wan2.1-vace-14b", 4), ("cogvideox-5b", 4), ("wan2.1-vace-1.3b", 2)]
"""Full trainings for which stage 2 is predicted to reserve more than stage 1 on a card with room."""
SMALL = 256 * MIB
"""What may be between the stages by the rounding of segments and the copy of a bucket."""


def configuration(model: str, gpus: int, stage: int, gpu: str = "b200") -> Configuration:
    machine = Machine(gpu=gpu, gpus=gpus, host_ram=1024 * GIB)
    strategy = Strategy.read({"sharding": f"zero-{stage}", "gradient_checkpointing": "full"})
    return Configuration.of(job_for(lookup.model(model), {"method": "full"}), strategy, machine)


def played(asked: Configuration, **capacity: int) -> Any:
    return replay(asked, load_facts(asked), cached=False, **capacity)[1]


def peak(entries: Any, counter: str) -> int:
    return max(getattr(entry.replayed, f"{counter}_peak_bytes") for entry in entries)


@pytest.mark.parametrize(("model", "gpus"), RAISED)
def test_what_a_higher_stage_reserves_beyond_is_given_back_where_a_card_lacks_it(model: str, gpus: int) -> None:
    one, two = (played(configuration(model, gpus, stage)) for stage in (1, 2))
    assert peak(two, "reserved") > peak(one, "reserved") and peak(two, "allocated") <= peak(one, "allocated")
    # A card with no more than what stage 1 has allocated at its peak, on which stage 1 itself may not run.
    enough = peak(one, "allocated") + SMALL
    assert not cache_flushes.runs_out(played(configuration(model, gpus, 2), capacity_bytes=enough))
    assert cache_flushes.runs_out(played(configuration(model, gpus, 2), capacity_bytes=peak(two, "allocated") - SMALL))


@pytest.mark.parametrize(("model", "gpus"), RAISED)
def test_a_higher_stage_is_not_refused_on_the_card_that_the_lower_one_needs(model: str, gpus: int) -> None:
    asked = configuration(model, gpus, 1)
    needs = assess(asked, load_facts(asked), cached=False).estimate.peak.device_bytes
    card = f"{needs / GIB + 0.1:.2f}GiB"
    verdicts = []
    for stage in (1, 2):
        again = configuration(model, gpus, stage, card)
        verdicts.append(assess(again, load_facts(again), cached=False).estimate.verdict)
    assert "no" not in verdicts


REHEARSED = [
    ("cogvideox-2b", 2, 1, 25.09),
    ("cogvideox-2b", 2, 2, 24.78),
    ("cogvideox1.5-5b-i2v", 2, 1, 73.15),
    ("cogvideox1.5-5b-i2v", 2, 2, 82.39),
    ("cogvideox-5b", 4, 1, 44.19),
    ("cogvideox-5b", 4, 2, 46.47),
]
"""Full trainings with DeepSpeed 0.19.8, rehearsed on B200: GiB reserved by the rank that reserves most."""


@pytest.mark.parametrize(("model", "gpus", "stage", "reserved_gib"), REHEARSED)
def test_the_rank_that_needs_most_is_priced(model: str, gpus: int, stage: int, reserved_gib: float) -> None:
    assert peak(played(configuration(model, gpus, stage)), "reserved") / GIB == pytest.approx(reserved_gib, abs=0.02)


def test_counters_may_peak_on_different_ranks() -> None:
    """Rehearsed: 82.39 GiB reserved on one rank, 64.71 allocated on the other."""
    entries = played(configuration("cogvideox1.5-5b-i2v", 2, 2))
    assert peak(entries, "allocated") / GIB == pytest.approx(64.71, abs=0.02)
    assert max(entries, key=lambda entry: entry.replayed.allocated_peak_bytes).run is not entries[-1].run


def test_ranks_reserve_what_each_was_rehearsed_with() -> None:
    asked = configuration("cogvideox-2b", 2, 1)
    run = lay_out(asked, load_facts(asked), grids(load_facts(asked).model, asked.job)[0])
    assert run.ranks == (0, 1)
    reserved = [
        peak(replay_stages(lay_out(replace(asked, rank=rank), run.facts, run.grid)), "reserved") / GIB
        for rank in run.ranks
    ]
    assert reserved == pytest.approx([22.72, 25.09], abs=0.02)
