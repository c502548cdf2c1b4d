"""What a rehearsal says: fits, or where it ends, and how much everything took."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from planner.errors import VplanError
from planner.rehearsal.cards import Holder
from planner.rehearsal.interpreter import Interpreter
from planner.rehearsal.live_memory import LiveMemory, ProcessMemory
from planner.rehearsal.observations import Frame, Observed, OutOfMemory, program_frame
from planner.rehearsal.rehearsal import Rehearsal, RehearsalOutcome
from planner.spec.plan import PhasePeak
from planner.units import GIB, format_gib, plural

Verdict = Literal["fits", "tight", "no"]

PHASES = ("load", "encode", "first_step", "train", "optimizer", "denoise", "decode")
"""In the order of a run. `load` ends with the first forward; `encode` is forwards without gradients of what is not
trained, `denoise` of what is, `decode` behind those; `optimizer` is what happens inside `optimizer.step()`."""


@dataclass(frozen=True)
class RankPeaks:
    """One process on one card."""

    rank: int
    device: int
    phases: Mapping[str, PhasePeak]
    device_bytes: int
    """with the context and the communicators"""
    outside_bytes: int
    """of the context and the communicators, which are estimated"""
    retries: int

    @property
    def allocated_bytes(self) -> int:
        """torch's own count at its highest."""
        return max((peak.allocated_bytes for peak in self.phases.values()), default=0)

    @property
    def reserved_bytes(self) -> int:
        """torch's own count at its highest."""
        return max((peak.reserved_bytes for peak in self.phases.values()), default=0)

    def to_json(self) -> dict[str, Any]:
        """The peaks as JSON."""
        return {
            "rank": self.rank,
            "device": self.device,
            "allocated_bytes": self.allocated_bytes,
            "reserved_bytes": self.reserved_bytes,
            "device_bytes": self.device_bytes,
            "estimated_bytes": self.outside_bytes,
            "retries": self.retries,
            "phases": {name: peak.to_json() for name, peak in self.phases.items()},
        }


@dataclass(frozen=True)
class RehearsalAnswer:
    """The answer to `vplan rehearse`."""

    rehearsal: Rehearsal
    outcome: RehearsalOutcome
    torch: str | None
    verdict: Verdict
    limit: Literal["gpu", "host"] | None
    oom: OutOfMemory | None
    """where it ended, if the program was watched there"""
    short_of_bytes: int
    """the request that found no room; 0 where it fits"""
    ranks: tuple[RankPeaks, ...]
    assumptions: tuple[str, ...]

    @property
    def steps(self) -> int:
        """Optimizer steps that were done."""
        return max((process.steps for process in self.outcome.observed), default=0)

    @property
    def device_bytes(self) -> int:
        """The fullest card, all its processes together."""
        return max(self.outcome.table.card_peaks)

    @property
    def outside_bytes(self) -> int:
        """Of contexts and communicators on one card, which are estimated."""
        return max((rank.outside_bytes for rank in self.ranks), default=0)

    @property
    def phase(self) -> str | None:
        """Where it ended; else where the fullest rank had its peak."""
        if self.oom:
            return self.oom.phase
        fullest = max(self.ranks, key=lambda rank: rank.device_bytes, default=None)
        if fullest is None or not fullest.phases:
            return None
        return max(fullest.phases, key=lambda name: fullest.phases[name].device_bytes)

    @property
    def _process(self) -> Observed | None:
        """The one that ran out of memory; else the fullest."""
        observed = self.outcome.observed
        if self.oom:
            observed = [process for process in observed if process.oom == self.oom]
        return max(observed, key=_reserved_bytes, default=None)

    @property
    def rank(self) -> int | None:
        """The rank that ran out of memory; else the fullest. None where no Python was watched."""
        return (self._process.rank or 0) if self._process else None

    @property
    def history(self) -> ProcessMemory | None:
        """Of that process; None where it wrote none."""
        return self.outcome.histories.get(self._process.pid) if self._process else None

    @property
    def live(self) -> LiveMemory | None:
        """Whose memory it was at the error, or at the peak."""
        history = self.history
        return history.live if history and (self.rehearsal.events or self.oom) else None

    @property
    def where(self) -> Frame | None:
        """The line of the user's own code that asked for what could not be had."""
        return program_frame(self.oom.frames) if self.oom else None

    def to_json(self) -> dict[str, Any]:
        """The object that docs/rehearsal.md describes."""
        rehearsal, outcome = self.rehearsal, self.outcome
        return {
            "command": list(rehearsal.command),
            "machine": {"gpu": rehearsal.card.name, "gpus": rehearsal.gpus, "host_ram": rehearsal.host_ram},
            "torch": self.torch,
            "verdict": self.verdict,
            "limit": self.limit,
            "phase": self.phase,
            "step": self.oom.step if self.oom else None,
            "rank": self.rank,
            "moment": self.oom.moment if self.oom else None,
            "where": self.where.to_json() if self.where else None,
            "stack": [frame.to_json() for frame in self.oom.frames] if self.oom else [],
            "live": self.live.to_json() if self.live else None,
            "short_of_bytes": self.short_of_bytes,
            "steps": self.steps,
            "ranks": [rank.to_json() for rank in self.ranks],
            "allocated_bytes": max((rank.allocated_bytes for rank in self.ranks), default=0),
            "reserved_bytes": max((rank.reserved_bytes for rank in self.ranks), default=0),
            "device_bytes": self.device_bytes,
            "estimated_bytes": self.outside_bytes,
            "host_ram_bytes": outcome.host_bytes,
            "pinned_bytes": outcome.pinned_bytes,
            "budget_bytes": rehearsal.card.allocatable_bytes,
            "rehearsal_seconds": round(outcome.seconds, 1),
            "basis": "rehearsed",
            "assumptions": list(self.assumptions),
        }


