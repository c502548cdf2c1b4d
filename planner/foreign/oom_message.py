"""Out-of-memory messages, as they are worded and people paste them: what they say. `oom_cause` says what they mean.

PyTorch's own have numbers: c10/cuda/CUDACachingAllocator.cpp (`malloc`) in its forms of 1.x, 2.0, 2.1 and 2.2 on, the
same for HIP and XPU (c10/xpu/XPUCachingAllocator.cpp), MPS's (aten/src/ATen/mps/MPSAllocator.mm) and cudaMallocAsync's
(c10/cuda/CUDAMallocAsyncAllocator.cpp), which ComfyUI runs with. All others are in `oom_formats`. Pure: text in,
records out.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from planner.allocator.caching import (
    BLOCK_ROUND_BYTES,
    LARGE_LIMIT_BYTES,
    LARGE_ROUND_BYTES,
    LARGE_SEGMENT_BYTES,
    SMALL_LIMIT_BYTES,
    SMALL_SEGMENT_BYTES,
)
from planner.errors import VplanError
from planner.foreign.oom_formats import find
from planner.units import GIB, KIB, MIB

LONGEST = 16 << 20
"""Characters of a log that are read."""

_UNITS = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1 << 40, "KB": KIB, "MB": MIB, "GB": GIB}
_SIZE = r"(\d+(?:\.\d+)?) (bytes|[KMGT]i?B)"


def _squeezed(pattern: str) -> str:
    """A pattern for text without blanks: where a terminal wraps a message it is pasted with some more, or fewer."""
    return pattern.replace(" ", "")


_START = re.compile(_squeezed(r"(CUDA|HIP|XPU) out of memory\.? Tried to allocate " + _SIZE))
_MPS = re.compile(_squeezed(
    rf"(MPS) backend out of memory \(MPS allocated: {_SIZE}, other allocations: {_SIZE}, max allowed: {_SIZE}\)\.?"
    rf" Tried to allocate {_SIZE}"
))  # fmt: skip
_ASYNC = re.compile(_squeezed(
    rf"Allocation on (device) \d* would exceed allowed memory\. \(out of memory\) Currently allocated: {_SIZE}"
    rf" Requested: {_SIZE} Device limit: {_SIZE} Free \(according to CUDA\): {_SIZE}"
))  # fmt: skip
_PARTS = {
    "capacity": (rf"total capaci?ty of {_SIZE}", rf"{_SIZE} total capacity"),
    "free": (rf"of which {_SIZE} is free", rf"{_SIZE} free"),
    "in_use": (rf"this process has {_SIZE} memory in use",),
    "allowed": (rf"{_SIZE} allowed",),
    "allocated": (rf"{_SIZE} is allocated by PyTorch", rf"{_SIZE} already allocated"),
    "cached": (rf"{_SIZE} cached",),
    "private": (rf"with {_SIZE} allocated in private pools",),
    "unallocated": (rf"{_SIZE} is reserved by PyTorch but unallocated",),
    "reserved": (rf"{_SIZE} reserved in total by PyTorch",),
}
_OTHER = re.compile(_squeezed(rf"Process \d+ has {_SIZE} memory in use"))
_WHICH = re.compile(r"GPU(\d+)")
_SET = re.compile(r"PYTORCH_(?:CUDA_|HIP_)?ALLOC_CONF['\"]?\s*\]?\s*[=:]\s*['\"]?\S*expandable_segments:(\w+)")
_FRAME = re.compile(r'File "([^"\n]{1,300})", line (\d+), in (\S+)')

HINTS = (
    ("optimizer", ("/optim/", "optimizers/", "optimizer.step", "adamw", "bitsandbytes/optim")),
    ("decode", ("decode", "postprocess")),
    ("encode", ("encode_prompt", "text_encoder", "vae.encode", "in encode", "_encode")),
    ("save", ("torch.save", "save_state", "save_pretrained", "save_checkpoint")),
    ("backward", ("autograd/", "loss.backward", ".backward(", "in backward")),
    ("denoise", ("pipelines/", "log_validation", "validation")),
    ("load", ("from_pretrained", "load_state_dict", ".to(device", "in _apply", "in convert")),
)
"""What a frame of the traceback is about, by parts of its text; the innermost frame that says anything decides."""


@dataclass(frozen=True)
class OomMessage:
    """The numbers of one out-of-memory message, in bytes; None where its wording has no such number."""

    requested_bytes: int | None
    """asked of the driver: a tensor rounded up as the allocator rounds"""
    requested_text: str
    form: str = "CUDA"
    """whose message it is: CUDA, HIP, XPU, MPS, cudaMallocAsync, or the name of an `oom_formats.Format`"""
    gpu: int | None = None
    capacity_bytes: int | None = None
    free_bytes: int | None = None
    in_use_bytes: int | None = None
    """by this process, with CUDA's context"""
    allowed_bytes: int | None = None
    """by the process's own limit, which `capacity_bytes` is then too"""
    others_bytes: int = 0
    """by other processes on the card"""
    allocated_bytes: int | None = None
    """tensors"""
    unallocated_bytes: int | None = None
    """reserved by torch, and in no tensor"""
    expandable_segments: bool | None = None
    """as the log around it says; None: it does not"""
    frame: str = ""
    """the code that asked, from the traceback above it"""
    hint: str = ""
    """the phase that the traceback speaks of"""
    messages: int = 1
    """how many such messages the text holds; the first was read"""

    def to_json(self) -> dict[str, Any]:
        """The message as plain JSON values."""
        return dataclasses.asdict(self)


