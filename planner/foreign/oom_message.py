"""CUDA's out-of-memory message, as torch 2.x words it and people paste it: what it says, and what it means.

The wording is c10/cuda/CUDACachingAllocator.cpp's (`malloc`), in its forms of 2.0, 2.1 and 2.2 on. The request in it is
what the allocator asked the driver for, a tensor rounded up (`get_allocation_size`), in two decimals of its unit
(c10/util `format_size`). So a tensor of a job is the one that asked if it is printed alike and comes when as much is
allocated. Pure: text in, records out.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from planner.allocator.caching import (
    BLOCK_ROUND_BYTES,
    LARGE_LIMIT_BYTES,
    LARGE_ROUND_BYTES,
    LARGE_SEGMENT_BYTES,
    SMALL_LIMIT_BYTES,
    SMALL_SEGMENT_BYTES,
)
from planner.errors import VplanError
from planner.estimate.estimate import describe_moment
from planner.estimate.stages import ReplayedStage
from planner.units import GIB, KIB, MIB, format_gib

LONGEST = 16 << 20
"""Characters of a log that are read."""

Cause = Literal["fragmentation", "others", "need", "unknown"]
_UNITS = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1 << 40, "KB": KIB, "MB": MIB, "GB": GIB}
_SIZE = r"([\d.]+) (bytes|[KMGT]i?B)"
_START = re.compile(r"(?:CUDA|HIP) out of memory\.? Tried to allocate " + _SIZE)
_PARTS = {
    "capacity": (rf"total capaci?ty of {_SIZE}", rf"{_SIZE} total capacity"),
    "free": (rf"of which {_SIZE} is free", rf"{_SIZE} free"),
    "in_use": (rf"this process has {_SIZE} memory in use",),
    "allowed": (rf"{_SIZE} allowed",),
    "allocated": (rf"{_SIZE} is allocated by PyTorch", rf"{_SIZE} already allocated"),
    "private": (rf"with {_SIZE} allocated in private pools",),
    "unallocated": (rf"{_SIZE} is reserved by PyTorch but unallocated",),
    "reserved": (rf"{_SIZE} reserved in total by PyTorch",),
}
_OTHER = re.compile(rf"Process \d+ has {_SIZE} memory in use")
_WHICH = re.compile(r"GPU (\d+)")
_SET = re.compile(
    r"(?<!try setting )PYTORCH_(?:CUDA_|HIP_)?ALLOC_CONF['\"]?\s*\]?\s*[=:]\s*['\"]?\S*expandable_segments:(\w+)"
)
_FRAME = re.compile(r'File "([^"\n]{1,300})", line (\d+), in (\S+)')
_BARE = re.compile(r"CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation")

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

    requested_bytes: int
    """asked of the driver: a tensor rounded up as the allocator rounds"""
    requested_text: str
    gpu: int | None = None
    capacity_bytes: int | None = None
    free_bytes: int | None = None
    in_use_bytes: int | None = None
    """by this process, with CUDA's context"""
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


@dataclass(frozen=True)
class MatchingTensor:
    """A tensor of a job that asks the driver for as much as the message says."""

    phase: str
    moment: str
    tensor: str
    nbytes: int
    allocated_bytes: int
    """before it, in the job as we lay it out"""
    times: int
    """how often such a tensor is asked for in this moment"""


@dataclass(frozen=True)
class Explanation:
    """The explanation of an out-of-memory message: the cause, why, and what to switch on."""

    message: OomMessage
    cause: Cause
    why: str
    advice: tuple[str, ...]
    asked: tuple[MatchingTensor, ...] | None
    """the likeliest first; None where no job was given"""

    def to_json(self) -> dict[str, Any]:
        """The explanation as `vplan check --error --json` prints it."""
        requests = None if self.asked is None else [dataclasses.asdict(each) for each in self.asked]
        return {
            "error": self.message.to_json(),
            "cause": self.cause,
            "why": self.why,
            "advice": list(self.advice),
            "asked": requests,
        }


