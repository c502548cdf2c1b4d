# cython: language_level=3, wraparound=False, cdivision=True
"""`planner.allocator.caching.CachingAllocator`, compiled: the same rules in the same order, with the C++ library's ordered maps.

It is built where the machine that installs vplan has a C++ compiler, and answers ten times as fast; elsewhere the
Python class does. That one is the reference and says where each rule comes from. tests/planner/allocator/test_allocators_agree.py
holds both to the byte. Numbers are 64 bits wide here.
"""

from cython.operator cimport dereference, preincrement
from libc.limits cimport LLONG_MIN
from libcpp cimport bool
from libcpp.map cimport map as ordered
from libcpp.pair cimport pair
from libcpp.vector cimport vector

from planner.allocator import caching
from planner.errors import VplanError

cdef long long BLOCK_ROUND_BYTES = caching.BLOCK_ROUND_BYTES
cdef long long SMALL_LIMIT_BYTES = caching.SMALL_LIMIT_BYTES
cdef long long SMALL_SEGMENT_BYTES = caching.SMALL_SEGMENT_BYTES
cdef long long LARGE_SEGMENT_BYTES = caching.LARGE_SEGMENT_BYTES
cdef long long LARGE_LIMIT_BYTES = caching.LARGE_LIMIT_BYTES
cdef long long LARGE_ROUND_BYTES = caching.LARGE_ROUND_BYTES
cdef long long UNLIMITED_BYTES = caching.UNLIMITED_BYTES

cdef enum:
    FREE, IN_USE, UNMAPPED

ctypedef pair[long long, long long] Place  # (size, address): best fit is a lower bound

cdef cppclass Block

ctypedef ordered[Place, Block*] Free
ctypedef pair[Place, Block*] Entry

cdef cppclass Block:
    Free.iterator spot  # in its pool's free blocks, while it is free
    long long address
    long long size
    int state
    Pool* pool
    Block* previous
    Block* following

cdef cppclass Pool:
    long long page_bytes
    long long split_bytes
    Free free
    ordered[long long, Block*] unmapped  # by address

cdef Block EMPTY  # stands for a live buffer of no bytes


cdef Block* new_block(long long address, long long size, int state, Pool* pool) noexcept:
    cdef Block* block = new Block()
    block.address, block.size, block.state, block.pool = address, size, state, pool
    block.previous = block.following = NULL
    return block


cdef void insert_after(Block* block, Block* added) noexcept:
    added.previous, added.following = block, block.following
    if block.following != NULL:
        block.following.previous = added
    block.following = added


cdef void absorb_previous(Block* block) noexcept:
    cdef Block* gone = block.previous
    block.address = gone.address
    block.size += gone.size
    block.previous = gone.previous
    if gone.previous != NULL:
        gone.previous.following = block
    del gone


cdef void absorb_following(Block* block) noexcept:
    cdef Block* gone = block.following
    block.size += gone.size
    block.following = gone.following
    if gone.following != NULL:
        gone.following.previous = block
    del gone


cdef void insert_free(Block* block) noexcept:
    block.state = FREE
    block.spot = block.pool.free.insert(Entry(Place(block.size, block.address), block)).first


cdef void erase_free(Block* block) noexcept:
    block.pool.free.erase(block.spot)


cdef void free_block(Block* block) noexcept:
    if block.previous != NULL and block.previous.state == FREE:
        erase_free(block.previous)
        absorb_previous(block)
    if block.following != NULL and block.following.state == FREE:
        erase_free(block.following)
        absorb_following(block)
    insert_free(block)


cdef long long growable_bytes(Block* block) noexcept:
    cdef Block* following = block.following
    return block.size + following.size if following != NULL and following.state == UNMAPPED else block.size


cdef long long rounded_up(long long size, long long page) noexcept:
    return (size + page - 1) // page * page


cdef long long whole_blocks(long long size) noexcept:
    return (size + BLOCK_ROUND_BYTES - 1) & -BLOCK_ROUND_BYTES  # a power of two: a division takes longer


def held(list ops not None, list sizes not None):
    """See `planner.allocator.caching.held`."""
    cdef long long op, level = 0, most = LLONG_MIN
    for op in ops:
        if op >= 0:
            level += whole_blocks(sizes[op])
        else:
            level -= whole_blocks(sizes[~op])
        most = max(most, level)
    return level, (most if ops else 0)


def alive(list ops not None, list before not None):
    """See `planner.allocator.caching.alive`."""
    cdef vector[char] there
    cdef long long op, number
    for events in (before, ops):
        for op in events:
            number = op if op >= 0 else ~op
            if number >= <long long>there.size():
                there.resize(number + 1)
            there[number] = op >= 0
    return [number for number in range(<long long>there.size()) if there[number]]


