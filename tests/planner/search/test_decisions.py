"""Single decisions of a search, on numbers chosen for the test: where a bound is met exactly, how many guesses a count
of blocks takes, what is left out and what is not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from planner.catalog import card_lookup, lookup
from planner.layout.recordings import load_facts
from planner.search.batched_peaks import peak_forms
from planner.search.ladder import ladder, quick_estimates
from planner.search.question import Question
from planner.search.screening import QuickEstimate, Screen
from planner.search.search import Search
from planner.spec.configuration import Configuration
from planner.spec.job import Machine, Strategy
from tests.planner.hand_made import EIGHT, GRID, ONE, laid_out, peaks
from tests.planner.search.searching import question

WAN = lookup.model("wan2.1-t2v-1.3b")
"""30 blocks, of which all but one may be swapped."""


class Weighed(Screen):
    """A screen that says of host RAM and of encoding what a test tells it to, and counts how often it is asked."""

    def __init__(self, ram: Callable[[int], int] = lambda blocks: 0, encoding: int = 0) -> None:
        super().__init__(load_facts)
        self.ram, self.encoding = ram, encoding
        self.swapped: list[int] = []

    def host_ram_bytes(self, configuration: Configuration) -> int:
        self.swapped.append(configuration.strategy.swap_blocks)
        return self.ram(configuration.strategy.swap_blocks)

    def exceeds_encoding(self, configuration: Configuration, exceeds: Callable[[int], bool]) -> bool:
        return exceeds(self.encoding)


def most_in_ram(ram: Callable[[int], int], host_ram: int) -> tuple[int, list[int]]:
    """(the most blocks that are swapped, the counts whose RAM was asked for)."""
    card = card_lookup.gpu("24GB")
    machine = Machine(gpu=card.name, host_ram=host_ram)
    job = lookup.job_for(WAN, {"frames": 17})
    screen = Weighed(ram)
    search = Search(Question(job, Strategy(), machine, WAN, card), screen)
    most = search.most_in_ram(job, Strategy(gradient_checkpointing="full"))
    return most.swap_blocks, screen.swapped


@pytest.mark.parametrize("count", range(29))
def test_the_ram_holds_so_many_blocks_and_no_more(count: int) -> None:
    """2000 bytes and 100 for each block, and half a block's to spare."""
    most, asked = most_in_ram(lambda blocks: 2000 + 100 * blocks, 2050 + 100 * count)
    assert most == count
    assert len(asked) <= 4  # the two ends, and where all blocks are alike the guess and one beside it


@pytest.mark.parametrize("count", range(1, 29))
def test_blocks_that_are_not_alike_are_counted_as_well(count: int) -> None:
    most, _ = most_in_ram(lambda blocks: 2000 + blocks**2, 2000 + count**2)
    assert most == count


def test_what_a_run_needs_without_swap_it_may_need_with_it() -> None:
    """The RAM is short of 200 bytes already, and only the blocks from the fifth on raise it."""
    most, _ = most_in_ram(lambda blocks: max(1200, 800 + 100 * blocks), 1000)
    assert most == 4


class Linear(Screen):
    """A screen on which every swapped block takes a GiB off the device, and which counts how often it is asked."""

    def __init__(self, unswapped_bytes: int) -> None:
        super().__init__(load_facts)
        self.unswapped_bytes = unswapped_bytes
        self.swapped: list[int] = []

    def quick_estimate(self, configuration: Configuration) -> QuickEstimate:
        strategy = configuration.strategy
        self.swapped.append(strategy.swap_blocks)
        device_bytes = self.unswapped_bytes - strategy.swap_blocks * 2**30
        return QuickEstimate(
            configuration.job, strategy, device_bytes, device_bytes, 0, 1.0, in_optimizer=False, states_bytes=0
        )

    def swapped_bytes(self, configuration: Configuration) -> int:
        return (configuration.strategy.swap_blocks - 2) * 2**30


@pytest.mark.parametrize("count", range(3, 28))
def test_as_few_blocks_as_do_are_guessed_at_once_where_they_are_alike(count: int) -> None:
    """24 GB that with the 4 % of an estimate's margin hold all but half of the last block."""
    card = card_lookup.gpu("24GB")
    asked = Question(lookup.job_for(WAN, {"frames": 17}), Strategy(), Machine(gpu=card.name, host_ram=2**40), WAN, card)
    screen = Linear(int(asked.budget_bytes / 1.04) + count * 2**30 - 2**29)
    quick = Search(asked, screen).swap_count.fewest(asked.job, Strategy(gradient_checkpointing="full"))
    assert quick is not None and quick.strategy.swap_blocks == count
    assert len(screen.swapped) <= 4  # none, all that may be, the guess and the one below it


@pytest.mark.parametrize(("more", "tiled"), [(0, False), (1, True)])
def test_a_clip_that_just_fits_is_encoded_whole(more: int, tiled: bool) -> None:
    """An estimate of recordings alone may be 4 % short."""
    asked = question("24GB")
    fits = max(
        size
        for size in range(asked.budget_bytes * 25 // 26 - 3, asked.budget_bytes * 25 // 26 + 3)
        if int(size * 1.04) <= asked.budget_bytes
    )
    assert Search(asked, Weighed(encoding=fits + more)).needs_tiles(asked.job) is tiled


def test_the_tightest_is_the_tightest_of_all_candidates() -> None:
    """The strategy with the least weights and states is not the one with the lowest peak."""
    asked = question("8GB", method="full")
    search = Search(asked, Screen(load_facts))
    tightest = search.tightest(asked.job, lossy=False)
    assert tightest is not None
    estimates = [
        search.quick_estimate(asked.job, search.most_in_ram(asked.job, strategy))
        for strategy in search.candidates(asked.job, lossy=False)
    ]
    within_ram = [quick.allocated_bytes for quick in estimates if quick.host_ram_bytes <= 32 * 2**30]
    assert tightest.peak.allocated_bytes == min(within_ram)


def test_the_ladder_has_every_candidate_to_choose_from_and_each_rung_needs_less() -> None:
    asked = question("24GB", frames=49, height=480, width=720)
    search = Search(asked, Screen(load_facts))
    estimates = quick_estimates(search, asked.job)
    seen = {quick.strategy.replace(swap_blocks=0, optimizer_step="foreach") for quick in estimates}
    assert seen == {strategy.replace(optimizer_step="foreach") for strategy in search.candidates(asked.job)}
    rungs = [quick.device_bytes for quick in ladder(search, asked.job, estimates)]
    assert 2 <= len(rungs) <= 8
    assert all(lower < 0.97 * upper for upper, lower in itertools.pairwise(rungs))


@pytest.mark.parametrize(
    ("machine", "strategy"),
    [
        (ONE, {}),
        (ONE, {"gradient_checkpointing": "full", "swap_blocks": 2}),
        (ONE, {"gradient_accumulation": 2}),
        (EIGHT, {"grad_buckets": "view"}),
    ],
)
def test_forms_of_a_run_give_its_peak_and_leave_out_what_its_largest_moment_dominates(
    machine: Machine, strategy: dict[str, Any]
) -> None:
    run = laid_out(machine, **strategy)
    forms = peak_forms(run)
    assert list(forms.at([GRID])) == [max(peaks(run).values())]
    largest, others = forms.counts[0], forms.counts[1:]
    assert (others > largest).any(axis=1).all()
