"""Leaves out work on host RAM whose values nobody has: copies of hollow weights, and an optimizer's update of them.

A checkpoint without data is mapped, so it takes no RAM, and a large copy from the card is not made. A program that
casts either on the CPU would fill gigabytes with zeros, and an optimizer that keeps its states in host RAM would write
all of them at each step. Here the copy is memory that nobody writes to, and the update is not made; large pieces of
such memory take no RAM until somebody writes there. What they would have taken is counted, so that the host RAM of a
run stays true.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import weakref
from typing import Any

LARGE_BYTES = 2**20
"""Smaller copies are made."""

GIVING = {"_to_copy", "clone", "_pin_memory"}
"""These give a new tensor with the values of the first argument."""

ZEROING = {"zeros", "zeros_like", "new_zeros"}
"""What these give is zero without being written (`_untouched_zeros`): an optimizer's states before its first step."""

WRITING = {"copy_", "mul_", "div_", "add_", "sub_", "lerp_", "addcmul_", "addcdiv_", "zero_"}
"""What these write into the first argument depends on all of them."""

UPDATING = {"_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"}
"""Optimizers' updates, whose first arguments are lists: of parameters, gradients and states."""

HANDLED = GIVING | ZEROING | WRITING | UPDATING
MADE = object()
"""What `run` gives where the operator is to be run as it is."""


