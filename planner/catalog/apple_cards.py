"""Macs with Apple's chips as cards: `profiles/apple.toml`, a chip and an amount of memory for each.

What such a card gives is Metal's ``recommendedMaxWorkingSetSize``. PyTorch goes on to 1.7 times that before it fails
(`planner.allocator.mps`), with memory that macOS swaps.
"""

from __future__ import annotations

import functools
import re
from typing import Annotated

from pydantic import Field

import profiles
from planner.catalog.card_profiles import GpuProfile
from planner.catalog.profile_files import read_record
from planner.errors import VplanError, quoted
from planner.schema import Count, Positive, Record, Text
from planner.units import KIB

CORE_TFLOPS = 0.33
"""Of one GPU core in fp32: 128 multiply-adds at 1.28 GHz, those of an M1 (philipturner/metal-benchmarks). It only puts
plans in order: what PyTorch's kernels reach is not published."""

LONGEST_BUFFER = 0.75
"""Metal's ``maxBufferLength`` over the recommended working set: 55296 of 73728 MiB (ggml-org/llama.cpp#3213, M2 Max
with 96 GB). One tensor that is as long ends in "Invalid buffer size"."""

CONTEXT_MIB = 0.47
"""What is on the device beside PyTorch's heaps, at least: 480 KiB, the least of the "other allocations" in public
messages of training (mattmireles/gemma-tuner-multimodal#18). What there may be more is in the range
(`planner.layout.margin.BESIDE_HEAPS`)."""

_CHIP = re.compile(r"(?:apple)?(?:(m[1-9](?:pro|max|ultra))(\d+)?(?:(?<=\d)gi?b?)?|(m[1-9])(?:(\d+)gi?b?)?)")
"""A chip and its memory; of one without a second word it ends in its unit, as an M40 is another's card."""
_WORDS = frozenset({"apple", "mac", "macbook", "metal", "mps"})


class Chip(Record):
    """One of Apple's chips."""

    name: Text
    title: Text
    metal_family: Count
    """GPU family of Metal"""
    cores: Count
    """GPU cores, the most there are"""
    memory_gb: Annotated[tuple[Count, ...], Field(min_length=1)]
    """what Macs with it are sold with"""
    bandwidth_gbs: Positive


class WorkingSet(Record):
    """How much of a Mac's memory Metal recommends."""

    memory_gb: Count
    gib: Positive
    source: Text


class AppleFile(Record):
    """All records of `profiles/apple.toml`."""

    chip: Annotated[tuple[Chip, ...], Field(min_length=1)]
    working_set: Annotated[tuple[WorkingSet, ...], Field(min_length=1)]

    def working_set_of(self, memory_gb: int) -> WorkingSet:
        """That of an amount of memory."""
        return next(each for each in self.working_set if each.memory_gb == memory_gb)


@functools.cache
def apple_file() -> AppleFile:
    """All chips, with the check that one field alone cannot make."""
    file = read_record(profiles.APPLE, AppleFile)
    known = {each.memory_gb for each in file.working_set}
    for chip in file.chip:
        for memory_gb in chip.memory_gb:
            if memory_gb not in known:
                fault = f"profile apple.toml is damaged: {chip.name} with {memory_gb} GB has no working set"
                raise VplanError(fault, "reinstall vplan")
    return file


def find(text: str) -> GpuProfile | None:
    """The card that a chip with its memory names (`m4max-64gb`, `Apple M4 Max 64GB`); None where it names no chip.
    Raises a VplanError for one without its memory, or with one that it is not sold with."""
    match = _CHIP.fullmatch(re.sub(r"[^a-z0-9]", "", text.lower()))
    name, memory = (match[1] or match[3], match[2] or match[4]) if match else (None, None)
    chip = next((each for each in apple_file().chip if each.name == name), None)
    if chip is None:
        if set(re.findall(r"[a-z]+", text.lower())) & _WORDS or match:
            raise VplanError(f"--gpu {quoted(text)} does not say which of Apple's chips", "use a form like m4max-64gb")
        return None
    sold = [f"{chip.name}-{memory_gb}gb" for memory_gb in chip.memory_gb]
    if memory is None:
        fault = f"--gpu {quoted(text)} does not say how much memory the Mac has"
        raise VplanError(fault, f"use {' or '.join(sold)}")
    if int(memory) not in chip.memory_gb:
        raise VplanError(f"no {chip.title} is sold with {memory} GB", f"use {' or '.join(sold)}")
    return card(chip, int(memory))


def card(chip: Chip, memory_gb: int) -> GpuProfile:
    """A chip with so much memory as a card."""
    working_set = apple_file().working_set_of(memory_gb)
    rate = chip.cores * CORE_TFLOPS
    return GpuProfile(
        name=f"{chip.name}-{memory_gb}gb",
        title=f"Apple {chip.title} with {memory_gb} GB",
        vendor="apple",
        architecture="apple",
        compute_capability=f"{chip.metal_family}.0",
        multiprocessors=chip.cores,
        class_gb=memory_gb,
        nvml_total_mib=memory_gb * KIB,
        allocatable_gib=working_set.gib,
        context_mib=CONTEXT_MIB,
        bf16_tflops=rate,
        fp16_tflops=rate,
        fp32_tflops=rate,
        bandwidth_gbs=chip.bandwidth_gbs,
        link="unified",
        link_gbs=chip.bandwidth_gbs / 2,
        power_watts=0.0,
        unified=True,
        source=f"memory, bandwidth: Apple's technical specifications; gives: {working_set.source}; no rates are known",
    )


def max_buffer_bytes(gpu: GpuProfile) -> int:
    """Metal's longest buffer on one of these cards."""
    return int(gpu.allocatable_bytes * LONGEST_BUFFER)
