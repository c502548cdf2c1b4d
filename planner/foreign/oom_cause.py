"""What an out-of-memory message means: its cause, which tensor of a job asked, and what to switch on.

The request in PyTorch's message is what its allocator asked the driver for, a tensor rounded up
(`get_allocation_size`), in two decimals of its unit (c10/util `format_size`). So a tensor of a job is the one that
asked if it is printed alike and comes when as much is allocated. Pure: records in, records out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from planner.allocator.caching import BLOCK_ROUND_BYTES
from planner.estimate.peak_moment import describe_moment
from planner.estimate.stages import ReplayedStage
from planner.foreign.oom_formats import CUT_OFF, FORMATS, Cause, Format
from planner.foreign.oom_message import OomMessage, allocation_bytes, format_size
from planner.units import MIB, format_gib


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


def asked_for(message: OomMessage, played: Sequence[ReplayedStage], most: int = 3) -> tuple[MatchingTensor, ...]:
    """The tensors of a job that may have asked, the likeliest first: printed alike, at about as much allocated."""
    requests: dict[tuple[str, str, str, int], list[int]] = {}
    for request in _requests(message.requested_text, played):
        stage, run, buffer = request.stage, request.stage.run, request.buffer
        here = stage._replace(replayed=stage.replayed._replace(allocated_peak_at=request.at))
        moment = describe_moment(here, run.strategy)
        tensor = f"{run.program.category[buffer]} ({run.program.op[buffer]})"
        asker = stage.phase, moment, tensor, run.sizes[buffer]
        requests.setdefault(asker, []).append(request.allocated_before_bytes)
    known = message.allocated_bytes
    ranked = []
    for (phase, moment, tensor, nbytes), before in requests.items():
        nearest = min(before, key=lambda one: abs(one - known)) if known is not None else max(before)
        ranked.append(MatchingTensor(phase, moment, tensor, nbytes, nearest, len(before)))
    ranked.sort(key=lambda one: abs(one.allocated_bytes - known) if known is not None else -one.allocated_bytes)
    return tuple(ranked[:most])


class _Request(NamedTuple):
    """An allocation that the message may be about."""

    stage: ReplayedStage
    at: int
    """index of its event in the stage"""
    buffer: int
    allocated_before_bytes: int


def _requests(printed: str, played: Sequence[ReplayedStage]) -> Iterator[_Request]:
    """Every allocation whose size a message would print so."""
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
                yield _Request(entry, at, event, before)
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

ANY_PHASE = (
    "gradient checkpointing, block swap, cached latents and prompts, a smaller shape; then an 8-bit optimizer or a"
    " quantised base"
)
"""What to switch on where the message does not tell the phase."""


BY_CAUSE: dict[Cause, tuple[str, ...]] = {
    "large": ("an attention that keeps no square matrix (flash, sdpa), VAE tiling, or a smaller shape: no other switch"
              " makes one tensor smaller",),
    "refused": ("on Windows a larger page file, which must stand behind the card's memory; on AMD and Intel expandable"
                " segments or a smaller single tensor; else the same command again",),
}  # fmt: skip
"""What helps against a cause wherever it struck."""


WHOLE = "paste the message to its end, which says what tensors, PyTorch's cache and other processes held"
"""Where the numbers behind the request are missing."""


def explain(message: OomMessage, played: Sequence[ReplayedStage] | None = None) -> Explanation:
    """What a message means; with the stages of its job replayed (`planner.estimate.stages.replay_stages`), which
    tensor it was."""
    cause, why = _cause(message)
    if (form := _format_of(message)) is not None:
        return Explanation(message, cause, why, form.advice, None)
    requests = None if played is None else asked_for(message, played)
    phase = requests[0].phase if requests else message.hint
    advice = []
    if cause == "fragmentation" and not message.expandable_segments:
        advice.append(EXPANDABLE)
    if cause == "fragmentation" and message.expandable_segments:
        advice.append("empty the cache between phases (torch.cuda.empty_cache), as sizes differ from phase to phase")
    if cause == "others":
        advice.append("end the other processes on this card (`nvidia-smi` lists them), or use another card")
    if cause == "unknown":
        advice.append(
            WHOLE if played is not None else f"{WHOLE}; or add the command and --gpu, for the tensor that asked"
        )
    advice += BY_CAUSE.get(cause, ())
    if message.form == "MPS":
        advice.append("close other programs, which share the RAM: PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 swaps instead")
    short = (message.unallocated_bytes or 0) < (message.requested_bytes or 0) or _is_full(message)
    if cause in ("need", "unknown", "large") or short:
        advice.append(_by_phase(phase, played))
    return Explanation(message, cause, why, tuple(advice), requests)


def _by_phase(phase: str, played: Sequence[ReplayedStage] | None) -> str:
    """What helps in a phase, without what the job has switched on already."""
    if not played:
        return BY_PHASE.get(phase, ANY_PHASE)
    advice = BY_PHASE.get(phase, "the same `vplan check` without --error says what to change in the command")
    checkpointed = played[0].run.strategy.gradient_checkpointing != "none"
    return advice.removeprefix("gradient checkpointing; then ") if checkpointed else advice


def _format_of(message: OomMessage) -> Format | None:
    """The format of a message that is not an allocator's own with numbers."""
    return next((each for each in (*FORMATS, CUT_OFF) if each.name == message.form), None)


