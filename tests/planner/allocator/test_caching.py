"""planner/allocator/caching.py and the same compiled: cases worked by hand; test_replay_agreement.py has a second
allocator."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from planner.allocator import caching
from planner.allocator import implementation as chosen
from planner.allocator.caching import CachingAllocator, Replayed
from planner.errors import VplanError

MIB = 2**20
COMPILED = pytest.param(
    chosen.CachingAllocator,
    id="compiled",
    marks=pytest.mark.skipif(
        chosen.CachingAllocator is caching.CachingAllocator, reason="installed without a compiler"
    ),
)
BOTH = pytest.mark.parametrize("expandable", [False, True])


@pytest.fixture(autouse=True, params=[pytest.param(caching.CachingAllocator, id="python"), COMPILED])
def _implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every case here is played by both."""
    monkeypatch.setattr(sys.modules[__name__], "CachingAllocator", request.param)


def classic(capacity: int | None = None) -> CachingAllocator:
    return CachingAllocator(expandable_segments=False, capacity_bytes=capacity)


def expandable(capacity: int | None = None) -> CachingAllocator:
    return CachingAllocator(expandable_segments=True, capacity_bytes=capacity)


def state(allocator: CachingAllocator) -> tuple[int, int]:
    return allocator.allocated_bytes, allocator.reserved_bytes


# ---- Segments of cudaMalloc


@pytest.mark.parametrize(
    ("requested", "allocated", "reserved"),
    [
        (0, 0, 0),  # an empty tensor has no block
        (1, 512, 2 * MIB),  # rounded to 512; small pool: a 2 MiB segment
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),  # the largest small request
        (MIB + 1, MIB + 512, 20 * MIB),  # large pool, below 10 MiB: a 20 MiB segment
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB, 10 * MIB),  # rounds up to 10 MiB: a segment of its own, a multiple of 2 MiB already
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),  # 2 MiB - 512 left: more than 1 MiB, so it is split off
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),  # 1 MiB + 512 left: split off
        (11 * MIB, 12 * MIB, 12 * MIB),  # exactly 1 MiB left: not "more than", so the block keeps it
        (12 * MIB, 12 * MIB, 12 * MIB),
        (19 * MIB, 20 * MIB, 20 * MIB),  # 1 MiB left of the 20 MiB it rounds to
    ],
)
def test_first_request_of_a_classic_allocator(requested: int, allocated: int, reserved: int) -> None:
    allocator = classic()
    allocator.run([0], [requested])
    assert state(allocator) == (allocated, reserved)


def test_a_small_segment_is_shared_and_a_hole_is_reused() -> None:
    allocator = classic()
    # Two requests of 1 MiB fill one 2 MiB segment; the third needs another.
    allocator.run([0, 1, 2], [MIB] * 3)
    assert state(allocator) == (3 * MIB, 4 * MIB)
    # Freeing the first leaves a hole of 1 MiB in segment one, and segment two has 1 MiB free: both serve.
    allocator.run([~0, 3, 4], [MIB] * 5)
    assert state(allocator) == (4 * MIB, 4 * MIB)


def test_best_fit_takes_the_smallest_block_that_holds_the_request() -> None:
    allocator = classic()
    sizes = [12 * MIB, 30 * MIB, 11 * MIB, 30 * MIB]
    allocator.run([0, 1, ~1, ~0], sizes)  # two free segments, 30 and 12 MiB
    # 11 MiB goes into the 12 MiB segment and keeps its 1 MiB, so the 30 MiB segment is still whole for the next.
    allocator.run([2, 3], sizes)
    assert state(allocator) == (42 * MIB, 42 * MIB)


def test_equal_blocks_are_taken_lowest_address_first() -> None:
    sizes = [20 * MIB, 38 * MIB, 5 * MIB, 13 * MIB, 6 * MIB]
    allocator = classic()
    # Segments of 20 (lower) and 38 MiB. Buffer 2 is the lower 5 MiB of the upper one, so 33 MiB are free there; 3
    # takes 13 of them and 20 are left: as many as in the lower segment, which is freed last.
    allocator.run([0, 1, ~1, 2, 3, ~0, 4], sizes)
    # 6 MiB: had the upper block been taken, the lower segment would be whole and go.
    allocator.empty_cache()
    assert state(allocator) == (24 * MIB, 58 * MIB)


