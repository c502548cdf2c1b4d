"""Replay: plays a tape's allocations through the rules of PyTorch's CUDA caching allocator, byte for byte.

The source of every rule is pytorch's c10/cuda/CUDACachingAllocator.cpp (its functions stand in brackets below), read at
eb42ad6 (before torch 2.5), 001074d (2.5) and a copy from 2026 (divyanshk/pytorch 63473dc), with the headers of 2.13.
With default settings the rules that decide bytes are the same in all. Not modelled, as a default run never meets it:

- `large_segment_size_mb` (2026) makes the 20 MiB constant a setting. Its default is the 20 MiB used here.
- `max_split_size_mb`, `max_non_split_rounding_mb`, `roundup_power2_divisions`, `garbage_collection_threshold` and
  `per_process_memory_fraction` are off: blocks of any size are split, sizes round to 512 bytes only.
- Memory pools and the private pools of CUDA graphs.
- `record_stream`: a freed buffer returns to its own stream at once, as if every other stream had finished with it.
- Where torch was built without the driver API it ignores expandable segments: replay without them there.

Addresses break ties and are the driver's: cudaMalloc and cuMemAddressReserve are taken to hand out rising ones. The
address space of an expandable segment is 9/8 of the capacity (torch: of the card's total memory). Allocated is
`torch.cuda.memory_allocated`: whole blocks, so also what a block could not split off. Reserved is
`torch.cuda.memory_reserved`: segments, or the mapped pages of expandable segments.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from planner.errors import VplanError
from planner.units import MIB

BLOCK_ROUND_BYTES = 512  # kMinBlockSize: every request is a multiple of it
SMALL_LIMIT_BYTES = MIB  # kSmallSize: the largest request of the small pool, and what a large block may waste
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer: a small pool's segment, or its page
LARGE_SEGMENT_BYTES = 20 * MIB  # kLargeBuffer: the segment of requests below the next limit, and the large pool's page
LARGE_LIMIT_BYTES = 10 * MIB  # kMinLargeAlloc: from here on a new segment has the size of the request
LARGE_ROUND_BYTES = 2 * MIB  # kRoundLarge: such a segment is a multiple of it

UNLIMITED_BYTES = 1 << 44  # address space of an expandable segment where nothing limits it

# What a stretch of addresses is. Unmapped exists in expandable segments only: address space with no memory behind it.
_FREE, _IN_USE, _UNMAPPED = 0, 1, 2


class Replayed(NamedTuple):
    """What one `run` needed. The peaks are those of this run; an index of -1 means the state before its first op."""

    allocated_peak_bytes: int
    reserved_peak_bytes: int
    allocated_peak_at: int
    """Index of the first op after which allocated was at its peak."""
    reserved_peak_at: int
    """Index of the op that took reserved to its peak (on the way, if that op then failed)."""
    retries: int
    """Allocations of this run that had to empty the cache and try again; each stalls a real run."""
    oom_at: int | None = None
    """Index of the op that ran out of memory; the run stops there. None: everything fitted."""
    requested_bytes: int | None = None
    """Bytes that op asked for, before rounding."""
    segments_freed: int = 0
    """Segments that emptying the cache on the way gave back (a cudaFree each); of expandable segments not counted."""


class _Block:
    """A stretch of one segment, linked to its neighbours by address (torch's Block)."""

    __slots__ = ("address", "following", "pool", "previous", "size", "state")

    def __init__(self, address: int, size: int, state: int, pool: _Pool) -> None:
        self.address = address
        self.size = size
        self.state = state
        self.pool = pool
        self.previous: _Block | None = None
        self.following: _Block | None = None


class _Pool:
    """The small or the large blocks of one stream (BlockPool). Blocks never move between streams or pools."""

    __slots__ = ("free", "page_bytes", "small", "split_bytes", "unmapped")

    def __init__(self, small: bool, expandable: bool) -> None:
        self.small = small
        self.page_bytes = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        # should_split: large blocks keep a rest of up to 1 MiB. Sizes are multiples of 512, so "more than" is 512 more.
        self.split_bytes = BLOCK_ROUND_BYTES if small or expandable else SMALL_LIMIT_BYTES + BLOCK_ROUND_BYTES
        self.free: list[tuple[int, int, _Block]] = []  # (size, address, block), sorted: best fit is a bisection
        self.unmapped: list[tuple[int, _Block]] = []  # (address, block), sorted


def _insert_after(block: _Block, new: _Block) -> None:
    new.previous, new.following = block, block.following
    if block.following is not None:
        block.following.previous = new
    block.following = new


def _absorb_previous(block: _Block, previous: _Block) -> None:
    block.address = previous.address
    block.size += previous.size
    before = block.previous = previous.previous
    if before is not None:
        before.following = block


def _absorb_following(block: _Block, following: _Block) -> None:
    block.size += following.size
    after = block.following = following.following
    if after is not None:
        after.previous = block


def _growable_bytes(block: _Block) -> int:
    """Bytes a free block can grow to in place: its own and those of the unmapped addresses behind it."""
    following = block.following
    return block.size + following.size if following is not None and following.state == _UNMAPPED else block.size


class CachingAllocator:
    """PyTorch's caching allocator of one GPU. State stays between runs, so that the steps and phases of a training run
    can be replayed on one object."""

    def __init__(self, *, expandable_segments: bool, capacity_bytes: int | None = None) -> None:
        """`capacity_bytes`: what segments may take together (the card less context and libraries). None: no limit."""
        self._expandable = expandable_segments
        self._capacity = capacity_bytes
        self._small: defaultdict[int, _Pool] = defaultdict(lambda: _Pool(True, expandable_segments))  # by stream
        self._large: defaultdict[int, _Pool] = defaultdict(lambda: _Pool(False, expandable_segments))
        self._live: dict[int, _Block | None] = {}  # by buffer number; None is a buffer of no bytes
        self._next_address = 0
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.allocated_peak_bytes = 0
        """Highest since the start; likewise `reserved_peak_bytes`."""
        self.reserved_peak_bytes = 0
        self.retries = 0
        """torch's `num_alloc_retries`: allocations since the start that had to empty the cache and try again."""
        self.segments_freed = 0

    @property
    def live(self) -> list[int]:
        """The numbers of the buffers that are allocated now, sorted."""
        return sorted(self._live)

    def run(self, ops: Sequence[int], sizes: Sequence[int], streams: Sequence[int] | None = None) -> Replayed:
        """Play `ops`: `n >= 0` allocates buffer n, `sizes[n]` bytes on stream `streams[n]` (0 if None); `~n` frees it.

        Buffers stay live between runs, by number. A run stops at the first op that does not fit: the cache is then as
        empty as torch leaves it, and that buffer is not live.
        """
        return self._play(ops, sizes, streams, None)

    def timeline(
        self, ops: Sequence[int], sizes: Sequence[int], streams: Sequence[int] | None = None
    ) -> list[tuple[int, int, int]]:
        """Play `ops` as `run` does and return (op index, allocated, reserved) after each."""
        history: list[tuple[int, int, int]] = []
        self._play(ops, sizes, streams, history)
        return history

    def empty_cache(self) -> None:
        """`torch.cuda.empty_cache`: give back segments (or pages) that no live buffer touches, of all streams."""
        for pool in (*self._large.values(), *self._small.values()):
            if self._expandable:
                for _, _, block in pool.free.copy():
                    self._unmap_block(block)
                continue
            kept = [entry for entry in pool.free if entry[2].previous is not None or entry[2].following is not None]
            self.reserved_bytes -= sum(entry[0] for entry in pool.free) - sum(entry[0] for entry in kept)
            self.segments_freed += len(pool.free) - len(kept)
            pool.free[:] = kept  # in place: `_malloc` holds on to the list

    def _play(
        self,
        ops: Sequence[int],
        sizes: Sequence[int],
        streams: Sequence[int] | None,
        history: list[tuple[int, int, int]] | None,
    ) -> Replayed:
        live, small, large, take, free_block = self._live, self._small, self._large, self._malloc, self._free_block
        allocated = allocated_peak = self.allocated_bytes
        earlier_reserved_peak, retries, segments_freed = self.reserved_peak_bytes, self.retries, self.segments_freed
        reserved_peak = self.reserved_peak_bytes = self.reserved_bytes
        allocated_peak_at = reserved_peak_at = -1
        oom_at = requested = None
        for at, op in enumerate(ops):
            if op < 0:
                if ~op not in live:
                    raise VplanError(f"op {at} of the tape frees buffer {~op}, which is not live", "record it again")
                block = live.pop(~op)
                if block is not None:  # a whole block: what could not be split off counts as allocated too
                    allocated -= block.size
                    free_block(block)
            elif op in live or sizes[op] < 0:
                what = f"allocates buffer {op} of {sizes[op]} bytes, which is live already or negative"
                raise VplanError(f"op {at} of the tape {what}", "record it again")
            else:
                size = (sizes[op] + BLOCK_ROUND_BYTES - 1) // BLOCK_ROUND_BYTES * BLOCK_ROUND_BYTES
                block = None
                if size:  # an empty tensor never reaches the allocator
                    pools = small if size <= SMALL_LIMIT_BYTES else large
                    block = take(pools[0 if streams is None else streams[op]], size)
                    if self.reserved_peak_bytes > reserved_peak:  # also when the request then failed
                        reserved_peak, reserved_peak_at = self.reserved_peak_bytes, at
                    if block is None:
                        oom_at, requested = at, sizes[op]
                        break
                    allocated += block.size
                    if allocated > allocated_peak:
                        allocated_peak, allocated_peak_at = allocated, at
                live[op] = block
            if history is not None:
                history.append((at, allocated, self.reserved_bytes))
        self.allocated_bytes = allocated
        self.allocated_peak_bytes = max(self.allocated_peak_bytes, allocated_peak)
        self.reserved_peak_bytes = max(earlier_reserved_peak, reserved_peak)
        return Replayed(
            allocated_peak_bytes=allocated_peak,
            reserved_peak_bytes=reserved_peak,
            allocated_peak_at=allocated_peak_at,
            reserved_peak_at=reserved_peak_at,
            retries=self.retries - retries,
            oom_at=oom_at,
            requested_bytes=requested,
            segments_freed=self.segments_freed - segments_freed,
        )

    def _malloc(self, pool: _Pool, size: int) -> _Block | None:
        """A block in use of `size` bytes (a large one may keep up to 1 MiB more), or None out of memory (malloc)."""
        free = pool.free
        index = bisect_left(free, (size,))
        block: _Block | None
        if index < len(free):
            # get_free_block: by size, then address. But a block that can grow counts as large as it can become, so that
            # best fit does not nibble at the end of the segment while a slightly larger hole would do.
            following = free[index][2].following
            if following is not None and following.state == _UNMAPPED:
                last = len(free) - 1
                while index < last and _growable_bytes(free[index + 1][2]) < _growable_bytes(free[index][2]):
                    index += 1
            block = free.pop(index)[2]
        else:
            block = self._alloc_block(pool, size)
            if block is None:
                return None
        rest = block.size - size
        if rest >= pool.split_bytes:
            # alloc_found_block: the front is handed out, the rest stays free.
            front = _Block(block.address, size, _IN_USE, pool)
            before = front.previous = block.previous
            if before is not None:
                before.following = front
            front.following = block
            block.previous = front
            block.address += size
            block.size = rest
            insort(free, (rest, block.address, block))
            return front
        block.state = _IN_USE
        return block

    def _free_block(self, block: _Block) -> None:
        """Make `block` free and merge it with free neighbours (free_block, try_merge_blocks)."""
        free = block.pool.free
        previous, following = block.previous, block.following
        if previous is not None and previous.state == _FREE:
            del free[bisect_left(free, (previous.size, previous.address))]
            _absorb_previous(block, previous)
        if following is not None and following.state == _FREE:
            del free[bisect_left(free, (following.size, following.address))]
            _absorb_following(block, following)
        block.state = _FREE
        insort(free, (block.size, block.address, block))

    def _alloc_block(self, pool: _Pool, size: int) -> _Block | None:
        """New memory for a request no free block can serve: try, else empty the whole cache and try once more.

        torch tries release_available_cached_blocks in between, which does nothing without `max_split_size_mb`.
        """
        block = self._new_memory(pool, size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._new_memory(pool, size)
        return block

    def _new_memory(self, pool: _Pool, size: int) -> _Block | None:
        if self._expandable:
            return self._try_allocate_expandable_block(pool, size)
        return self._alloc_segment(pool, size)

    def _reserve(self, size: int) -> bool:
        reserved = self.reserved_bytes + size
        if self._capacity is not None and reserved > self._capacity:
            return False
        self.reserved_bytes = reserved
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, reserved)
        return True

    def _alloc_segment(self, pool: _Pool, size: int) -> _Block | None:
        """One cudaMalloc (get_allocation_size, alloc_block). The caller splits the block it gets."""
        if size < LARGE_LIMIT_BYTES:  # one segment of fixed size serves many requests
            segment = pool.page_bytes
        else:
            segment = (size + LARGE_ROUND_BYTES - 1) // LARGE_ROUND_BYTES * LARGE_ROUND_BYTES
        if not self._reserve(segment):
            return None
        block = _Block(self._next_address, segment, _FREE, pool)
        self._next_address += segment
        return block

    def _try_allocate_expandable_block(self, pool: _Pool, size: int) -> _Block | None:
        """Map pages of an expandable segment until a free block holds `size` (try_allocate_expandable_block).

        When memory runs out half way, the pages mapped so far stay, free; torch does the same.
        """
        block = self._find_expandable_block(pool, size)
        if block.state == _UNMAPPED and not self._map_block(block, min(block.size, size)):
            return None
        while block.size < size:
            unmapped = block.following
            assert unmapped is not None and unmapped.state == _UNMAPPED, "_find_expandable_block promised room"
            if not self._map_block(unmapped, min(unmapped.size, size - block.size)):
                return None
            block = unmapped  # it has absorbed the free block before it
        del pool.free[bisect_left(pool.free, (block.size, block.address))]
        return block

    def _find_expandable_block(self, pool: _Pool, size: int) -> _Block:
        """First block of the lowest run of free and unmapped addresses that holds `size` (find_expandable_block)."""
        for _, unmapped in pool.unmapped:
            # What is mapped but free in front of unmapped addresses saves mapping as many pages.
            previous = unmapped.previous
            first = previous if previous is not None and previous.state == _FREE else unmapped
            room = 0
            block: _Block | None = first
            while room < size and block is not None and block.state != _IN_USE:
                room += block.size
                block = block.following
            if room >= size:
                return first
        page = pool.page_bytes
        room = max(size, UNLIMITED_BYTES) if self._capacity is None else max(page, self._capacity * 9 // 8)
        pages = -(-room // page)
        # A multiple of every page size, so that page boundaries are multiples of the page size.
        start = -(-self._next_address // LARGE_SEGMENT_BYTES) * LARGE_SEGMENT_BYTES
        self._next_address = start + pages * page
        segment = _Block(start, pages * page, _UNMAPPED, pool)
        insort(pool.unmapped, (start, segment))
        return segment

    def _map_block(self, block: _Block, size: int) -> bool:
        """Map whole pages for the first `size` bytes of an unmapped block and free it (map_block). False: no memory."""
        pool = block.pool
        mapped = -(-size // pool.page_bytes) * pool.page_bytes
        if not self._reserve(mapped):
            return False
        del pool.unmapped[bisect_left(pool.unmapped, (block.address,))]
        if mapped < block.size:
            rest = _Block(block.address + mapped, block.size - mapped, _UNMAPPED, pool)
            _insert_after(block, rest)
            insort(pool.unmapped, (rest.address, rest))
            block.size = mapped
        self._free_block(block)
        return True

    def _unmap_block(self, block: _Block) -> None:
        """Unmap the pages wholly inside a free block; what shares a page with a neighbour stays (unmap_block)."""
        pool, page = block.pool, block.pool.page_bytes
        end = block.address + block.size
        first, last = -(-block.address // page) * page, end // page * page
        if first >= last:  # no whole page: every page of it is shared with a neighbour in use
            return
        del pool.free[bisect_left(pool.free, (block.size, block.address))]
        if last < end:
            after = _Block(last, end - last, _FREE, pool)
            _insert_after(block, after)
            insort(pool.free, (after.size, last, after))
        if block.address < first:
            # The object keeps the front, so that the links before it stay right; a new one takes the pages.
            block.size = first - block.address
            insort(pool.free, (block.size, block.address, block))
            pages = _Block(first, last - first, _UNMAPPED, pool)
            _insert_after(block, pages)
            block = pages
        block.size, block.state = last - first, _UNMAPPED
        self.reserved_bytes -= last - first
        previous, following = block.previous, block.following
        if previous is not None and previous.state == _UNMAPPED:
            del pool.unmapped[bisect_left(pool.unmapped, (previous.address,))]
            _absorb_previous(block, previous)
        if following is not None and following.state == _UNMAPPED:
            del pool.unmapped[bisect_left(pool.unmapped, (following.address,))]
            _absorb_following(block, following)
        # A segment with nothing mapped is destroyed (release_expandable_segment); the next request starts a new one.
        if block.previous is not None or block.following is not None:
            insort(pool.unmapped, (block.address, block))


def held(ops: Sequence[int], sizes: Sequence[int]) -> tuple[int, int]:
    """(change, peak) in allocated bytes over a sequence of ops, each buffer rounded up to whole blocks; (0, 0) of none.
    An op is a buffer's number to allocate, or its complement (`~number`) to free."""
    block = BLOCK_ROUND_BYTES
    levels = list(accumulate(-(-sizes[op] // block) * block if op >= 0 else -sizes[~op] // block * block for op in ops))
    return (levels[-1], max(levels)) if levels else (0, 0)


def alive(ops: Sequence[int], before: Sequence[int]) -> list[int]:
    """The buffers that are allocated after some ops, by number. ``before``: those that were allocated before them. An
    op is a buffer's number to allocate, or its complement (`~number`) to free."""
    there = dict.fromkeys(before, True) | {op if op >= 0 else ~op: op >= 0 for op in ops}
    return sorted(buffer for buffer, stays in there.items() if stays)