def parse(text: str) -> OomMessage:
    """The first out-of-memory message of a text, which may have log lines around it; a VplanError when it has none."""
    text = text[:LONGEST]
    lines = re.sub(r"^\s*(?:\[?(?:rank|default)\s?\d+\]?:|\|)[ \t]?", "", text, flags=re.MULTILINE)
    starts = list(_START.finditer(plain := " ".join(lines.split())))
    if not starts:
        if _BARE.search(plain):
            fault = "the driver's own error has no numbers: it was not PyTorch's allocator that ran out of memory"
            raise VplanError(fault, "look for PyTorch's `CUDA out of memory. Tried to allocate` in the log")
        raise VplanError("there is no `CUDA out of memory. Tried to allocate` in it", "paste PyTorch's whole message")
    end = starts[1].start() if len(starts) > 1 else len(plain)
    words = plain[starts[0].start() : min(end, starts[0].start() + 2_000)]
    parts = {name: _first(patterns, words) for name, patterns in _PARTS.items()}
    unallocated = parts["unallocated"]
    if unallocated is None and parts["reserved"] is not None and parts["allocated"] is not None:
        unallocated = max(0, parts["reserved"] - parts["allocated"])
    own, others = _processes(parts["in_use"], words, (parts["allocated"] or 0) + (unallocated or 0))
    frame, hint = _traceback(lines[: _opening(lines)])
    which, setting = _WHICH.search(words), _SET.search(plain)
    return OomMessage(
        requested_bytes=_bytes(*starts[0].groups()),
        requested_text=" ".join(starts[0].groups()),
        gpu=int(which[1]) if which else None,
        capacity_bytes=parts["allowed"] or parts["capacity"],
        free_bytes=parts["free"],
        in_use_bytes=own,
        others_bytes=others,
        allocated_bytes=parts["allocated"],
        unallocated_bytes=unallocated,
        expandable_segments=setting[1].lower() == "true" if setting else None,
        frame=frame,
        hint=hint,
        messages=len(starts),
    )


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
        if match := re.search(pattern, text):
            return _bytes(match[1], match[2])
    return None


def _opening(lines: str) -> int:
    match = re.search(r"out of memory\.?\s+Tried\s+to", lines)
    return match.start() if match else len(lines)


def _traceback(text: str) -> tuple[str, str]:
    """The innermost frame outside torch, and the phase that the innermost telling frame speaks of."""
    frames = list(_FRAME.finditer(text[-100_000:]))
    frame = hint = ""
    for position, match in enumerate(reversed(frames)):
        path, line, function = match.groups()
        if not frame and "site-packages/torch/" not in path:
            tail = "/".join(path.replace("\\", "/").split("/")[-2:])
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


def asked_for(message: OomMessage, played: Sequence[ReplayedStage], most: int = 3) -> tuple[MatchingTensor, ...]:
    """The tensors of a job that may have asked, the likeliest first: printed alike, at about as much allocated."""
    requests: dict[tuple[str, str, str, int], list[int]] = {}
    for entry, at, buffer, allocated in _requests(message.requested_text, played):
        here = entry._replace(replayed=entry.replayed._replace(allocated_peak_at=at))
        moment = describe_moment(here, entry.run.strategy)
        program = entry.run.program
        tensor = f"{program.category[buffer]} ({program.op[buffer]})"
        requests.setdefault((entry.phase, moment, tensor, entry.run.sizes[buffer]), []).append(allocated)
    known = message.allocated_bytes
    ranked = []
    for (phase, moment, tensor, nbytes), before in requests.items():
        nearest = min(before, key=lambda one: abs(one - known)) if known is not None else max(before)
        ranked.append(MatchingTensor(phase, moment, tensor, nbytes, nearest, len(before)))
    ranked.sort(key=lambda one: abs(one.allocated_bytes - known) if known is not None else -one.allocated_bytes)
    return tuple(ranked[:most])