def parse_oom_message(text: str) -> OomMessage:
    """The first out-of-memory message of a text, which may have log lines around it; a VplanError when it has none."""
    text = text[:LONGEST]
    lines = re.sub(r"^\s*(?:\[?(?:rank|default)\s?\d+\]?:|\|)[ \t]?", "", text, flags=re.MULTILINE)
    plain = "".join(lines.split())
    starts = list(_START.finditer(plain))
    expandable = _expandable(" ".join(lines.split()))
    if not starts:
        found = _of_other_allocators(plain) or _without_numbers(lines)
        frame, hint = _traceback(lines)
        return dataclasses.replace(found, frame=frame, hint=hint, expandable_segments=expandable)
    end = starts[1].start() if len(starts) > 1 else len(plain)
    words = plain[starts[0].start() : min(end, starts[0].start() + 2_000)]
    parts = {name: _first(patterns, words) for name, patterns in _PARTS.items()}
    unallocated = parts["unallocated"] if parts["unallocated"] is not None else parts["cached"]
    if unallocated is None and parts["reserved"] is not None and parts["allocated"] is not None:
        unallocated = max(0, parts["reserved"] - parts["allocated"])
    held = (parts["allocated"] or 0) + (unallocated or 0)
    own, others = _processes(parts["in_use"], words, held)
    frame, hint = _traceback(lines[: _opening(lines)])
    which = _WHICH.search(words)
    device, *size = starts[0].groups()
    return OomMessage(
        requested_bytes=_bytes(*size),
        requested_text=" ".join(size),
        form=device,
        gpu=int(which[1]) if which else None,
        capacity_bytes=parts["allowed"] or parts["capacity"],
        free_bytes=_free(parts, held),
        in_use_bytes=own,
        allowed_bytes=parts["allowed"],
        others_bytes=others,
        allocated_bytes=parts["allocated"],
        unallocated_bytes=unallocated,
        expandable_segments=expandable,
        frame=frame,
        hint=hint,
        messages=len(starts),
    )


def _expandable(text: str) -> bool | None:
    """What a log says that the allocator was told; None where it says nothing. The message's own advice sets nothing,
    wherever a terminal has broken it."""
    for setting in _SET.finditer(text):
        before = text[max(0, setting.start() - 20) : setting.start()]
        if not "".join(before.split()).endswith("trysetting"):
            return setting[1].lower() == "true"
    return None


def _free(parts: dict[str, int | None], held: int) -> int | None:
    """Bytes that the process could still get: free on the card, and inside its own limit. HIP prints a difference below
    zero as one of 64 bits, which is more than the card has: then it is not known."""
    free, capacity = parts["free"], parts["capacity"]
    if free is not None and capacity is not None and free > capacity:
        free = None
    if parts["allowed"] is None:
        return free
    inside = max(0, parts["allowed"] - held)
    return inside if free is None else min(free, inside)