def answer_of(rehearsal: Rehearsal, outcome: RehearsalOutcome, interpreter: Interpreter) -> RehearsalAnswer:
    """Judge how a run went.

    Raises VplanError for what could not be rehearsed (exit code 1), and for a command that failed for another reason
    than memory, took too long, or took more RAM than this machine has to spare (4).
    """
    _check_refusals(outcome.observed)
    oom, short_of = _failure(outcome)
    over_host = outcome.ending == "host-ram"
    if not (oom or short_of or over_host):
        _check_ending(rehearsal, outcome)
    ranks = tuple(_ranks(outcome))
    verdict: Verdict = "no" if oom or short_of or over_host else "tight" if _is_tight(rehearsal, ranks) else "fits"
    return RehearsalAnswer(
        rehearsal=rehearsal,
        outcome=outcome,
        torch=interpreter.torch,
        verdict=verdict,
        limit=None if verdict != "no" else "host" if over_host else "gpu",
        oom=oom,
        short_of_bytes=oom.requested_bytes if oom else short_of,
        ranks=ranks,
        assumptions=tuple(_notes(rehearsal, outcome, ranks, failed=verdict == "no")),
    )


def _check_refusals(observed: Iterable[Observed]) -> None:
    for process in observed:
        if refused := process.refused:
            frame = program_frame(refused.frames)
            place = f" ({frame.file}:{frame.line})" if frame else ""
            raise VplanError(f"a rehearsal cannot run {refused.what}{place}", refused.fix)


def _failure(outcome: RehearsalOutcome) -> tuple[OutOfMemory | None, int]:
    """The allocation that ended the run, if one did. A program may catch the error and go on: then it is none."""
    if outcome.ending in ("done", "steps", "host-ram", "machine-ram"):
        return None, 0
    ooms = [process.oom for process in outcome.observed if process.oom]
    if ooms:
        return ooms[0], ooms[0].requested_bytes
    watched = {process.pid for process in outcome.observed}
    short_of = [holder.short_of_bytes for holder in outcome.table.holders if holder.pid not in watched]
    return None, max(short_of, default=0)


def _check_ending(rehearsal: Rehearsal, outcome: RehearsalOutcome) -> None:
    """A VplanError for a run that says nothing."""
    steps = max((process.steps for process in outcome.observed), default=0)
    if outcome.ending == "failed":
        last = _last_words(outcome.log)
        fix = f"its output: {outcome.kept_log}"
        if "small_values.py" in outcome.log:
            fix = f"try --no-values, for it failed while small tensors were computed; {fix}"
        raise VplanError(f"the command failed with exit code {outcome.exit_code}: {last[:200]}", fix, 4)
    if outcome.ending == "time":
        done = f"{steps} of {rehearsal.steps} steps" if rehearsal.steps else plural(steps, "step")
        fix = f"pass a larger --time-limit, or smaller data; its output: {outcome.kept_log}"
        raise VplanError(f"stopped after {rehearsal.time_limit:.0f} s with {done} done", fix, 4)
    if outcome.ending == "machine-ram":
        fix = "close other programs, or rehearse it on a machine with more RAM"
        raise VplanError(f"stopped: it took {format_gib(outcome.held_bytes)} of this machine's RAM", fix, 4)


LAUNCHER_ERROR = re.compile(
    r"^(subprocess\.CalledProcessError|torch\.distributed\.elastic\S*\.ChildFailedError)\b", re.MULTILINE
)
"""What ``accelerate launch`` and ``torchrun`` raise when the program that they started has failed."""


def _last_words(log: str) -> str:
    """The last line of a program's output, without the traceback of the launcher that started it."""
    if raised := LAUNCHER_ERROR.search(log):
        log = log[: raised.start()].rpartition("Traceback (most recent call last):")[0] or log
    return next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "no output")