def test_freed_neighbours_merge_on_both_sides() -> None:
    allocator = classic()
    sizes = [6 * MIB, 6 * MIB, 6 * MIB, 19 * MIB]
    # Three blocks of 6 MiB in one 20 MiB segment and a rest of 2 MiB (more than 1 MiB, so split off).
    allocator.run([0, 1, 2, ~0, ~2, ~1], sizes)
    # Only as one free block of 20 MiB does the segment hold 19 MiB. It keeps the last 1 MiB.
    allocator.run([3], sizes)
    assert state(allocator) == (20 * MIB, 20 * MIB)


def test_a_block_that_kept_its_rest_returns_whole() -> None:
    allocator = classic()
    sizes = [11 * MIB, 12 * MIB]
    allocator.run([0, ~0, 1], sizes)  # 11 MiB held all 12 MiB of its segment
    assert state(allocator) == (12 * MIB, 12 * MIB)


def test_pools_and_streams_do_not_share() -> None:
    sizes = [MIB, 2 * MIB, MIB, 2 * MIB]
    allocator = classic()
    # On stream 0 a small (2 MiB) and a large (20 MiB) segment; freed, they do not serve stream 1, which takes its own.
    allocator.run([0, 1, ~0, ~1, 2, 3], sizes, [0, 0, 1, 1])
    assert state(allocator) == (3 * MIB, 44 * MIB)


# ---- Capacity, retries, out of memory


@BOTH
def test_a_full_card_empties_the_cache_and_retries(expandable: bool) -> None:
    allocator = CachingAllocator(expandable_segments=expandable, capacity_bytes=40 * MIB)
    sizes = [20 * MIB, 20 * MIB, 40 * MIB]
    # Classic: two free segments of 20 MiB, neither holds 40. Expandable: with buffer 1 freed last they merge into 40
    # MiB and serve at once, without a retry.
    replayed = allocator.run([0, 1, ~0, ~1, 2], sizes)
    assert replayed.oom_at is None
    assert replayed.retries == allocator.retries == (0 if expandable else 1)
    assert state(allocator) == (40 * MIB, 40 * MIB)
    assert replayed.reserved_peak_at == 1  # reserved was 40 MiB then already


def test_what_a_retry_splits_off_is_free_for_the_next_request() -> None:
    allocator = classic(21 * MIB)
    sizes = [512, 5 * MIB, 15 * MIB]
    # A cached small segment (2 MiB) leaves no room for 20 MiB. Once it is given back, 5 and 15 MiB share that segment.
    replayed = allocator.run([0, ~0, 1, 2], sizes)
    assert (replayed.oom_at, replayed.retries) == (None, 1)
    assert state(allocator) == (20 * MIB, 20 * MIB)


def test_out_of_memory_stops_the_run_and_leaves_the_cache_empty() -> None:
    allocator = classic(40 * MIB)
    sizes = [12 * MIB, 12 * MIB, 30 * MIB, 512]
    replayed = allocator.run([0, 1, ~1, 2, 3], sizes)
    # Buffer 2 needs 30 MiB beside 24. Without the free segment of 12 MiB it still needs 42.
    assert replayed == Replayed(
        allocated_peak_bytes=24 * MIB,
        reserved_peak_bytes=24 * MIB,
        allocated_peak_at=1,
        reserved_peak_at=1,
        retries=1,
        oom_at=3,
        requested_bytes=30 * MIB,
        segments_freed=1,
    )
    assert state(allocator) == (12 * MIB, 12 * MIB)
    assert allocator.run([~0, 2], sizes).oom_at is None  # buffer 2 is not live, and now there is room


def test_the_limit_is_what_segments_take_not_what_buffers_ask() -> None:
    assert classic(20 * MIB - 1).run([0], [2 * MIB]).oom_at == 0  # 2 MiB wants a 20 MiB segment
    assert classic(20 * MIB).run([0], [2 * MIB]).oom_at is None
    assert expandable(20 * MIB - 1).run([0], [2 * MIB]).oom_at == 0  # or a 20 MiB page
    assert expandable(2 * MIB).run([0], [1]).oom_at is None
    assert expandable(0).run([0], [1]).oom_at == classic(0).run([0], [1]).oom_at == 0