def _cause(message: OomMessage) -> tuple[Cause, str]:
    """The cause that a message's numbers prove, and why. Nothing is called fragmentation that other processes, the
    tensors themselves or the size of the request explain."""
    wanted, held, free = message.requested_bytes, message.unallocated_bytes, message.free_bytes
    if (form := _format_of(message)) is not None:
        return form.cause, form.why
    assert wanted is not None, "an allocator says what it was asked for"
    card = message.capacity_bytes
    if card is not None and wanted > card:
        return "large", f"{message.requested_text} in one piece is more than the {format_gib(card)} there are in all"
    if held is None and free is None:
        return "unknown", f"it had no {message.requested_text} left, and the message does not say what held the rest"
    room, gaps, share = free or 0, held or 0, (card or (message.allocated_bytes or 0) + (held or 0))
    if room >= wanted:
        why = f"the driver refused {message.requested_text} while {format_gib(room)} were free"
        return "refused", f"{why}: it has a limit for one request, or somebody else took them in that moment"
    others, listed = _others(message)
    if (
        others >= (OTHERS_SHARE if listed else UNLISTED_SHARE) * share
        and others >= gaps
        and room + gaps + others >= wanted
    ):
        who = "other processes held" if listed else "neither PyTorch nor the driver's free memory accounts for"
        return "others", f"{who} {format_gib(others)} of the card"
    if held is None and message.allocated_bytes is None:
        return "unknown", f"{format_gib(room)} were free, and the message ends before it says what held the rest"
    if gaps + room >= wanted and gaps >= GAPS_SHARE * share:
        why = f"PyTorch held {format_gib(gaps)} that no tensor used, in blocks too small for {message.requested_text}"
        enough = "" if gaps >= wanted else f"; together with the {format_gib(room)} free it would have been enough"
        tensors = f"tensors held {format_gib(message.allocated_bytes or 0)} of {format_gib(share)}"
        full = f"; {tensors}, so that the card is nearly full without gaps too" if _is_full(message) else ""
        return "fragmentation", why + enough + full
    if gaps + room >= wanted:
        full = f"tensors held {format_gib(message.allocated_bytes or 0)} of {format_gib(share)}"
        return "need", f"the card was full: {full}, and the {format_gib(gaps + room)} beside them are used up at once"
    short = wanted - room - gaps
    return "need", f"the tensors themselves were too much: {format_gib(short)} more than was free or held in reserve"