def _of_other_allocators(plain: str) -> OomMessage | None:
    """A message of MPS's allocator, or of cudaMallocAsync as PyTorch words it."""
    if match := _MPS.search(plain):
        tensors, other, allowed, wanted = (_bytes(*match.groups()[at : at + 2]) for at in (1, 3, 5, 7))
        free = max(0, allowed - tensors - other)
        text = " ".join(match.groups()[7:9])
        return OomMessage(wanted, text, "MPS", None, allowed, free, tensors + other, allowed, 0, tensors, None)
    if match := _ASYNC.search(plain):
        tensors, wanted, capacity, free = (_bytes(*match.groups()[at : at + 2]) for at in (1, 3, 5, 7))
        text = " ".join(match.groups()[3:5])
        return OomMessage(wanted, text, "cudaMallocAsync", None, capacity, free, allocated_bytes=tensors)
    return None


def _without_numbers(lines: str) -> OomMessage:
    if (found := find(lines)) is None:
        fix = "paste the whole message, as PyTorch's `CUDA out of memory. Tried to allocate`"
        raise VplanError("there is no out-of-memory message in it that is known here", fix)
    form, match = found
    asked = next((int(group) for group in match.groups() if group), None)
    return OomMessage(asked, "" if asked is None else format_size(asked), form.name)


def _processes(own: int | None, words: str, held: int) -> tuple[int | None, int]:
    """Bytes of the process itself and of the others on the card.

    Torch finds itself by its process number (CUDACachingAllocator.cpp `reportProcessMemoryInfo`). In a container NVML
    numbers it differently, and it is listed as one of the others: the smallest that can hold what torch holds.
    """
    listed = sorted(_bytes(*match) for match in _OTHER.findall(words))
    if own is None and (able := [nbytes for nbytes in listed if held and nbytes >= held]):
        own = able[0]
        listed.remove(own)
    return own, sum(listed)


def _bytes(number: str, unit: str) -> int:
    try:
        return round(float(number) * _UNITS[unit])
    except (ValueError, KeyError):
        raise VplanError(f"{number} {unit} is not a size", "paste PyTorch's own message") from None


def _first(patterns: Iterable[str], text: str) -> int | None:
    for pattern in patterns:
        if match := re.search(_squeezed(pattern), text):
            return _bytes(match[1], match[2])
    return None


def _opening(lines: str) -> int:
    match = re.search(r"out\s*of\s*memory\.?\s*Tried\s*to", lines)
    return match.start() if match else len(lines)


def _traceback(text: str) -> tuple[str, str]:
    """The innermost frame outside torch, and the phase that the innermost telling frame speaks of."""
    frames = list(_FRAME.finditer(text[-100_000:]))
    frame = hint = ""
    for position, match in enumerate(reversed(frames)):
        path, line, function = match[1].replace("\\", "/"), match[2], match[3]
        if not frame and "-packages/torch/" not in path:  # dist-packages on Debian's own Python
            tail = "/".join(path.split("/")[-2:])
            frame = f"{tail}:{line} in {function}"
        after = frames[len(frames) - position].start() if position else len(text)
        words = f"{path} in {function} {text[match.end() : after][:200]}".lower()
        if not hint:
            hint = next((phase for phase, parts in HINTS if any(part in words for part in parts)), "")
    return frame, hint


def allocation_bytes(nbytes: int) -> int:
    """The size in bytes of the segment that the allocator asks the driver for to serve `nbytes`
    (`get_allocation_size`)."""
    size = -(-nbytes // BLOCK_ROUND_BYTES) * BLOCK_ROUND_BYTES
    if size <= SMALL_LIMIT_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < LARGE_LIMIT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // LARGE_ROUND_BYTES) * LARGE_ROUND_BYTES


def format_size(nbytes: int) -> str:
    """A number of bytes as PyTorch prints it in an out-of-memory message."""
    if nbytes <= KIB:
        return f"{nbytes} bytes"
    for unit, size in (("KiB", KIB), ("MiB", MIB)):
        if nbytes <= size * 1024:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes / GIB:.2f} GiB"