def test_a_split_segment_cannot_be_given_back() -> None:
    allocator = classic()
    allocator.run([0, 1, ~0], [6 * MIB, 512 * 2049, 0])
    allocator.empty_cache()  # buffer 1 (1 MiB + 512) holds the 20 MiB segment
    assert state(allocator) == (512 * 2049, 20 * MIB)


# ---- Expandable segments


def test_pages_are_mapped_as_needed() -> None:
    allocator = expandable()
    sizes = [MIB, MIB, 512, 5 * MIB, 16 * MIB, 41 * MIB]
    steps = []
    for buffer in range(6):
        allocator.run([buffer], sizes)
        steps.append(allocator.reserved_bytes)
    # Small pool: 1 + 1 MiB fill a 2 MiB page, 512 bytes want the next one.
    # Large pool: 5 MiB map a 20 MiB page; 16 MiB find 15 free there and lack 1 MiB: one more page (21 of 40 used);
    # 41 MiB find 19 free and lack 22: two more pages, not three.
    assert steps == [2 * MIB, 2 * MIB, 4 * MIB, 24 * MIB, 44 * MIB, 84 * MIB]
    assert allocator.allocated_bytes == sum(sizes)  # large blocks too are split to the last 512 bytes


def test_the_end_of_the_segment_is_kept_for_growing() -> None:
    allocator = expandable()
    sizes = [40 * MIB, 512 * 2049, 35 * MIB, 25 * MIB, 60 * MIB]
    # 0 takes two pages, 1 the start of the third, 2 what is left of it (19 MiB - 512) and 16 MiB + 512 of a fourth.
    # Freed: a hole of 40 MiB below 1, and almost 39 MiB at the end, which could grow.
    allocator.run([0, 1, 2, ~0, ~2], sizes)
    assert allocator.reserved_bytes == 80 * MIB
    # 25 MiB fit the end better (39 < 40), but the end counts as endless: they go into the hole. So 60 MiB find almost
    # 39 at the end and lack a bit more than 21: two pages. From a nibbled end they would lack 46: three.
    allocator.run([3, 4], sizes)
    assert allocator.reserved_bytes == 120 * MIB


def test_only_whole_idle_pages_are_unmapped_and_the_hole_is_filled_first() -> None:
    allocator = expandable()
    sizes = [30 * MIB, 30 * MIB, 30 * MIB, 15 * MIB, 35 * MIB]
    allocator.run([0, 1, 2], sizes)  # 90 MiB on five pages: [0,30) [30,60) [60,90), 10 MiB free
    assert allocator.reserved_bytes == 100 * MIB
    allocator.run([~1], sizes)
    allocator.empty_cache()
    # [30, 60) is free. The page [20, 40) is shared with buffer 0, [40, 60) is idle: one page goes. [90, 100) shares a
    # page.
    assert allocator.reserved_bytes == 80 * MIB
    # 15 MiB: no mapped block is large enough (10 at 30, 10 at 90). The lowest unmapped page, with the 10 MiB before
    # it, is.
    allocator.run([3], sizes)
    assert allocator.reserved_bytes == 100 * MIB
    # 35 MiB: 15 are left in the hole, so they go to the end: 10 MiB there and two new pages.
    allocator.run([4], sizes)
    assert state(allocator) == (110 * MIB, 140 * MIB)


def test_a_free_block_without_a_whole_page_stays_in_one_piece() -> None:
    allocator = expandable()
    sizes = [10 * MIB, 20 * MIB, 15 * MIB, 25 * MIB, 10 * MIB, 15 * MIB, 25 * MIB]
    # Four pages. Holes at [10, 30) and [45, 70): each has a page boundary inside, neither a whole page.
    allocator.run([0, 1, 2, 3, 4, ~1, ~3], sizes)
    allocator.empty_cache()
    allocator.run([5, 6], sizes)  # 15 MiB fit the smaller hole best and leave the larger one whole
    assert state(allocator) == (75 * MIB, 80 * MIB)