def _requests(printed: str, played: Sequence[ReplayedStage]) -> Iterator[tuple[ReplayedStage, int, int, int]]:
    """Every allocation that would be printed so: stage, index of its event, buffer, bytes allocated before it."""
    shown: dict[int, bool] = {}
    allocated = 0
    for entry in played:
        sizes = entry.run.sizes
        alone = bool(entry.run.encoding_only.peak_bytes)  # what is cached before the run has the card for itself
        before = 0 if alone else allocated
        for at, event in enumerate(entry.stage.ops):
            nbytes = sizes[event if event >= 0 else ~event]
            rounded = -(-nbytes // BLOCK_ROUND_BYTES) * BLOCK_ROUND_BYTES
            if event < 0:
                before -= rounded
                continue
            if nbytes not in shown:
                shown[nbytes] = nbytes > 0 and format_size(allocation_bytes(nbytes)) == printed
            if shown[nbytes]:
                yield entry, at, event, before
            before += rounded
        allocated = allocated if alone else before


EXPANDABLE = "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before starting (not on native Windows)"
BY_PHASE = {
    "load": "load the components one after the other, or the text encoder and VAE only if latents are not cached",
    "encode": "cache latents and prompts before training, or tile the VAE",
    "first_step": "gradient checkpointing; then block swap, a smaller batch or fewer frames",
    "train": "gradient checkpointing; then checkpoints in host RAM, block swap, a smaller batch or fewer frames",
    "backward": "gradient checkpointing; then checkpoints in host RAM, block swap, a smaller batch or fewer frames",
    "optimizer": "an 8-bit optimizer, its states in host RAM or sharded over GPUs (zero-2), or a fused step",
    "denoise": "turn validation off, or move each component to the GPU only while it runs",
    "decode": "VAE slicing or tiling for the validation sample, or no validation",
    "save": "save from host RAM; what is gathered for a checkpoint adds to training memory",
}
"""What to switch on, the lossless first, by where it died."""


def explain(message: OomMessage, played: Sequence[ReplayedStage] | None = None) -> Explanation:
    """What a message means; with the stages of its job replayed (`planner.estimate.stages.replay_stages`), which
    tensor it was."""
    requests = None if played is None else asked_for(message, played)
    cause, why = _cause(message)
    phase = requests[0].phase if requests else message.hint
    advice = []
    if cause == "fragmentation" and not message.expandable_segments:
        advice.append(EXPANDABLE)
    if cause == "fragmentation" and message.expandable_segments:
        advice.append("empty the cache between phases (torch.cuda.empty_cache), as sizes differ from phase to phase")
    if cause == "others":
        advice.append("end the other processes on this card (`nvidia-smi` lists them), or use another card")
    if cause in ("need", "unknown") or (message.unallocated_bytes or 0) < message.requested_bytes:
        advice.append(_by_phase(phase, played))
    return Explanation(message, cause, why, tuple(advice), requests)


def _by_phase(phase: str, played: Sequence[ReplayedStage] | None) -> str:
    """What helps in a phase, without what the job has switched on already."""
    if not played:
        return BY_PHASE.get(phase, "gradient checkpointing, an 8-bit optimizer, cached latents and prompts")
    advice = BY_PHASE.get(phase, "the same `vplan check` without --error says what to change in the command")
    checkpointed = played[0].run.strategy.gradient_checkpointing != "none"
    return advice.removeprefix("gradient checkpointing; then ") if checkpointed else advice


def _cause(message: OomMessage) -> tuple[Cause, str]:
    wanted, held, free = message.requested_bytes, message.unallocated_bytes, message.free_bytes
    if held is None and free is None:
        return "unknown", "the message does not say how much was free"
    free = free or 0
    if held is not None and held + free >= wanted:
        why = f"PyTorch held {format_gib(held)} that no tensor used, in blocks too small for {message.requested_text}"
        enough = "" if held >= wanted else f"; together with the {format_gib(free)} free it would have been enough"
        return "fragmentation", why + enough
    if message.others_bytes and free + (held or 0) + message.others_bytes >= wanted:
        return "others", f"other processes held {format_gib(message.others_bytes)} of the card"
    short = wanted - free - (held or 0)
    return "need", f"the tensors themselves were too much: {format_gib(short)} more than was free or held in reserve"


OPENINGS: dict[Cause, str] = {
    "fragmentation": "Fragmentation",
    "need": "No fragmentation",
    "others": "Not this process alone",
    "unknown": "Cause unknown",
}
"""How a line names the cause."""


def render(explanation: Explanation) -> list[str]:
    """The explanation as lines of text for the terminal."""
    message = explanation.message
    card = "" if message.gpu is None else f"GPU {message.gpu}: "
    lines = [f"{card}{message.requested_text} could not be allocated."]
    parts = (
        ("capacity", message.capacity_bytes),
        ("in tensors", message.allocated_bytes),
        ("reserved, unused", message.unallocated_bytes),
        ("other processes", message.others_bytes or None),
        ("free", message.free_bytes),
    )
    lines += [f"  {name:<24}{format_gib(nbytes):>12}" for name, nbytes in parts if nbytes is not None]
    if message.frame:
        lines.append(f"Requested by {message.frame}.")
    lines.append(f"{OPENINGS[explanation.cause]}: {explanation.why}.")
    if explanation.asked:
        lines.append("In this job it can be:")
        for one in explanation.asked:
            times = f", {one.times} of them" if one.times > 1 else ""
            at = f"at {format_gib(one.allocated_bytes)} in tensors"
            lines.append(f"  {one.phase}: {one.tensor}, {format_gib(one.nbytes)}{times}, in {one.moment}, {at}")
    elif explanation.asked is not None:
        lines.append("No tensor of this job has that size: the message is from another shape, model or version.")
    lines += [f"What helps: {advice}." for advice in explanation.advice]
    if message.messages > 1:
        lines.append(f"The text holds {message.messages} such messages; this is the first.")
    return lines
