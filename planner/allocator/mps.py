"""Replay: plays a tape's allocations through the rules of PyTorch's allocator for Apple's GPUs (MPS).

The source of every rule is pytorch's aten/src/ATen/mps/MPSAllocator.h of the 2.13.0 wheel (cf30153) and MPSAllocator.mm
at 57ba412 and with pytorch#187441, which agree on everything modelled here; the C++ functions are named in brackets
below. Torch takes Metal *heaps* from the driver and allocates *buffers* in them. A buffer is never split or merged:
once freed, it waits in its pool for a request it is not much too large for. Nothing is returned to the driver until
memory is short.

Not modelled: 2.14 rounds large requests up to buckets (pytorch#187441), and later versions split heaps into ranges
(#188045). The source leaves the following to Metal or to timing, so they are assumptions:

- Where Metal places a buffer in a heap: at the lowest address that fits, at a multiple of `ALIGNMENT_BYTES`. A heap's
  available size is its largest hole from the start of a page, as ``maxAvailableSizeWithAlignment:`` defines it.
- Whether the GPU still uses a freed buffer (``retainCount``): assumed not.
- The scalar pool (numbers of 8 bytes), and memory that MPSGraph and Metal take outside torch's heaps: only
  ``other_bytes`` is counted.

Allocated is `torch.mps.current_allocated_memory`: whole buffers. Reserved is the heaps, a lower bound of
`torch.mps.driver_allocated_memory`, which counts what others take too.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from planner.allocator.caching import Replayed
from planner.errors import VplanError
from planner.units import GIB, KIB, MIB

SMALL_LIMIT_BYTES = MIB  # kMaxSmallAlloc: the largest request of the small pool
LARGE_LIMIT_BYTES = 10 * MIB  # kMinLargeAlloc: below it a large request takes a heap of the next size
LARGE_ROUND_BYTES = 2 * MIB  # kRoundLarge: a heap of one buffer is a multiple of it
SMALL_HEAP_BYTES = 8 * MIB  # kSmallHeap
LARGE_HEAP_BYTES = 32 * MIB  # kLargeHeap; also how much larger than the request a reused buffer may be
XLARGE_HEAP_BYTES = GIB  # kXLargeHeap, for requests of less than half of it

HIGH_WATERMARK = 1.7
"""The limit over the recommended working set (default_high_watermark_ratio, PYTORCH_MPS_HIGH_WATERMARK_RATIO)."""
LOW_WATERMARK = 1.4
"""Where cached buffers begin to be released (default_low_watermark_ratio)."""

ALIGNMENT_BYTES = 256
"""Alignment of buffers in a heap: the smallest size in out-of-memory messages (mattmireles/gemma-tuner-multimodal#18:
"Tried to allocate 256 bytes on shared pool")."""
PAGE_BYTES = 16 * KIB
"""``vm_page_size`` of Apple's chips."""


def watermark_bytes(working_set_bytes: int, ratio: float) -> int:
    """A ratio of the recommended working set in whole bytes, as torch rounds it (setHighWatermarkRatio)."""
    return int(ratio * float(working_set_bytes))