cdef class CachingAllocator:
    """See `planner.allocator.caching.CachingAllocator`."""

    cdef bool expandable
    cdef long long capacity  # -1: no limit
    cdef ordered[long long, Pool*] small, large  # by stream
    cdef vector[Block*] live_blocks  # by buffer number; NULL is not live
    cdef long long next_address
    cdef readonly long long allocated_bytes, reserved_bytes, allocated_peak_bytes, reserved_peak_bytes
    cdef readonly long long retries, segments_freed

    def __init__(self, *, expandable_segments, capacity_bytes=None):
        self.expandable = expandable_segments
        self.capacity = -1 if capacity_bytes is None else capacity_bytes

    def __dealloc__(self):
        cdef pair[long long, Pool*] of_stream
        for block in self.live_blocks:
            if block != NULL and block != &EMPTY:
                del block
        for of_stream in self.small:
            self._forget(of_stream.second)
        for of_stream in self.large:
            self._forget(of_stream.second)

    cdef void _forget(self, Pool* pool) noexcept:
        cdef pair[Place, Block*] free
        cdef pair[long long, Block*] unmapped
        for free in pool.free:
            del free.second
        for unmapped in pool.unmapped:
            del unmapped.second
        del pool

    @property
    def live(self):
        cdef size_t number
        return [number for number in range(self.live_blocks.size()) if self.live_blocks[number] != NULL]

    def run(self, ops, sizes, streams=None):
        return self._play(list(ops), list(sizes), None if streams is None else list(streams), None)

    def timeline(self, ops, sizes, streams=None):
        history = []
        self._play(list(ops), list(sizes), None if streams is None else list(streams), history)
        return history

    def empty_cache(self):
        cdef pair[long long, Pool*] of_stream
        for of_stream in self.large:
            self._empty(of_stream.second)
        for of_stream in self.small:
            self._empty(of_stream.second)

    cdef void _empty(self, Pool* pool) noexcept:
        cdef vector[Block*] blocks
        cdef pair[Place, Block*] free
        for free in pool.free:
            blocks.push_back(free.second)
        for block in blocks:
            if self.expandable:
                self._unmap_block(block)
            elif block.previous == NULL and block.following == NULL:
                self.reserved_bytes -= block.size
                self.segments_freed += 1
                erase_free(block)
                del block

    cdef object _play(self, list ops, list sizes, list streams, list history):
        cdef long long at = -1, op, asked, size, stream
        cdef long long allocated = self.allocated_bytes, allocated_peak = allocated, allocated_peak_at = -1
        cdef long long reserved_peak = self.reserved_bytes, reserved_peak_at = -1
        cdef long long earlier_reserved_peak = self.reserved_peak_bytes
        cdef long long retries = self.retries, segments_freed = self.segments_freed
        cdef Block* block
        oom_at = requested = None
        self.reserved_peak_bytes = self.reserved_bytes
        if <size_t>len(sizes) > self.live_blocks.size():
            self.live_blocks.resize(len(sizes), NULL)
        for op in ops:
            at += 1
            if op < 0:
                if <size_t>~op >= self.live_blocks.size() or self.live_blocks[~op] == NULL:
                    raise VplanError(f"op {at} of the tape frees buffer {~op}, which is not live", "record it again")
                block = self.live_blocks[~op]
                self.live_blocks[~op] = NULL
                if block != &EMPTY:
                    allocated -= block.size
                    free_block(block)
            else:
                asked = sizes[op]
                if asked < 0 or self.live_blocks[op] != NULL:
                    what = f"allocates buffer {op} of {asked} bytes, which is live already or negative"
                    raise VplanError(f"op {at} of the tape {what}", "record it again")
                size = whole_blocks(asked)
                block = &EMPTY
                if size:
                    stream = 0 if streams is None else streams[op]
                    block = self._malloc(self._pool(stream, size <= SMALL_LIMIT_BYTES), size)
                    if self.reserved_peak_bytes > reserved_peak:
                        reserved_peak, reserved_peak_at = self.reserved_peak_bytes, at
                    if block == NULL:
                        oom_at, requested = at, asked
                        break
                    allocated += block.size
                    if allocated > allocated_peak:
                        allocated_peak, allocated_peak_at = allocated, at
                self.live_blocks[op] = block
            if history is not None:
                history.append((at, allocated, self.reserved_bytes))
        self.allocated_bytes = allocated
        self.allocated_peak_bytes = max(self.allocated_peak_bytes, allocated_peak)
        self.reserved_peak_bytes = max(earlier_reserved_peak, reserved_peak)
        return caching.Replayed(
            allocated_peak,
            reserved_peak,
            allocated_peak_at,
            reserved_peak_at,
            self.retries - retries,
            oom_at,
            requested,
            self.segments_freed - segments_freed,
        )

    cdef Pool* _pool(self, long long stream, bool small) noexcept:
        cdef Pool* pool = self.small[stream] if small else self.large[stream]
        if pool == NULL:
            pool = new Pool()
            pool.page_bytes = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
            pool.split_bytes = BLOCK_ROUND_BYTES if small or self.expandable else SMALL_LIMIT_BYTES + BLOCK_ROUND_BYTES
            if small:
                self.small[stream] = pool
            else:
                self.large[stream] = pool
        return pool

    cdef Block* _malloc(self, Pool* pool, long long size) noexcept:
        cdef Free.iterator found = pool.free.lower_bound(Place(size, 0)), after
        cdef Block* block
        cdef Block* front
        if found != pool.free.end():
            block = dereference(found).second
            if block.following != NULL and block.following.state == UNMAPPED:
                after = found
                preincrement(after)
                while after != pool.free.end() and growable_bytes(dereference(after).second) < growable_bytes(block):
                    block = dereference(after).second
                    preincrement(after)
            erase_free(block)
        else:
            block = self._alloc_block(pool, size)
            if block == NULL:
                return NULL
        if block.size - size >= pool.split_bytes:
            front = new_block(block.address, size, IN_USE, pool)
            front.previous, front.following = block.previous, block
            if block.previous != NULL:
                block.previous.following = front
            block.previous = front
            block.address += size
            block.size -= size
            insert_free(block)
            return front
        block.state = IN_USE
        return block

    cdef Block* _alloc_block(self, Pool* pool, long long size) noexcept:
        cdef Block* block = self._new_memory(pool, size)
        if block == NULL:
            self.empty_cache()
            self.retries += 1
            block = self._new_memory(pool, size)
        return block

    cdef Block* _new_memory(self, Pool* pool, long long size) noexcept:
        return self._try_allocate_expandable_block(pool, size) if self.expandable else self._alloc_segment(pool, size)

    cdef bool _reserve(self, long long size) noexcept:
        if self.capacity >= 0 and self.reserved_bytes + size > self.capacity:
            return False
        self.reserved_bytes += size
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, self.reserved_bytes)
        return True

    cdef Block* _alloc_segment(self, Pool* pool, long long size) noexcept:
        cdef long long segment = pool.page_bytes if size < LARGE_LIMIT_BYTES else rounded_up(size, LARGE_ROUND_BYTES)
        if not self._reserve(segment):
            return NULL
        cdef Block* block = new_block(self.next_address, segment, FREE, pool)
        self.next_address += segment
        return block

    cdef Block* _try_allocate_expandable_block(self, Pool* pool, long long size) noexcept:
        cdef Block* block = self._find_expandable_block(pool, size)
        cdef Block* unmapped
        if block.state == UNMAPPED and not self._map_block(block, min(block.size, size)):
            return NULL
        while block.size < size:
            unmapped = block.following
            if not self._map_block(unmapped, min(unmapped.size, size - block.size)):
                return NULL
            block = unmapped  # it has absorbed the free block before it
        erase_free(block)
        return block

    cdef Block* _find_expandable_block(self, Pool* pool, long long size) noexcept:
        cdef pair[long long, Block*] entry
        cdef Block* first
        cdef Block* block
        cdef long long room
        for entry in pool.unmapped:
            first = entry.second
            if first.previous != NULL and first.previous.state == FREE:
                first = first.previous
            room = 0
            block = first
            while room < size and block != NULL and block.state != IN_USE:
                room += block.size
                block = block.following
            if room >= size:
                return first
        room = max(size, UNLIMITED_BYTES) if self.capacity < 0 else max(pool.page_bytes, self.capacity * 9 // 8)
        block = new_block(
            rounded_up(self.next_address, LARGE_SEGMENT_BYTES), rounded_up(room, pool.page_bytes), UNMAPPED, pool
        )
        self.next_address = block.address + block.size
        pool.unmapped[block.address] = block
        return block

    cdef bool _map_block(self, Block* block, long long size) noexcept:
        cdef long long mapped = rounded_up(size, block.pool.page_bytes)
        cdef Block* rest
        if not self._reserve(mapped):
            return False
        block.pool.unmapped.erase(block.address)
        if mapped < block.size:
            rest = new_block(block.address + mapped, block.size - mapped, UNMAPPED, block.pool)
            insert_after(block, rest)
            block.pool.unmapped[rest.address] = rest
            block.size = mapped
        free_block(block)
        return True

    cdef void _unmap_block(self, Block* block) noexcept:
        cdef Pool* pool = block.pool
        cdef long long end = block.address + block.size
        cdef long long first = rounded_up(block.address, pool.page_bytes), last = end // pool.page_bytes * pool.page_bytes
        cdef Block* part
        if first >= last:
            return
        erase_free(block)
        if last < end:
            part = new_block(last, end - last, FREE, pool)
            insert_after(block, part)
            insert_free(part)
        if block.address < first:
            block.size = first - block.address
            insert_free(block)
            part = new_block(first, last - first, UNMAPPED, pool)
            insert_after(block, part)
            block = part
        block.size, block.state = last - first, UNMAPPED
        self.reserved_bytes -= last - first
        if block.previous != NULL and block.previous.state == UNMAPPED:
            pool.unmapped.erase(block.previous.address)
            absorb_previous(block)
        if block.following != NULL and block.following.state == UNMAPPED:
            pool.unmapped.erase(block.following.address)
            absorb_following(block)
        if block.previous == NULL and block.following == NULL:
            del block
        else:
            pool.unmapped[block.address] = block