class HollowTensors:
    """Which storages of this process are hollow, and how many bytes of them were never written."""

    def __init__(self, torch: Any, places: list[str]) -> None:
        self._torch = torch
        self._places = tuple(os.path.realpath(place) for place in places)
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._parts: dict[int, dict[int, int]] = {}
        """address of a storage -> offset and bytes of the tensors in it that came from nowhere"""
        self._counted: dict[int, int] = {}
        self._unwritten = 0
        self.most_unwritten_bytes = 0

    def run(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operator of HANDLED where it is left out or made otherwise, else MADE."""
        if name in ZEROING:
            return self._untouched_zeros(func, args, kwargs)
        if name in UPDATING:
            return self._update(func, args, kwargs)
        if name == "copy_":
            return self._copy(func, *args, **kwargs)
        if name in GIVING:
            return self._give(name, func, args, kwargs)
        if not _is_large(args[0]):
            return MADE
        tensors = [each for each in args if isinstance(each, self._torch.Tensor)]
        if not any(_is_large(each) and self._is_hollow(each) for each in tensors):
            return MADE
        self._note(args[0])
        return args[0]

    def leaves_out(self, updated: list[Any]) -> bool:
        """Whether an update of these (a parameter, its gradient and its states) has no values; then they have none
        either."""
        if not all(map(_is_large, updated)) or not any(map(self._is_hollow, updated[:2])):
            return False
        for tensor in updated:
            self._note(tensor)
        return True

    def watch_buffers(self) -> None:
        """Follow `torch.frombuffer` from here on: what a program read from a hollow file with `read`, as musubi-tuner
        does, is zeros that take RAM. They stay zeros without it. torch does not dispatch that function."""
        make = self._torch.frombuffer

        def made(*arguments: Any, **options: Any) -> Any:
            tensor = make(*arguments, **options)
            if self._places and _is_large(tensor) and _is_zero(tensor) and _let_pages_go(tensor):
                self._note(tensor)
            return tensor

        self._torch.frombuffer = made

    # ---- operators

    def _give(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        source, target = args[0], kwargs.get("device")
        to_host = target is None or target.type == "cpu"
        if source.is_cuda and target is not None and to_host and _nbytes(source) >= LARGE_BYTES:
            result = func(*args, **kwargs)
            if not result.is_pinned():
                _give_pages_back(result)
            self._note(result, is_counted=False)  # by the virtual card
            return result
        if not _is_large(source) or not to_host or not self._is_hollow(source):
            return MADE
        torch = self._torch
        if name == "_pin_memory":
            fake, pinned = source, True
        else:
            words = {**kwargs, **({"device": "meta"} if target else {})}
            fake, pinned = func(source.to("meta", copy=True), *args[1:], **words), bool(kwargs.get("pin_memory"))
        given = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, pin_memory=pinned)
        if not pinned:
            _give_pages_back(given)
        self._note(given)
        return given

    def _copy(self, func: Any, target: Any, source: Any, *more: Any, **words: Any) -> Any:
        if not _is_large(target):
            return MADE
        if source.is_cuda:
            func(target, source, *more, **words)
            self._note(target, is_counted=False)
        elif _is_large(source) and self._is_hollow(source):
            self._note(target)
        else:
            if _nbytes(target) >= target.untyped_storage().nbytes():
                self._forget(target.untyped_storage().data_ptr())
            return MADE
        return target

    def _update(self, func: Any, args: Any, kwargs: Any) -> Any:
        lists = [each for each in args if isinstance(each, (list, tuple))]
        if not lists[0] or lists[0][0].device.type != "cpu":
            return MADE
        # The last list has the numbers of steps, or is empty.
        states = [each for each in lists if each and each[0].dim()]
        kept = [i for i in range(len(lists[0])) if not self.leaves_out([each[i] for each in states])]
        if len(kept) == len(lists[0]):
            return MADE
        if not kept:
            return None
        rest = [[each[i] for i in kept] if isinstance(each, (list, tuple)) and each else each for each in args]
        return func(*rest, **kwargs)

    def _untouched_zeros(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The same zeros in pages that were given back to the system."""
        device = kwargs.get("device")
        if device is None and isinstance(args[0], self._torch.Tensor):
            device = args[0].device
        if kwargs.get("pin_memory") or (device is not None and device.type != "cpu"):
            return MADE
        fake = func(*args, **{**kwargs, "device": self._torch.device("meta")})
        if _nbytes(fake) < LARGE_BYTES or fake.layout != self._torch.strided:
            return MADE
        given = self._torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
        return given if _give_pages_back(given) else MADE

    # ---- what is hollow

    def _is_hollow(self, tensor: Any) -> bool:
        """Whether it is mapped from a hollow file, or at least half of its storage came from nowhere."""
        storage = tensor.untyped_storage()
        parts = self._parts.get(storage.data_ptr())
        if parts and 2 * sum(parts.values()) >= storage.nbytes():
            return True
        if not self._places:
            return False
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

    def _note(self, tensor: Any, is_counted: bool = True) -> None:
        """Remember that what should be in this tensor is not. Pinned memory is counted by the virtual card."""
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place not in self._parts:
            self._parts[place] = {}
            self._counted[place] = storage.nbytes() if is_counted and not tensor.is_pinned() else 0
            self._unwritten += self._counted[place]
            self.most_unwritten_bytes = max(self.most_unwritten_bytes, self._unwritten)
            weakref.finalize(storage, self._forget, place)
        self._parts[place][tensor.storage_offset() * tensor.element_size()] = _nbytes(tensor)

    def _forget(self, place: int) -> None:
        """Something else may lie at this address now."""
        self._parts.pop(place, None)
        self._unwritten -= self._counted.pop(place, 0)


class HollowUpdates:
    """DeepSpeed's library for its Adam in host RAM (deepspeed/ops/adam/cpu_adam.py), without updates that have no
    values."""

    def __init__(self, library: Any, hollow: HollowTensors) -> None:
        self._library = library
        self._hollow = hollow

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def adam_update(self, *arguments: Any) -> Any:
        """As the library's own; behind eight numbers come parameter, gradient and states."""
        return None if self._hollow.leaves_out(list(arguments[8:])) else self._library.adam_update(*arguments)


def _give_pages_back(tensor: Any) -> bool:
    """Make a new tensor zero without holding RAM. False where the system refuses.

    A program that reads its files with `read` leaves pages behind that it has written to, and malloc hands them out
    again: without this, what nobody writes to would still take RAM.
    """
    pages = _let_pages_go(tensor)
    if pages is None:
        return False
    start, size = tensor.data_ptr(), tensor.untyped_storage().nbytes()
    ctypes.memset(start, 0, pages[0] - start)
    ctypes.memset(pages[1], 0, start + size - pages[1])
    return True


def _let_pages_go(tensor: Any) -> tuple[int, int] | None:
    """Give the pages that lie wholly in a tensor back to the system, which finds them zero when they are next read
    (madvise(2), MADV_DONTNEED of anonymous memory). From where to where; None where the system refuses."""
    start, size = tensor.data_ptr(), tensor.untyped_storage().nbytes()
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    refused = libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)
    return None if refused else (first, last)


def _is_zero(tensor: Any) -> bool:
    """Whether every byte of a large tensor's storage is: the first is, and each is as the one before."""
    start, size = tensor.data_ptr(), tensor.untyped_storage().nbytes()
    if ctypes.c_ubyte.from_address(start).value:
        return False
    return not ctypes.CDLL(None).memcmp(ctypes.c_void_p(start), ctypes.c_void_p(start + 1), ctypes.c_size_t(size - 1))


def _nbytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _is_large(tensor: Any) -> bool:
    return bool(tensor.device.type == "cpu" and _nbytes(tensor) >= LARGE_BYTES)
