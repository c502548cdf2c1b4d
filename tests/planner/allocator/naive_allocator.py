"""A second, slow caching allocator to check planner/allocator/caching.py against. It shares no code and no data
structure with it.

A segment only knows what is in use (a dict of address -> size) and which of its pages are mapped (a set). Everything
else is worked out again for every request by walking the addresses from the lowest to the highest: free blocks are
the longest mapped stretches that nobody uses, so there is nothing to split, merge or keep sorted.
"""

from __future__ import annotations

MIB = 2**20


class Segment:
    def __init__(self, start: int, size: int, stream: int, small: bool, page: int | None) -> None:
        self.start = start
        self.size = size
        self.stream = stream
        self.small = small
        self.page = page  # None: one cudaMalloc, all of it there
        self.mapped: set[int] = set()  # numbers of the pages that have memory
        self.begun = False  # a page has been mapped at some time
        self.used: dict[int, int] = {}  # address -> size

    def reserved(self) -> int:
        return self.size if self.page is None else len(self.mapped) * self.page

    def stretches(self) -> list[tuple[int, int, str]]:
        """(address, size, "free" | "used" | "unmapped"), lowest first; neighbours differ unless both are used."""
        result: list[tuple[int, int, str]] = []
        at = self.start
        for address, size in sorted(self.used.items()):
            result += self._idle(at, address)
            result.append((address, size, "used"))
            at = address + size
        return result + self._idle(at, self.start + self.size)

    def _idle(self, begin: int, end: int) -> list[tuple[int, int, str]]:
        if begin == end:
            return []
        if self.page is None:
            return [(begin, end - begin, "free")]
        # Cut at every page boundary where "mapped" changes. Beyond the last mapped page there is nothing left to cut.
        cuts = [begin]
        kinds = [self._kind(begin)]
        for page in range((begin - self.start) // self.page + 1, max(self.mapped, default=0) + 2):
            address = self.start + page * self.page
            if begin < address < end and self._kind(address) != kinds[-1]:
                cuts.append(address)
                kinds.append(self._kind(address))
        cuts.append(end)
        return [(low, high - low, kind) for low, high, kind in zip(cuts, cuts[1:], kinds, strict=False)]

    def _kind(self, address: int) -> str:
        assert self.page is not None
        return "free" if (address - self.start) // self.page in self.mapped else "unmapped"


class NaiveAllocator:
    def __init__(self, *, expandable_segments: bool, capacity_bytes: int | None = None) -> None:
        self.expandable = expandable_segments
        self.capacity = capacity_bytes
        self.segments: list[Segment] = []
        self.buffers: dict[int, tuple[Segment, int] | None] = {}
        self.next_address = 0
        self.retries = 0
        self.segments_freed = 0

    @property
    def reserved_bytes(self) -> int:
        return sum(segment.reserved() for segment in self.segments)

    @property
    def allocated_bytes(self) -> int:
        return sum(sum(segment.used.values()) for segment in self.segments)

    def allocate(self, buffer: int, requested: int, stream: int = 0) -> bool:
        """False: out of memory."""
        place = None
        if requested:
            size = requested
            while size % 512:
                size += 1
            place = self._cached(size, stream)
            if place is None:
                place = self._fresh(size, stream)
            if place is None:
                self.retries += 1
                self.empty_cache()
                place = self._fresh(size, stream)
            if place is None:
                return False
            segment, address, room = place
            divisible = segment.small or self.expandable or room - size > MIB
            segment.used[address] = size if divisible else room
            self.buffers[buffer] = (segment, address)
        else:
            self.buffers[buffer] = None
        return True

    def free(self, buffer: int) -> None:
        place = self.buffers.pop(buffer)
        if place is not None:
            segment, address = place
            del segment.used[address]

    def empty_cache(self) -> None:
        for segment in self.segments:
            if segment.page is not None:
                # A page goes when no used byte lies in it.
                for page in list(segment.mapped):
                    low = segment.start + page * segment.page
                    if all(a + n <= low or a >= low + segment.page for a, n in segment.used.items()):
                        segment.mapped.remove(page)
        self.segments_freed += sum(not (segment.used or segment.page is not None) for segment in self.segments)
        # A segment that never had a page stays, as address space; one that lost its last page is gone.
        self.segments = [s for s in self.segments if s.used or s.mapped or (s.page is not None and not s.begun)]

    def _of(self, size: int, stream: int) -> list[Segment]:
        return [s for s in self.segments if s.stream == stream and s.small == (size <= MIB)]

    def _cached(self, size: int, stream: int) -> tuple[Segment, int, int] | None:
        """(segment, address, room) of the free block to use."""
        candidates = []
        for segment in self._of(size, stream):
            stretches = segment.stretches()
            for (address, room, kind), behind in zip(stretches, [*stretches[1:], (0, 0, "end")], strict=True):
                if kind == "free" and room >= size:
                    growth = behind[1] if behind[2] == "unmapped" else 0
                    candidates.append((room, address, room + growth, segment))
        if not candidates:
            return None
        candidates.sort(key=lambda candidate: candidate[:2])
        best = candidates[0]
        for candidate in candidates[1:]:
            if not self.expandable or candidate[2] >= best[2]:
                break
            best = candidate
        return best[3], best[1], best[0]

    def _fits(self, extra: int) -> bool:
        return self.capacity is None or self.reserved_bytes + extra <= self.capacity

    def _fresh(self, size: int, stream: int) -> tuple[Segment, int, int] | None:
        if self.expandable:
            return self._mapped(size, stream)
        if size <= MIB:
            length = 2 * MIB
        elif size < 10 * MIB:
            length = 20 * MIB
        else:
            length = -(-size // (2 * MIB)) * 2 * MIB
        if not self._fits(length):
            return None
        segment = Segment(self.next_address, length, stream, size <= MIB, None)
        self.next_address += length
        self.segments.append(segment)
        return segment, segment.start, length

    def _mapped(self, size: int, stream: int) -> tuple[Segment, int, int] | None:
        segment, start = self._addresses(size, stream)
        assert segment.page is not None
        # Every page under [start, start + size) must have memory. Holes are filled from the left, each whole or not
        # at all.
        first = (start - segment.start) // segment.page
        last = (min(start + size, segment.start + segment.size) - segment.start - 1) // segment.page
        hole: list[int] = []
        for page in range(first, last + 2):
            if page <= last and page not in segment.mapped:
                hole.append(page)
            elif hole:
                if not self._fits(len(hole) * segment.page):
                    return None
                segment.mapped.update(hole)
                segment.begun = True
                hole = []
        room = next(room for address, room, kind in segment.stretches() if address == start and kind == "free")
        return segment, start, room

    def _addresses(self, size: int, stream: int) -> tuple[Segment, int]:
        """Where `size` bytes may go: the lowest unmapped stretch (or the free one before) with enough idle behind."""
        for segment in self._of(size, stream):
            stretches = segment.stretches()
            for index, stretch in enumerate(stretches):
                if stretch[2] != "unmapped":
                    continue
                begin = index - 1 if index and stretches[index - 1][2] == "free" else index
                idle = 0
                for _, length, kind in stretches[begin:]:
                    if kind == "used":
                        break
                    idle += length
                if idle >= size:
                    return segment, stretches[begin][0]
        page = 2 * MIB if size <= MIB else 20 * MIB
        room = max(size, 2**44) if self.capacity is None else max(1, self.capacity + self.capacity // 8)
        pages = -(-room // page)
        start = -(-self.next_address // (20 * MIB)) * 20 * MIB
        segment = Segment(start, pages * page, stream, size <= MIB, page)
        self.next_address = start + segment.size
        self.segments.append(segment)
        return segment, start