def _is_full(message: OomMessage) -> bool:
    """Whether tensors alone held most of the card."""
    return bool(message.capacity_bytes) and (message.allocated_bytes or 0) >= FULL_SHARE * (message.capacity_bytes or 0)


FULL_SHARE = 0.8
"""Of the card, in tensors: what expandable segments free is then used up by a somewhat larger sample."""

OTHERS_SHARE = 0.05
"""Of the card: what a desktop and a browser hold is less, and ending them would not save a run."""

UNLISTED_SHARE = 0.1
"""Of the card: the same where no process is listed, as a driver may keep more for itself than CUDA's does."""

GAPS_SHARE = 0.02
"""Of the card: what PyTorch rounds up and keeps in small blocks is about as much in any run."""

CONTEXT_BYTES = 600 * MIB
"""The most that CUDA's context takes on a card of `gpus.toml`, where a message does not count it."""


def _others(message: OomMessage) -> tuple[int, bool]:
    """Bytes of other processes, and whether the message lists them. Drivers on Windows, in containers and AMD's list
    none: then what is neither this process's nor free."""
    if message.others_bytes or message.allowed_bytes is not None:
        return message.others_bytes, True
    if message.capacity_bytes is None or message.free_bytes is None or message.allocated_bytes is None:
        return 0, True
    own = message.allocated_bytes + (message.unallocated_bytes or 0) + CONTEXT_BYTES
    own = max(own, message.in_use_bytes or 0)
    return max(0, message.capacity_bytes - message.free_bytes - own), False


OPENINGS: dict[Cause, str] = {
    "fragmentation": "Fragmentation",
    "need": "No fragmentation",
    "others": "Not this process alone",
    "large": "One request too large",
    "refused": "Refused by the driver",
    "beside": "No room beside PyTorch",
    "driver": "Most likely no tensor on the card",
    "host": "Host RAM",
    "pinned": "Pinned host memory",
    "commit": "Windows' commit limit",
    "crash": "Most often Windows' page file",
    "shared": "Shared memory",
    "kernel": "Not the card's memory",
    "unknown": "The card was full",
}
"""How a line names the cause."""


_SAID_OTHERWISE = {
    "killed": "The process was killed",
    "access violation": "The process crashed",
    "1 EB": "The request was too large",
    "cut off": "Out of memory",
    "1455": "Windows ran out",
    "python": "Python ran out",
    "host": "Host RAM ran out",
    "start": "CUDA could not start",
    "CUDA's driver": "CUDA's driver refused memory",
    "kernel": "A kernel asked for too much",
    "shared memory": "Shared memory ran out",
}
"""What is said of formats that are not named after who ran out."""


def _without_size(form: str) -> str:
    return _SAID_OTHERWISE.get(form, f"{form} ran out")


def render(explanation: Explanation) -> list[str]:
    """The explanation as lines of text for the terminal."""
    message = explanation.message
    card = "" if message.gpu is None else f"GPU {message.gpu}: "
    what = f"{message.requested_text} could not be allocated" if message.requested_text else _without_size(message.form)
    lines = [f"{card}{what}."]
    others = message.others_bytes
    if message.in_use_bytes is not None and _others(message)[0] >= CONTEXT_BYTES:
        others = _others(message)[0]
    parts = (
        ("capacity", message.capacity_bytes),
        ("in tensors", message.allocated_bytes),
        ("reserved, unused", message.unallocated_bytes),
        ("other processes", others or None),
        ("free", message.free_bytes),
    )
    lines += [f"  {name:<24}{format_gib(nbytes):>12}" for name, nbytes in parts if nbytes is not None]
    if message.frame:
        lines.append(f"Requested by {message.frame}.")
    opening = "Whose memory is not said" if message.form == CUT_OFF.name else OPENINGS[explanation.cause]
    lines.append(f"{opening}: {explanation.why}.")
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