def _ranks(outcome: RehearsalOutcome) -> Iterator[RankPeaks]:
    """Each process on each card that it used. Its devices are the cards that it held, in the same order."""
    holders = {holder.pid: holder for holder in outcome.table.holders}
    for process in outcome.observed:
        holder = holders.get(process.pid)
        devices = sorted({device for peaks in process.phases.values() for device in peaks if _used(process, device)})
        cards = [card for card, peak in enumerate(holder.peaks) if peak] if holder else []
        for device, card in zip(devices, cards, strict=False):
            assert holder is not None
            yield _rank(process, device, holder.peaks[card], holder.outside[card])
    watched = {process.pid for process in outcome.observed}
    for holder in outcome.table.holders:
        if holder.pid not in watched:
            yield from _unwatched(holder)


def _reserved_bytes(process: Observed) -> int:
    """The highest of all phases and cards."""
    return max((own["reserved"] for devices in process.phases.values() for own in devices.values()), default=0)


def _used(process: Observed, device: int) -> bool:
    return any(peaks.get(device, {}).get("reserved", 0) for peaks in process.phases.values())


def _rank(process: Observed, device: int, device_peak: int, outside: int) -> RankPeaks:
    own = {name: process.phases[name][device] for name in PHASES if device in process.phases.get(name, {})}
    phases = {
        name: PhasePeak(
            allocated_bytes=peaks["allocated"],
            reserved_bytes=peaks["reserved"],
            device_bytes=peaks["reserved"] + outside,
        )
        for name, peaks in own.items()
    }
    return RankPeaks(process.rank or 0, device, phases, device_peak, outside, process.retries)


def _unwatched(holder: Holder) -> Iterator[RankPeaks]:
    """A process whose Python was not watched, or that is none: only its cards are known."""
    for card, peak in enumerate(holder.peaks):
        if peak:
            yield RankPeaks(0, card, {}, peak, holder.outside[card], 0)


def _is_tight(rehearsal: Rehearsal, ranks: Iterable[RankPeaks]) -> bool:
    """It ran, but torch had to give its cache back, or less was left than what is only estimated."""
    budget = rehearsal.card.allocatable_bytes
    return any(rank.retries or budget - rank.device_bytes < rank.outside_bytes for rank in ranks)


def _notes(
    rehearsal: Rehearsal, outcome: RehearsalOutcome, ranks: tuple[RankPeaks, ...], failed: bool
) -> Iterator[str]:
    """What the numbers rest on, and what is not true in them."""
    steps = max((process.steps for process in outcome.observed), default=0)
    if not ranks and not failed:
        yield "the command never used the GPU"
    unwatched = any(not rank.phases for rank in ranks)
    if unwatched:
        yield "only device is known of a program that replaces PYTHONPATH, or runs python -I or -S: no step was counted"
    if outcome.ending == "steps":
        yield f"ended after {plural(steps, 'optimizer step')}: what comes later (validation, checkpoints) did not run"
    elif outcome.ending == "done" and steps < rehearsal.steps and not unwatched:
        yield f"the command ended by itself after {plural(steps, 'optimizer step')}"
    estimated = max((rank.outside_bytes for rank in ranks), default=0)
    if estimated:
        parts = "context and NCCL" if rehearsal.gpus > 1 else "CUDA context"
        yield f"device includes {format_gib(estimated)} of {parts}, estimated from the card's facts"
        yield "cuDNN's workspaces are not counted"
    if rehearsal.hollow:
        names = ", ".join(request.text for request in rehearsal.hollow)
        yield f"hollow weights (zeros; tokenizers split into letters): {names}"
    if rehearsal.data:
        yield f"hollow data: {rehearsal.data}"
    copies = sum(process.hollow_bytes for process in outcome.observed)
    if copies:
        yield f"host RAM includes {format_gib(copies)} of weights and states on the CPU, counted and not made"
    yield from _notes_on_values(rehearsal, outcome)
    unwritten = max((holder.unwritten_bytes for holder in outcome.table.holders), default=0)
    if unwritten > GIB:
        yield f"host RAM may be higher: {format_gib(unwritten)} copied to it from the GPU was not written"
    retries = sum(rank.retries for rank in ranks)
    if retries and not failed:
        yield f"PyTorch emptied its cache {plural(retries, 'time')} because memory was short, which costs time"
    ooms = sum(process.ooms for process in outcome.observed)
    if ooms and not failed:
        yield f"the program ran out of memory {plural(ooms, 'time')} and went on"
    if not rehearsal.network and not outcome.sandbox.get("network"):
        yield "the network was not shut off: this system does not allow it"


def _notes_on_values(rehearsal: Rehearsal, outcome: RehearsalOutcome) -> Iterator[str]:
    reads = {place: count for process in outcome.observed for place, count in process.reads.items()}
    if reads:
        shown = ", ".join(list(reads)[:3]) + (f" and {plural(len(reads) - 3, 'more place')}" if len(reads) > 3 else "")
        what = "values that depend on large tensors" if rehearsal.values else "values on the GPU"
        yield f"{what} are not computed; the program read some, and may decide otherwise by them: {shown}"