def test_unmapping_leaves_free_ends_on_both_sides() -> None:
    allocator = expandable()
    sizes = [10 * MIB, 40 * MIB, 10 * MIB, 10 * MIB, 10 * MIB, 40 * MIB]
    allocator.run([0, 1, 2, ~1], sizes)  # three pages; [10, 50) is free, and the page [20, 40) goes
    allocator.empty_cache()
    assert state(allocator) == (20 * MIB, 40 * MIB)
    allocator.run([3, 4], sizes)  # the ends [10, 20) and [40, 50) serve
    assert state(allocator) == (40 * MIB, 40 * MIB)
    allocator.run([~3, ~4, 5], sizes)  # and with the page between them mapped again they make 40 MiB
    assert state(allocator) == (60 * MIB, 60 * MIB)


def test_equal_holes_of_an_expandable_segment_are_taken_lowest_first() -> None:
    allocator = expandable()
    sizes = [20 * MIB, MIB * 2, 20 * MIB, 38 * MIB, 5 * MIB]
    # 0 on [0, 20), 1 on [20, 22), 2 on [22, 42), 3 on [42, 80). Two free holes of 20 MiB; only the lower one is a
    # whole page.
    allocator.run([0, 1, 2, 3, ~2, ~0], sizes)
    allocator.run([4], sizes)  # takes [0, 5): the page [0, 20) is now in use
    allocator.empty_cache()  # [22, 42) holds no whole page
    assert allocator.reserved_bytes == 80 * MIB


# Five or more buffers of exactly a page each, so buffer n lies on [20 n, 20 n + 20).
PAGES = [20 * MIB] * 8


def test_a_request_may_span_several_holes() -> None:
    allocator = expandable()
    sizes = [*PAGES, 75 * MIB]
    allocator.run([0, 1, 2, 3, 4, 5, ~1, ~3], sizes)
    allocator.empty_cache()  # used 0, 2, 4, 5; unmapped [20, 40) and [60, 80)
    assert allocator.reserved_bytes == 80 * MIB
    allocator.run([~0, ~2, ~4], sizes)
    # free [0, 20), unmapped, free [40, 60), unmapped, free [80, 100), used [100, 120): 75 MiB map both holes.
    allocator.run([8], sizes)
    assert state(allocator) == (95 * MIB, 120 * MIB)


def test_pages_mapped_before_memory_ran_out_stay_until_the_retry() -> None:
    allocator = expandable(120 * MIB)
    sizes = [*PAGES, 60 * MIB, 40 * MIB]
    streams = [0] * 9 + [1]
    allocator.run([0, 1, 2, 3, 4, ~0, ~2], sizes, streams)
    allocator.empty_cache()
    allocator.run([9, ~9, ~1], sizes, streams)
    # unmapped [0, 20), free [20, 40), unmapped [40, 60), used 3 and 4, and 40 MiB cached on stream 1: 100 MiB reserved.
    replayed = allocator.run([8], sizes, streams)
    # 60 MiB go to address 0. The first hole brings reserved to 120, the second does not fit any more. The retry gives
    # back [0, 40) and the pages of stream 1, which leaves 40 MiB, and maps three pages.
    assert (replayed.oom_at, replayed.retries, replayed.reserved_peak_bytes) == (None, 1, 120 * MIB)
    assert state(allocator) == (100 * MIB, 100 * MIB)


def test_out_of_memory_with_expandable_segments_gives_back_what_it_mapped() -> None:
    allocator = expandable(100 * MIB)
    sizes = [*PAGES, 60 * MIB, 20 * MIB]
    streams = [0] * 9 + [1]
    allocator.run([0, 1, 2, 3, 4, ~0, ~2], sizes, streams)
    allocator.empty_cache()
    allocator.run([9, ~1], sizes, streams)
    # As above, but the 20 MiB of stream 1 are in use: after the retry has given back [0, 40) three pages on 60 MiB
    # are 120.
    replayed = allocator.run([8], sizes, streams)
    assert (replayed.oom_at, replayed.requested_bytes, replayed.retries) == (0, 60 * MIB, 1)
    assert replayed.reserved_peak_bytes == 100 * MIB
    assert state(allocator) == (60 * MIB, 60 * MIB)


