"""The virtual cards of a run: what its processes are told of them, and the table in which they say what they hold."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from planner.catalog.card_profiles import GpuProfile
from planner.errors import VplanError
from planner.units import MIB

TABLE = "cards"
"""The table's file in the run's folder (virtual_gpu/holders.c)."""

MOST_CARDS, MOST_HOLDERS = 16, 256
_MAGIC = 0x3255504756


class _Holder(ctypes.Structure):
    """`struct holder` of virtual_gpu/virtual_gpu.h."""

    _fields_ = (
        ("pid", ctypes.c_int32),
        ("ended", ctypes.c_int32),
        ("used", ctypes.c_uint64 * MOST_CARDS),
        ("peak", ctypes.c_uint64 * MOST_CARDS),
        ("outside", ctypes.c_uint64 * MOST_CARDS),
        ("outside_peak", ctypes.c_uint64 * MOST_CARDS),
        ("pinned", ctypes.c_uint64),
        ("pinned_peak", ctypes.c_uint64),
        ("registered", ctypes.c_uint64),
        ("registered_shared", ctypes.c_uint64),
        ("unwritten", ctypes.c_uint64),
        ("reads", ctypes.c_uint64),
        ("launches", ctypes.c_uint64),
        ("short_of", ctypes.c_uint64),
    )


class _Table(ctypes.Structure):
    """`struct table` of the same file."""

    _fields_ = (
        ("magic", ctypes.c_uint64),
        ("lock", ctypes.c_int32),
        ("pad", ctypes.c_int32),
        ("card_peak", ctypes.c_uint64 * MOST_CARDS),
        ("holders", _Holder * MOST_HOLDERS),
    )


class Holder(NamedTuple):
    """What one process held; all sizes in bytes."""

    pid: int
    peaks: tuple[int, ...]
    """by card, with context and communicators"""
    outside: tuple[int, ...]
    """by card: the most that contexts and communicators held, which is estimated"""
    pinned_bytes: int
    """allocated as pinned memory, now"""
    registered_bytes: int
    """pinned where it lay in the process's own memory"""
    registered_shared_bytes: int
    """the same of mapped files that other processes may map too"""
    unwritten_bytes: int
    """of large copies to ordinary host memory, which were not made"""
    reads: int
    """values of the card that reached the host"""
    launches: int
    short_of_bytes: int
    """the last request that found no room on a card; 0 without one"""


class CardTable(NamedTuple):
    """What all processes of a run have held so far."""

    card_peaks: tuple[int, ...]
    """bytes by card, all processes together"""
    holders: tuple[Holder, ...]

    @property
    def pinned_bytes(self) -> int:
        """Host memory that all processes have allocated as pinned, now."""
        return sum(holder.pinned_bytes for holder in self.holders)

    def all_pinned_bytes(self, files: int) -> int:
        """Also what was pinned where it lay. ``files``: bytes of the files in RAM that processes map; one that several
        have pinned counts once."""
        own = sum(holder.registered_bytes for holder in self.holders)
        return self.pinned_bytes + own + min(files, sum(holder.registered_shared_bytes for holder in self.holders))


def read_table(folder: Path) -> CardTable:
    """The table of a run's folder; an empty one as long as no process has used a card."""
    try:
        data = (folder / TABLE).read_bytes()
    except FileNotFoundError:
        data = b""
    if len(data) < ctypes.sizeof(_Table):
        return CardTable((0,) * MOST_CARDS, ())
    table = _Table.from_buffer_copy(data)
    if table.magic != _MAGIC:
        return CardTable((0,) * MOST_CARDS, ())
    return CardTable(tuple(table.card_peak), tuple(_holders(table)))


def _holders(table: _Table) -> Iterator[Holder]:
    for row in table.holders:
        if row.pid:
            now = (row.pinned, row.registered, row.registered_shared)
            pinned, own, shared = (0, 0, 0) if row.ended else now
            counters = (row.unwritten, row.reads, row.launches, row.short_of)
            yield Holder(row.pid, tuple(row.peak), tuple(row.outside_peak), pinned, own, shared, *counters)


def card_environment(card: GpuProfile, count: int, nccl_bytes: int) -> Mapping[str, str]:
    """The variables that make the virtual GPU this card, `count` times (virtual_gpu/virtual_gpu.h lists them). Raises a
    VplanError for a card of another maker: the virtual GPU is CUDA's."""
    if card.vendor != "nvidia":
        raise VplanError(f"{card.title} cannot be rehearsed: the virtual GPU is NVIDIA's", "use vplan estimate")
    major, minor = card.compute_capability.split(".")
    reserved = max(0, card.nvml_total_mib * MIB - card.allocatable_bytes)
    facts = {
        "COUNT": count,
        "BYTES": card.allocatable_bytes,
        "RESERVED_BYTES": reserved,
        "CONTEXT_BYTES": card.context_bytes,
        "NCCL_BYTES": nccl_bytes,
        "CAPABILITY": int(major) * 10 + int(minor),
        "PROCESSORS": card.multiprocessors,
        "NAME": f"NVIDIA {card.title}",
    }
    return {f"VPLAN_GPU_{name}": str(value) for name, value in facts.items()}