class _Heap:
    """One Metal heap, with its holes from the lowest on."""

    __slots__ = ("available", "buffers", "holes", "number", "pool", "split", "total")

    def __init__(self, number: int, total: int, split: bool, pool: _Pool) -> None:
        self.number, self.total, self.split, self.pool = number, total, split, pool
        self.holes: list[tuple[int, int]] = [(0, total)]  # (start, end)
        self.available = total
        self.buffers = 0

    def place(self, size: int) -> int:
        """Allocates `size` bytes at the lowest address that fits; returns it."""
        at = next(index for index, (start, end) in enumerate(self.holes) if end - start >= size)
        start, end = self.holes[at]
        self.holes[at : at + 1] = [(start + size, end)] if end - start > size else []
        self.buffers += 1
        self._measure()
        return start

    def give_back(self, start: int, size: int) -> None:
        """Turns a buffer's room into a hole, merged with adjacent ones."""
        end = start + size
        at = bisect_left(self.holes, (start,))
        if at < len(self.holes) and self.holes[at][0] == end:
            end = self.holes.pop(at)[1]
        if at and self.holes[at - 1][1] == start:
            at -= 1
            start = self.holes.pop(at)[0]
        self.holes.insert(at, (start, end))
        self.buffers -= 1
        self._measure()

    def _measure(self) -> None:
        self.available = max((end - -(-start // PAGE_BYTES) * PAGE_BYTES for start, end in self.holes), default=0)


class _Buffer:
    """One buffer (BufferBlock)."""

    __slots__ = ("freed_at", "heap", "number", "size", "start")

    def __init__(self, number: int, size: int, start: int, heap: _Heap) -> None:
        self.number, self.size, self.start, self.heap = number, size, start, heap
        self.freed_at = 0
        """The pool's request count when it was freed; the difference to the current count is torch's gc_count."""


class _Pool:
    """Heaps, and freed buffers that wait for a request (BufferPool). All storage is shared: Apple's GPUs have unified
    memory."""

    __slots__ = ("available_bytes", "buffers", "heaps", "requests", "small")

    def __init__(self, small: bool) -> None:
        self.small = small
        self.heaps: list[tuple[int, int, _Heap]] = []  # (available, number, heap), sorted: best fit is a bisection
        self.buffers: list[tuple[int, int, _Buffer]] = []  # (size, number, buffer), sorted
        self.available_bytes = 0
        self.requests = 0

    def add_heap(self, heap: _Heap) -> None:
        insort(self.heaps, (heap.available, heap.number, heap))

    def take_heap(self, heap: _Heap) -> None:
        """Removes a heap from the sorted list, before its available size changes."""
        del self.heaps[bisect_left(self.heaps, (heap.available, heap.number))]

    def take_buffer(self, buffer: _Buffer) -> None:
        del self.buffers[bisect_left(self.buffers, (buffer.size, buffer.number))]
        self.available_bytes -= buffer.size


class MpsAllocator:
    """PyTorch's allocator of one Apple GPU, to be used as `planner.allocator.caching.CachingAllocator`. State stays
    between runs."""

    def __init__(
        self,
        *,
        working_set_bytes: int | None = None,
        max_buffer_bytes: int | None = None,
        other_bytes: int = 0,
    ) -> None:
        """``working_set_bytes``: Metal's recommendation, of which torch's watermarks are multiples; None: no limits.
        ``max_buffer_bytes``: Metal's ``maxBufferLength``, which a request must be below. ``other_bytes``: what is on
        the device beside torch's heaps."""
        self._high = self._low = None
        if working_set_bytes is not None:
            self._high = watermark_bytes(working_set_bytes, HIGH_WATERMARK)
            self._low = watermark_bytes(working_set_bytes, LOW_WATERMARK)
        self._max_buffer = max_buffer_bytes
        self._other = other_bytes
        self._small, self._large = _Pool(small=True), _Pool(small=False)
        self._live: dict[int, _Buffer | None] = {}  # by buffer number; None is a buffer of no bytes
        self._numbers = 0
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.allocated_peak_bytes = 0
        """Highest since the start; likewise `reserved_peak_bytes`."""
        self.reserved_peak_bytes = 0
        self.retries = 0
        """Requests since the start that had to release cached buffers because the limit was reached."""
        self.segments_freed = 0
        """Heaps given back to the driver."""

    @property
    def live(self) -> list[int]:
        """The numbers of the buffers that are allocated now, sorted."""
        return sorted(self._live)

    def run(self, ops: Sequence[int], sizes: Sequence[int], streams: Sequence[int] | None = None) -> Replayed:
        """Play `ops`: `n >= 0` allocates buffer n of `sizes[n]` bytes, `~n` frees it. ``streams`` is not looked at: MPS
        has one. A run stops at the first op that does not fit."""
        return self._play(ops, sizes, None)

    def timeline(
        self, ops: Sequence[int], sizes: Sequence[int], streams: Sequence[int] | None = None
    ) -> list[tuple[int, int, int]]:
        """Play `ops` as `run` does and return (op index, allocated, reserved) after each."""
        history: list[tuple[int, int, int]] = []
        self._play(ops, sizes, history)
        return history

    def empty_cache(self) -> None:
        """`torch.mps.empty_cache`: releases the buffers that wait, and heaps that have no other (release_buffers)."""
        for pool in (self._large, self._small):
            for _, _, buffer in pool.buffers.copy():
                self._release(buffer, remove_empty_heap=True)

    def _play(self, ops: Sequence[int], sizes: Sequence[int], history: list[tuple[int, int, int]] | None) -> Replayed:
        earlier_peaks = self.allocated_peak_bytes, self.reserved_peak_bytes
        retries, segments_freed = self.retries, self.segments_freed
        self.reserved_peak_bytes = reserved_peak = self.reserved_bytes
        allocated_peak = self.allocated_bytes
        allocated_peak_at = reserved_peak_at = -1
        oom_at = requested = None
        for at, op in enumerate(ops):
            if op < 0:
                if ~op not in self._live:
                    raise VplanError(f"op {at} of the tape frees buffer {~op}, which is not live", "record it again")
                if (buffer := self._live.pop(~op)) is not None:
                    self._free(buffer)
            elif op in self._live or sizes[op] < 0:
                what = f"allocates buffer {op} of {sizes[op]} bytes, which is live already or negative"
                raise VplanError(f"op {at} of the tape {what}", "record it again")
            else:
                buffer = self._malloc(sizes[op]) if sizes[op] else None
                if self.reserved_peak_bytes > reserved_peak:
                    reserved_peak, reserved_peak_at = self.reserved_peak_bytes, at
                if buffer is None and sizes[op]:
                    oom_at, requested = at, sizes[op]
                    break
                if self.allocated_bytes > allocated_peak:
                    allocated_peak, allocated_peak_at = self.allocated_bytes, at
                self._live[op] = buffer
            if history is not None:
                history.append((at, self.allocated_bytes, self.reserved_bytes))
        self.allocated_peak_bytes = max(earlier_peaks[0], allocated_peak)
        self.reserved_peak_bytes = max(earlier_peaks[1], reserved_peak)
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

    def _malloc(self, requested: int) -> _Buffer | None:
        """A buffer in use, or None out of memory (alloc_buffer_block)."""
        if self._max_buffer is not None and requested >= self._max_buffer:
            return None  # "Invalid buffer size"
        size = -(-requested // ALIGNMENT_BYTES) * ALIGNMENT_BYTES  # get_allocation_size
        pool = self._small if size <= SMALL_LIMIT_BYTES else self._large  # get_pool
        pressure = not pool.small and self._is_low()
        buffer, pressure = self._reuse(pool, size, pressure)
        if buffer is None:
            if pressure and size < pool.available_bytes:
                self._collect_garbage(pool)
            buffer = self._new_buffer(pool, size, pressure) or self._reuse_or_release(pool, size, pressure)
        if buffer is None:
            return None
        self.allocated_bytes += buffer.size
        return buffer

    def _reuse_or_release(self, pool: _Pool, size: int, pressure: bool) -> _Buffer | None:
        """Called at the limit: tries again to reuse a waiting buffer, then a new one after releasing waiting buffers of
        the pool, then after releasing all waiting buffers."""
        self.retries += 1
        buffer, pressure = self._reuse(pool, size, pressure)
        if buffer is None and self._release_for(pool, size):
            buffer = self._new_buffer(pool, size, pressure)
        if buffer is None:
            self.empty_cache()
            buffer = self._new_buffer(pool, size, pressure)
        return buffer

    def _is_low(self) -> bool:
        """Whether less than a MiB is left below the low watermark (getLowWatermarkValue)."""
        return self._low is not None and self._low - self.reserved_bytes - self._other < MIB

    def _exceeds(self, size: int) -> bool:
        return self._high is not None and self.reserved_bytes + self._other + size > self._high

    def _reuse(self, pool: _Pool, size: int, pressure: bool) -> tuple[_Buffer | None, bool]:
        """(a waiting buffer that is large enough and not 32 MiB too large, whether memory is still short)
        (get_free_buffer). A larger one is released if no heap of the pool has room, so that its own heap has.
        """
        if self._exceeds(size):
            return None, pressure
        pool.requests += not pool.small
        at = bisect_left(pool.buffers, (size,))
        if at == len(pool.buffers):
            return None, pressure
        buffer = pool.buffers[at][2]
        if buffer.size <= size + LARGE_HEAP_BYTES:
            pool.take_buffer(buffer)
            return buffer, pressure
        if bisect_left(pool.heaps, (size,)) < len(pool.heaps):
            return None, pressure
        self._release(buffer, remove_empty_heap=False)
        return None, False

    def _new_buffer(self, pool: _Pool, size: int, pressure: bool) -> _Buffer | None:
        """A buffer in the heap with the least sufficient room, or in a new heap (alloc_buffer, get_free_heap). The
        limit is checked against the buffer's size, not against that of a new heap."""
        if self._exceeds(size):
            return None
        at = bisect_left(pool.heaps, (size,))
        if at < len(pool.heaps):
            heap = pool.heaps.pop(at)[2]
        else:
            total, split = heap_size(size, pressure)
            heap = _Heap(self._next(), total, split, pool)
            self.reserved_bytes += total
            self.reserved_peak_bytes = max(self.reserved_peak_bytes, self.reserved_bytes)
        start = heap.place(size)
        pool.add_heap(heap)
        return _Buffer(self._next(), size, start, heap)

    def _next(self) -> int:
        self._numbers += 1
        return self._numbers

    def _free(self, buffer: _Buffer) -> None:
        """Puts a buffer back into its pool (free_buffer)."""
        pool = buffer.heap.pool
        insort(pool.buffers, (buffer.size, buffer.number, buffer))
        pool.available_bytes += buffer.size
        buffer.freed_at = pool.requests
        self.allocated_bytes -= buffer.size

    def _release(self, buffer: _Buffer, *, remove_empty_heap: bool) -> None:
        """Returns a waiting buffer's room to its heap, and an empty heap to the driver (release_buffer)."""
        heap = buffer.heap
        pool = heap.pool
        pool.take_buffer(buffer)
        pool.take_heap(heap)
        heap.give_back(buffer.start, buffer.size)
        if remove_empty_heap and not heap.buffers:
            self.reserved_bytes -= heap.total
            self.segments_freed += 1
        else:
            pool.add_heap(heap)

    def _release_for(self, pool: _Pool, size: int) -> bool:
        """Releases the smallest waiting buffer of a pool that is large enough, else the largest ones until they add up
        to the request. Returns whether they do (release_available_cached_buffers)."""
        at = bisect_left(pool.buffers, (size,))
        if at < len(pool.buffers):
            self._release(pool.buffers[at][2], remove_empty_heap=True)
            return True
        released = 0
        while pool.buffers and released < size:
            largest = pool.buffers[-1][2]
            released += largest.size
            self._release(largest, remove_empty_heap=True)
        return released >= size

    def _collect_garbage(self, pool: _Pool) -> None:
        """Releases the buffers that have waited longest, until memory is below the low watermark
        (garbage_collect_cached_buffers)."""
        assert self._low is not None
        target = self.reserved_bytes + self._other - self._low
        if target < 0:
            return
        waited = sum(pool.requests - entry[2].freed_at for entry in pool.buffers)
        waiting, reclaimed, released = len(pool.buffers), 0, True
        while reclaimed < target and released and waiting:
            threshold, released = waited / waiting, False
            for _, _, buffer in pool.buffers.copy():
                if reclaimed >= target:
                    break
                count = pool.requests - buffer.freed_at
                if count >= threshold:
                    released = True
                    reclaimed += buffer.size
                    waited -= count
                    waiting -= 1
                    self._release(buffer, remove_empty_heap=not buffer.heap.split)


def heap_size(size: int, pressure: bool) -> tuple[int, bool]:
    """Bytes of the heap that a request of `size` bytes takes anew, and whether others may share it (createHeapBlock).
    ``pressure``: beyond the low watermark."""
    if size <= SMALL_LIMIT_BYTES:
        return SMALL_HEAP_BYTES, True
    if size < LARGE_LIMIT_BYTES:
        return LARGE_HEAP_BYTES, True
    if size < XLARGE_HEAP_BYTES // 2 and not pressure:
        return XLARGE_HEAP_BYTES, True
    return -(-size // LARGE_ROUND_BYTES) * LARGE_ROUND_BYTES, False
