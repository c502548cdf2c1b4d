"""planner/allocator/mps.py: cases worked by hand from MPSAllocator.mm, and laws that hold of any sequence."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.allocator.mps import MpsAllocator, heap_size
from planner.errors import VplanError

KIB, MIB, GIB = 2**10, 2**20, 2**30


def state(allocator: MpsAllocator) -> tuple[int, int]:
    return allocator.allocated_bytes, allocator.reserved_bytes


# ---- Heaps and rounding


@pytest.mark.parametrize(
    ("requested", "allocated", "reserved"),
    [
        (0, 0, 0),  # an empty tensor has no buffer
        (1, 256, 8 * MIB),  # the small pool: heaps of 8 MiB
        (MIB, MIB, 8 * MIB),  # the largest small request
        (MIB + 1, MIB + 256, 32 * MIB),  # below 10 MiB: heaps of 32 MiB
        (10 * MIB - 256, 10 * MIB - 256, 32 * MIB),
        (10 * MIB, 10 * MIB, GIB),  # below 512 MiB: heaps of 1 GiB
        (512 * MIB - 256, 512 * MIB - 256, GIB),
        (512 * MIB, 512 * MIB, 512 * MIB),  # a heap of its own
        (512 * MIB + 1, 512 * MIB + 256, 514 * MIB),  # rounded up to 2 MiB
        (3 * GIB + 1, 3 * GIB + 256, 3 * GIB + 2 * MIB),
    ],
)
def test_a_first_request_takes_the_heap_of_its_size(requested: int, allocated: int, reserved: int) -> None:
    allocator = MpsAllocator()
    replayed = allocator.run([0], [requested])
    assert state(allocator) == (allocated, reserved)
    assert (replayed.allocated_peak_bytes, replayed.reserved_peak_bytes) == (allocated, reserved)


def test_requests_share_heaps_of_their_pool() -> None:
    allocator = MpsAllocator()
    allocator.run(range(8), [MIB] * 8)
    assert state(allocator) == (8 * MIB, 8 * MIB)
    allocator.run([8], [MIB] * 9)
    assert state(allocator) == (9 * MIB, 16 * MIB)
    # A large request finds no room in the small pool's heaps, and 5 MiB find it in the heap of a larger class.
    allocator.run([9, 10], [MIB] * 9 + [100 * MIB, 5 * MIB])
    assert allocator.reserved_bytes == 16 * MIB + GIB


def test_the_heap_with_the_least_room_that_is_enough_is_taken() -> None:
    allocator = MpsAllocator()
    allocator.run([0, 1], [5 * MIB, 100 * MIB])  # 27 MiB left of 32, 924 of 1024
    assert allocator.timeline([2], [0, 0, 20 * MIB]) == [(0, 125 * MIB, 32 * MIB + GIB)]
    allocator.run([3], [0, 0, 0, 924 * MIB])  # still as it was: the 20 MiB went into the smaller one
    assert allocator.reserved_bytes == 32 * MIB + GIB


# ---- Reuse


def test_a_freed_buffer_waits_and_serves_what_is_not_32_mib_smaller() -> None:
    allocator = MpsAllocator()
    allocator.run([0, ~0], [600 * MIB])
    assert state(allocator) == (0, 600 * MIB)
    allocator.run([1], [0, 568 * MIB])
    assert state(allocator) == (600 * MIB, 600 * MIB)  # the whole buffer: none is split


def test_one_that_is_larger_is_released_into_its_heap_where_no_other_has_room() -> None:
    allocator = MpsAllocator()
    allocator.run([0, ~0, 1], [600 * MIB, 568 * MIB - 256])
    assert state(allocator) == (568 * MIB - 256, 600 * MIB)
    allocator.run([2], [0, 0, 20 * MIB])  # the rest of that heap
    assert state(allocator) == (588 * MIB - 256, 600 * MIB)


def test_one_that_is_larger_waits_on_where_a_heap_has_room() -> None:
    allocator = MpsAllocator()
    allocator.run([0, 1, ~0, 2], [600 * MIB, 100 * MIB, 200 * MIB])
    assert state(allocator) == (300 * MIB, 600 * MIB + GIB)
    allocator.run([3], [0, 0, 0, 600 * MIB])
    assert state(allocator) == (900 * MIB, 600 * MIB + GIB)


def test_of_waiting_buffers_the_smallest_that_is_large_enough_is_taken() -> None:
    allocator = MpsAllocator()
    allocator.run([0, 1, ~0, ~1, 2], [20 * MIB, 30 * MIB, 15 * MIB])
    assert allocator.allocated_bytes == 20 * MIB


# ---- Watermarks


def test_beyond_the_low_watermark_large_requests_get_heaps_of_their_own() -> None:
    allocator = MpsAllocator(working_set_bytes=GIB)
    allocator.run([0], [1433 * MIB])  # 1.4 * 1024 = 1433.6: less than a MiB is left, a heap of 1434
    allocator.run([1], [0, 100 * MIB])
    assert allocator.reserved_bytes == 1534 * MIB


def test_the_limit_is_1_7_times_the_working_set_and_asks_about_the_buffer_alone() -> None:
    allocator = MpsAllocator(working_set_bytes=GIB)
    assert allocator.run([0], [1740 * MIB]).oom_at is None  # 1.7 * 1024 = 1740.8
    replayed = allocator.run([1], [0, MIB])
    assert (replayed.oom_at, replayed.requested_bytes, replayed.retries) == (0, MIB, 1)
    replayed = allocator.run([1], [0, MIB // 2])
    assert replayed.oom_at is None  # half a MiB is left, and its heap of 8 MiB comes beside
    assert allocator.reserved_bytes == 1748 * MIB


def test_at_the_limit_a_waiting_buffer_that_is_large_enough_goes_first() -> None:
    allocator = MpsAllocator(working_set_bytes=GIB)
    allocator.run([0, 1, ~1], [512 * MIB, 900 * MIB])
    replayed = allocator.run([2], [0, 0, 840 * MIB])  # with it 1412 would be 2252; the low watermark is not reached
    assert replayed.oom_at is None
    assert state(allocator) == (1352 * MIB, 1352 * MIB)


def test_at_the_limit_all_that_waits_goes_before_memory_is_out() -> None:
    allocator = MpsAllocator(working_set_bytes=GIB)
    allocator.run([0, 1, 2, ~0, ~1, ~2], [600 * MIB, 600 * MIB, MIB])
    replayed = allocator.run([3], [0, 0, 0, 1700 * MIB])
    assert replayed.oom_at is None
    assert allocator.reserved_bytes == 1700 * MIB


def test_garbage_is_collected_from_what_waited_longest() -> None:
    allocator = MpsAllocator(working_set_bytes=GIB)
    allocator.run([0, 1, ~0], [520 * MIB, 600 * MIB])
    allocator.run([2, 3, ~1], [0, 0, 620 * MIB, 1])  # 1748 of heaps with the small one: beyond 1.4 times
    assert allocator.reserved_bytes == 1748 * MIB
    allocator.run([4], [0, 0, 0, 0, 400 * MIB])
    # 520 has waited for two requests and 600 for one: the mean is 1.5. What is below 520 + 400 - 314 is reclaimed.
    assert 4 in allocator.live
    assert allocator.reserved_bytes <= 1748 * MIB - 520 * MIB + 400 * MIB


def test_what_is_on_the_device_beside_the_heaps_counts_for_the_limit() -> None:
    allocator = MpsAllocator(working_set_bytes=GIB, other_bytes=GIB)
    assert allocator.run([0], [717 * MIB]).oom_at == 0
    assert allocator.run([0], [716 * MIB]).oom_at is None


def test_no_buffer_reaches_metals_longest() -> None:
    allocator = MpsAllocator(max_buffer_bytes=GIB)
    assert allocator.run([0], [GIB]).oom_at == 0
    assert allocator.run([0], [GIB - 1]).oom_at is None


def test_a_damaged_tape_is_refused() -> None:
    with pytest.raises(VplanError, match="frees buffer 0"):
        MpsAllocator().run([~0], [1])
    with pytest.raises(VplanError, match="live already"):
        MpsAllocator().run([0, 0], [1])


# ---- Laws

SIZES = st.one_of(
    st.integers(0, 4 * KIB), st.integers(MIB - 512, MIB + 512), st.integers(MIB, 40 * MIB), st.integers(MIB, 2 * GIB)
)


@st.composite
def tapes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """(ops, sizes): what is allocated once and perhaps freed later."""
    sizes = draw(st.lists(SIZES, min_size=1, max_size=25))
    ops: list[int] = []
    alive: list[int] = []
    for number in range(len(sizes)):
        ops.append(number)
        alive.append(number)
        while alive and draw(st.booleans()):
            ops.append(~alive.pop(draw(st.integers(0, len(alive) - 1))))
    return ops, sizes


@settings(max_examples=200, deadline=None)
@given(tapes())
def test_heaps_hold_what_is_allocated_and_that_what_was_asked_for(tape: tuple[list[int], list[int]]) -> None:
    ops, sizes = tape
    alive = 0
    for (_, allocated, reserved), op in zip(MpsAllocator().timeline(ops, sizes), ops, strict=True):
        alive += sizes[op] if op >= 0 else -sizes[~op]
        assert alive <= allocated <= reserved
        assert reserved % (2 * MIB) == 0


@settings(max_examples=200, deadline=None)
@given(tapes(), st.integers(256, 4096))
def test_the_same_tape_gives_the_same_and_never_beyond_the_limit(
    tape: tuple[list[int], list[int]], working_set_mib: int
) -> None:
    ops, sizes = tape
    limit = int(1.7 * working_set_mib * MIB)
    first, second = (MpsAllocator(working_set_bytes=working_set_mib * MIB) for _ in range(2))
    replayed = first.run(ops, sizes)
    assert replayed == second.run(ops, sizes)
    assert first.allocated_bytes <= first.reserved_bytes
    # The buffer must fit below the limit; its heap may be larger, by less than a heap of the largest shared kind.
    assert replayed.reserved_peak_bytes <= limit + GIB


@settings(max_examples=200, deadline=None)
@given(tapes())
def test_what_is_freed_is_given_back(tape: tuple[list[int], list[int]]) -> None:
    ops, sizes = tape
    allocator = MpsAllocator()
    allocator.run(ops, sizes)
    allocator.run([~number for number in allocator.live], sizes)
    assert allocator.allocated_bytes == 0
    before = allocator.reserved_bytes
    allocator.empty_cache()
    assert allocator.reserved_bytes <= before
    # A heap stays only where an oversized buffer was released out of it: all of its room is there for the next request.
    assert allocator.run(ops, sizes).oom_at is None


@settings(max_examples=100, deadline=None)
@given(st.lists(SIZES.filter(bool), min_size=1, max_size=20))
def test_what_is_never_freed_takes_no_more_heaps_than_one_each(sizes: list[int]) -> None:
    allocator = MpsAllocator()
    allocator.run(range(len(sizes)), sizes)
    assert allocator.reserved_bytes <= sum(heap_size(size, pressure=False)[0] for size in sizes)
    allocator.run([~number for number in allocator.live], sizes)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
