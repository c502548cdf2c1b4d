"""Leaves out copies of hollow weights in host RAM, which are copies of nothing.

A checkpoint without data is mapped, so it takes no RAM. A program that casts it on the CPU, as many do, would fill
gigabytes with zeros. Here the copy is memory that nobody writes to, and large pieces of it take no RAM until somebody
does. What they would have taken is counted, so that the host RAM of a run stays true.
"""

from __future__ import annotations

import bisect
import os
import weakref
from typing import Any

LARGE_BYTES = 2**20
"""Smaller copies are made."""

COPYING = ("_to_copy", "clone", "copy_")
"""The first two give a new tensor with the values of the first argument; the last writes the second into the first."""


class HollowCopies:
    """Which storages of this process are hollow, and how many bytes of them were never written."""

    def __init__(self, torch: Any, places: list[str]) -> None:
        self._torch = torch
        self._places = tuple(os.path.realpath(place) for place in places)
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._copies: set[int] = set()
        self._unwritten = 0
        self.most_unwritten_bytes = 0

    def run(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operator that copies hollow weights in host RAM; None for any other."""
        if name != "copy_":
            source, target = args[0], kwargs.get("device")
            if not _is_large(source) or (target is not None and target.type != "cpu") or not self._is_hollow(source):
                return None
            fake = func(source.to("meta", copy=True), *args[1:], **{**kwargs, **({"device": "meta"} if target else {})})
            return self._remember(self._torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype))
        hollow = _is_large(args[0]) and _is_large(args[1]) and self._is_hollow(args[1])
        return args[0] if hollow else None

    def _is_hollow(self, tensor: Any) -> bool:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._copies:
            return True
        if self._lies_in_a_file(tensor.data_ptr()):
            return True
        self._read_maps()
        return self._lies_in_a_file(tensor.data_ptr())

    def _lies_in_a_file(self, place: int) -> bool:
        index = bisect.bisect_right(self._starts, place) - 1
        return index >= 0 and place < self._ends[index]

    def _read_maps(self) -> None:
        """Where the hollow files are mapped now (proc(5), maps: `START-END MODE OFFSET DEVICE INODE PATH`)."""
        ranges = []
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            for line in file:
                columns = line.rstrip("\n").split(None, 5)
                if len(columns) == 6 and columns[5].startswith(self._places):
                    start, _, end = columns[0].partition("-")
                    ranges.append((int(start, 16), int(end, 16)))
        ranges.sort()
        self._starts, self._ends = [start for start, _ in ranges], [end for _, end in ranges]

    def _remember(self, tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        self._copies.add(place)
        self._unwritten += size
        self.most_unwritten_bytes = max(self.most_unwritten_bytes, self._unwritten)
        weakref.finalize(storage, self._forget, place, size)
        return tensor

    def _forget(self, place: int, size: int) -> None:
        self._copies.discard(place)
        self._unwritten -= size


def _is_large(tensor: Any) -> bool:
    return bool(tensor.device.type == "cpu" and tensor.numel() * tensor.element_size() >= LARGE_BYTES)
