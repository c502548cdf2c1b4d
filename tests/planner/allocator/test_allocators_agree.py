"""planner/allocator/caching.py, the same compiled and a deliberately naive allocator agree, after every step of any
history."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.allocator import caching
from planner.allocator import implementation as allocator
from planner.allocator.caching import CachingAllocator


def _sibling(name: str) -> ModuleType:
    """Tests are no package, so a helper beside them is loaded by its path."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NaiveAllocator = _sibling("naive_allocator").NaiveAllocator

MIB = 2**20
BOTH = pytest.mark.parametrize("expandable", [False, True])
IS_COMPILED = allocator.CachingAllocator is not caching.CachingAllocator
COMPILED = pytest.param(
    allocator.CachingAllocator,
    id="compiled",
    marks=pytest.mark.skipif(not IS_COMPILED, reason="installed without a compiler"),
)
ALIVE = dict.fromkeys([caching.alive, allocator.alive])
PLAYED_BY = pytest.mark.parametrize("played_by", [pytest.param(caching.CachingAllocator, id="python"), COMPILED])


def state(allocator: CachingAllocator) -> tuple[int, int]:
    return allocator.allocated_bytes, allocator.reserved_bytes


Step = tuple[str, int, int, int]
EDGES = [512, MIB, 2 * MIB, 10 * MIB, 11 * MIB, 12 * MIB, 19 * MIB, 20 * MIB, 21 * MIB, 38 * MIB, 40 * MIB]
AROUND_EDGES = st.builds(
    lambda edge, shift: max(0, edge + shift), st.sampled_from(EDGES), st.sampled_from([-513, -512, -1, 0, 1, 512])
)
ANY_SIZE = st.one_of(AROUND_EDGES, st.integers(0, 4096), st.integers(0, 3 * MIB), st.integers(0, 60 * MIB))
PAGE_PARTS = st.integers(1, 16).map(lambda count: count * 5 * MIB)  # makes holes, whole pages and ends of pages


def _steps(sizes: st.SearchStrategy[int], streams: int) -> st.SearchStrategy[list[Step]]:
    """(what, size, stream, which): allocate `size` on `stream`, or free live buffer `which` modulo their number."""
    what = st.sampled_from(["allocate"] * 6 + ["free"] * 5 + ["empty"])
    return st.lists(st.tuples(what, sizes, st.integers(0, streams - 1), st.integers(0, 99)), max_size=60)


STEPS = st.one_of(_steps(ANY_SIZE, 3), _steps(PAGE_PARTS, 1), _steps(PAGE_PARTS, 2))
CAPACITIES = st.one_of(st.none(), st.integers(0, 40).map(lambda count: count * 5 * MIB), st.integers(0, 150 * MIB))


def _idle(fast: CachingAllocator, slow: NaiveAllocator) -> tuple[list[object], list[object]]:
    """Every free and every unmapped stretch of each, by address."""
    pools = [*fast._small.values(), *fast._large.values()]
    ours = [(address, size, "free") for pool in pools for size, address, _ in pool.free]
    ours += [(address, block.size, "unmapped") for pool in pools for address, block in pool.unmapped]
    theirs = [stretch for segment in slow.segments for stretch in segment.stretches() if stretch[2] != "used"]
    return sorted(ours), sorted(theirs)


def _play_both(
    played_by: type[CachingAllocator], steps: list[Step], expandable: bool, capacity: int | None
) -> tuple[list[int], list[int], list[int]]:
    """Play `steps` one at a time on both allocators and compare after each. Returns ops, sizes and streams of all."""
    fast = played_by(expandable_segments=expandable, capacity_bytes=capacity)
    slow = NaiveAllocator(expandable_segments=expandable, capacity_bytes=capacity)
    ops: list[int] = []
    sizes: list[int] = []
    streams: list[int] = []
    live: list[int] = []
    for what, size, stream, which in steps:
        peaks = fast.allocated_peak_bytes, fast.reserved_peak_bytes
        if what == "empty":
            fast.empty_cache()
            slow.empty_cache()
        elif what == "free" and live:
            buffer = live.pop(which % len(live))
            ops.append(~buffer)
            fast.run(ops[-1:], sizes, streams)
            slow.free(buffer)
        elif what == "allocate":
            buffer = len(sizes)
            sizes.append(size)
            streams.append(stream)
            ops.append(buffer)
            fits = fast.run(ops[-1:], sizes, streams).oom_at is None
            assert fits == slow.allocate(buffer, size, stream)
            live += [buffer] if fits else []
        assert state(fast) == (slow.allocated_bytes, slow.reserved_bytes)
        assert (fast.retries, fast.segments_freed) == (slow.retries, slow.segments_freed)
        assert fast.live == sorted(live)
        if played_by is CachingAllocator:  # the compiled one shows nobody its blocks
            ours, theirs = _idle(fast, slow)
            assert ours == theirs
        # The laws.
        rounded = sum(-(-sizes[buffer] // 512) * 512 for buffer in live)
        assert rounded <= fast.allocated_bytes <= fast.reserved_bytes
        assert capacity is None or fast.reserved_bytes <= capacity
        assert fast.allocated_peak_bytes >= max(peaks[0], fast.allocated_bytes)
        assert fast.reserved_peak_bytes >= max(peaks[1], fast.reserved_bytes)
    fast.run([~buffer for buffer in live], sizes)
    fast.empty_cache()
    assert state(fast) == (0, 0)
    return ops, sizes, streams


@PLAYED_BY
@BOTH
@settings(deadline=None, max_examples=200)
@given(steps=STEPS, capacity=CAPACITIES)
def test_agrees_with_the_naive_allocator(
    played_by: type[CachingAllocator], expandable: bool, steps: list[Step], capacity: int | None
) -> None:
    _play_both(played_by, steps, expandable, capacity)


@PLAYED_BY
@BOTH
@settings(deadline=None, max_examples=50)
@given(steps=STEPS)
def test_one_run_equals_many(played_by: type[CachingAllocator], expandable: bool, steps: list[Step]) -> None:
    ops, sizes, streams = _play_both(played_by, [step for step in steps if step[0] != "empty"], expandable, None)
    whole = played_by(expandable_segments=expandable)
    at_once = whole.run(ops, sizes, streams)
    parts = played_by(expandable_segments=expandable)
    history = [state(parts) for op in ops if parts.run([op], sizes, streams)]
    assert state(whole) == state(parts)
    allocated = [0, *(point[0] for point in history)]
    reserved = [0, *(point[1] for point in history)]
    assert (at_once.allocated_peak_bytes, at_once.allocated_peak_at + 1) == (
        max(allocated),
        allocated.index(max(allocated)),
    )
    assert (at_once.reserved_peak_bytes, at_once.reserved_peak_at + 1) == (max(reserved), reserved.index(max(reserved)))
    again = played_by(expandable_segments=expandable)
    assert again.timeline(ops, sizes, streams) == [(at, *point) for at, point in enumerate(history)]


@pytest.mark.parametrize("alive", ALIVE, ids=lambda function: function.__module__)
@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=60), st.sets(st.integers(0, 40)))
def test_what_is_alive_is_what_was_allocated_last(
    alive: Callable[[list[int], list[int]], list[int]], history: list[tuple[int, bool]], before: set[int]
) -> None:
    there = set(before)
    for buffer, is_allocated in history:
        there = there | {buffer} if is_allocated else there - {buffer}
    ops = [buffer if is_allocated else ~buffer for buffer, is_allocated in history]
    assert alive(ops, sorted(before)) == sorted(there)