def test_address_space_is_nine_eighths_of_the_capacity() -> None:
    sizes = [*PAGES, 40 * MIB, 60 * MIB]
    allocator = expandable(160 * MIB)  # nine pages of address space, one more than there is memory for
    allocator.run([*range(8), ~0], sizes)
    allocator.empty_cache()
    # 140 MiB reserved. With 7 free, 40 MiB are that page and the ninth: no retry. In eight pages there would be no
    # room.
    assert allocator.run([~7, 8], sizes).retries == 0
    assert allocator.reserved_bytes == 160 * MIB
    allocator = expandable(160 * MIB)
    allocator.run([*range(8), ~0, ~2, ~4], sizes)
    allocator.empty_cache()
    # 100 MiB reserved. 60 MiB do not fit in the last two pages, so they get a second segment with three pages of its
    # own.
    assert allocator.run([~7, 9], sizes).retries == 0
    assert allocator.reserved_bytes == 160 * MIB


def test_an_emptied_expandable_segment_starts_again() -> None:
    allocator = expandable()
    sizes = [50 * MIB, 512, 10 * MIB]
    allocator.run([0, 1, ~0, ~1], sizes)
    assert state(allocator) == (0, 62 * MIB)
    allocator.empty_cache()
    assert state(allocator) == (0, 0)
    allocator.run([2], sizes)
    assert state(allocator) == (10 * MIB, 20 * MIB)


# ---- What a run reports


def test_peaks_are_those_of_the_run_and_the_allocator_keeps_its_own() -> None:
    allocator = classic()
    sizes = [30 * MIB, 12 * MIB]
    first = allocator.run([0, 1, ~0], sizes)
    assert (first.allocated_peak_bytes, first.allocated_peak_at, first.reserved_peak_at) == (42 * MIB, 1, 1)
    second = allocator.run([~1, 1], sizes)
    # Allocated starts this run at 12 MiB and never passes it; reserved stays at 42 MiB all along.
    assert (second.allocated_peak_bytes, second.allocated_peak_at) == (12 * MIB, -1)
    assert (second.reserved_peak_bytes, second.reserved_peak_at) == (42 * MIB, -1)
    assert (allocator.allocated_peak_bytes, allocator.reserved_peak_bytes) == (42 * MIB, 42 * MIB)


def test_timeline_tells_both_levels_after_every_op() -> None:
    ops, sizes = [0, 1, ~0, 2], [MIB, 12 * MIB, MIB]
    line = [(0, MIB, 2 * MIB), (1, 13 * MIB, 14 * MIB), (2, 12 * MIB, 14 * MIB), (3, 13 * MIB, 14 * MIB)]
    assert classic().timeline(ops, sizes) == line
    assert classic().timeline([], []) == []


@pytest.mark.parametrize(
    ("ops", "sizes"),
    [([0, 0], [512]), ([~0], [512]), ([0, ~0, ~0], [512]), ([0], [-1])],
)
def test_a_broken_tape_is_refused(ops: list[int], sizes: list[int]) -> None:
    with pytest.raises(VplanError, match=r"of the tape .*record it again"):
        classic().run(ops, sizes)


@pytest.mark.parametrize("held", dict.fromkeys([caching.held, chosen.held]), ids=lambda function: function.__module__)
def test_what_ops_hold_is_what_a_run_allocates(held: Callable[[list[int], list[int]], tuple[int, int]]) -> None:
    ops, sizes = [0, 1, ~0, 2, 3, ~1, ~3], [4 * MIB - 1, 1, 3 * MIB, 1024]
    assert held(ops, sizes) == (3 * MIB, 4 * MIB + 512)
    assert held([~0], sizes) == (-4 * MIB, -4 * MIB)
    assert held([], sizes) == (0, 0)
    allocator = classic()
    assert allocator.run(ops, sizes).allocated_peak_bytes == 4 * MIB + 512 and allocator.allocated_bytes == 3 * MIB
