"""Finds out why an estimate is off: compares a tape's events with those that torch's allocator recorded on a GPU.

`vplan probe PLAN --record-history FILE` writes the latter as JSON, from `torch.cuda.memory._snapshot()` in the probe's
process, so that no pickle has to be read. An entry of `device_traces` has `action`, `addr`, `size`, `stream` and
`frames` (torch/cuda/memory.py, TraceEntry, the same in 2.11 and 2.13); `size` is the requested size, before rounding
(c10/cuda/CUDACachingAllocator.cpp, record_trace in alloc_found_block and free_block).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from planner.catalog.shapes import grids
from planner.errors import VplanError, quoted
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.layout.run import Run
from planner.spec.plan import Plan
from planner.tape.levels import whole_blocks
from planner.tape.program import Moment
from planner.units import MIB
from planner.untrusted import read_bytes

LARGEST_BYTES = 1 << 30
"""Limit on a history's file: some ten million events."""

LEAST_BYTES = MIB
"""Smaller events are left out: a real step has scalars and seeds that do not affect peaks."""

WINDOW = 64
"""How many events of either side may be skipped to align the two histories again."""

AGREED = 6
"""How many equal events in a row mean that they are aligned."""

MOST = 20
"""How many differences of a phase are reported."""

ACTIONS = {"alloc": "alloc", "free_completed": "free"}
"""torch's action -> the tape's. `free_requested` is left out: another stream may still use the memory then."""


class AllocatorEvent(NamedTuple):
    """One allocation or free, on the tape or in the GPU's history, with its size in bytes."""

    kind: str
    nbytes: int
    """rounded like in the allocator"""
    where: str
    """on the tape: pass, module, category and operator; in a run: the innermost line of Python"""


class Difference(NamedTuple):
    """One place where the tape and the GPU's history disagree, with the events of both sides."""

    at: int
    """index among the tape's events of that phase"""
    what: str
    """``size``, ``missing`` (only in the run), ``extra`` (only on the tape), ``order`` or ``other``"""
    tape: tuple[AllocatorEvent, ...]
    run: tuple[AllocatorEvent, ...]
    module: str
    """the place in the model"""

    def to_json(self) -> dict[str, Any]:
        """The difference as plain JSON values."""
        sides = {side: [event._asdict() for event in getattr(self, side)] for side in ("tape", "run")}
        return {"at": self.at, "what": self.what, "module": self.module, **sides}


@dataclass(frozen=True)
class PhaseComparison:
    """The comparison of one phase: how many events agree, and where the sides differ."""

    phase: str
    events: int
    tape_events: int
    peak_bytes: int
    """peak of the bytes that the phase's own events allocate"""
    tape_peak_bytes: int
    differences: tuple[Difference, ...]
    parted: bool
    """whether the two could not be aligned again after the last difference"""


@dataclass(frozen=True)
class History:
    """The recorded history of a GPU's allocator in a probe, with the plan that was probed."""

    plan: Plan
    torch: str
    gpu: str
    phases: tuple[tuple[str, int], ...]
    """(name, index of its first event)"""
    events: list[list[Any]]
    frames: tuple[str, ...]

    def of(self, phase: str, least: int) -> list[AllocatorEvent]:
        """The events of a phase of at least `least` bytes, in order."""
        starts = [start for _, start in self.phases] + [len(self.events)]
        events = []
        for index, (name, start) in enumerate(self.phases):
            if name == phase:
                events += [
                    event for row in self.events[start : starts[index + 1]] if (event := self._event(row, least))
                ]
        return events

    def _event(self, row: list[Any], least: int) -> AllocatorEvent | None:
        action, _, size, _, *frame = row
        nbytes = whole_blocks(size)
        if action not in ACTIONS or nbytes < least:
            return None
        has_frame = bool(frame) and 0 <= frame[0] < len(self.frames)
        return AllocatorEvent(ACTIONS[action], nbytes, self.frames[frame[0]] if has_frame else "")


def read_history(path: str | Path) -> History:
    """The history in a file that a probe wrote. Raises a VplanError that names the file and what is wrong with it."""
    path = Path(path)
    fix = "write it with `vplan probe PLAN.toml --record-history FILE`"
    try:
        data = json.loads(read_bytes(path, LARGEST_BYTES))
    except OSError as error:
        raise VplanError(f"cannot read {quoted(str(path))}: {error.strerror}", fix) from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise VplanError(f"{path.name} is not JSON", fix) from None
    except ValueError as error:
        raise VplanError(f"cannot read {quoted(str(path))}: {error}", fix) from None
    if not isinstance(data, dict) or not _is_whole(data):
        raise VplanError(f"{path.name} is not a probe's history, or an older vplan wrote it without its plan", fix)
    plan = Plan.read({"schema": 1, **data["plan"]}, path.name)
    phases = tuple((str(name), int(start)) for name, start in data["phases"])
    return History(plan, data["torch"], data["gpu"], phases, data["events"], tuple(data["frames"]))


def _is_whole(data: Mapping[str, Any]) -> bool:
    lists = all(isinstance(data.get(name), list) for name in ("phases", "events", "frames"))
    of_a_run = (
        isinstance(data.get("plan"), dict) and isinstance(data.get("torch"), str) and isinstance(data.get("gpu"), str)
    )
    return (
        lists
        and of_a_run
        and all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], int) for pair in data["phases"])
        and all(isinstance(frame, str) for frame in data["frames"])
        and all(
            isinstance(row, list) and len(row) >= 4 and isinstance(row[0], str) and all(map(_is_whole_number, row[1:]))
            for row in data["events"]
        )
    )


def _is_whole_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# ---- the tape's side


def probed_run(plan: Plan) -> Run:
    """The run of a plan at its largest shape, the one that a probe measures."""
    configuration = plan.configuration
    facts = load_facts(configuration)
    largest = max(grids(facts.model, plan.job), key=lambda at: at["B"] * (at["F"] * at["H"] * at["W"] + at["T"]))
    return lay_out(configuration, facts, largest)


def on_tape(run: Run, least: int = 0) -> dict[str, list[AllocatorEvent]]:
    """The allocations and frees of at least `least` bytes of a run, by phase."""
    by_phase: dict[str, list[AllocatorEvent]] = {}
    for phase, stage in run.stages:
        events = by_phase.setdefault(phase, [])
        for moment, ops in stage.stretches:
            for op in ops:
                buffer = op if op >= 0 else ~op
                nbytes = whole_blocks(run.sizes[buffer])
                if nbytes >= max(least, 1):
                    events.append(AllocatorEvent("alloc" if op >= 0 else "free", nbytes, _where(moment, run, buffer)))
    return by_phase


def _where(moment: Moment, run: Run, buffer: int) -> str:
    block = f" of {moment.module_list}.{moment.block}" if moment.block >= 0 else " outside the blocks"
    what = f"{run.program.category[buffer]}, {run.program.op[buffer]}".rstrip(", ")
    return f"{moment.passes}{block}: {what}" if moment.passes else what


# ---- both sides


def compare(history: History, least: int = LEAST_BYTES) -> Iterator[PhaseComparison]:
    """Compares every phase that both the plan's tape and the GPU's history have, in execution order, without events
    below ``least`` bytes."""
    tape = on_tape(probed_run(history.plan), least)
    for phase in dict.fromkeys(name for name, _ in history.phases):
        if phase in tape:
            yield compare_phase(phase, tape[phase], history.of(phase, least))


def in_order(events: Iterable[AllocatorEvent]) -> list[AllocatorEvent]:
    """The same events, with consecutive frees sorted from the largest to the smallest, because their order does not
    matter: Python frees the locals of a function in the order of their slots, with no allocation in between."""
    ordered: list[AllocatorEvent] = []
    for kind, group in itertools.groupby(events, key=lambda event: event.kind):
        together = list(group)
        ordered += together if kind == "alloc" else sorted(together, key=lambda event: -event.nbytes)
    return ordered


def compare_phase(
    phase: str, tape: Sequence[AllocatorEvent], run: Sequence[AllocatorEvent], most: int = MOST
) -> PhaseComparison:
    """Aligns the events of one phase of both sides by kind and size, and lists up to ``most`` differences. The order of
    consecutive frees does not matter."""
    tape, run = in_order(tape), in_order(run)
    differences: list[Difference] = []
    one = other = 0
    parted = False
    while one < len(tape) or other < len(run):
        if one < len(tape) and other < len(run) and _alike(tape[one], run[other]):
            one, other = one + 1, other + 1
            continue
        skipped = _together(tape, run, one, other)
        parted = skipped is None
        more, others = skipped or (1, 1)
        sides = tuple(tape[one : one + more]), tuple(run[other : other + others])
        differences.append(Difference(one, _what(*sides), *sides, _module(tape, one)))
        if parted or len(differences) == most:
            break
        one, other = one + more, other + others
    return PhaseComparison(phase, len(run), len(tape), _peak(run), _peak(tape), tuple(differences), parted)


def _alike(one: AllocatorEvent, other: AllocatorEvent) -> bool:
    return one.kind == other.kind and one.nbytes == other.nbytes


def _together(
    tape: Sequence[AllocatorEvent], run: Sequence[AllocatorEvent], one: int, other: int
) -> tuple[int, int] | None:
    """The least numbers of events to skip on either side so that the following events agree; None if there are none.

    Both sides may also end there.
    """
    for more in range(1, 2 * WINDOW + 1):
        # Prefer a changed event to events missing on one side: it explains as much with a single cause.
        for first in sorted(range(more + 1), key=lambda count: abs(2 * count - more)):
            at, beside = one + first, other + more - first
            if first > WINDOW or more - first > WINDOW or at > len(tape) or beside > len(run):
                continue
            ends = min(len(tape) - at, len(run) - beside)
            same_rest = ends < AGREED and len(tape) - at == len(run) - beside
            pairs = zip(tape[at : at + AGREED], run[beside : beside + AGREED], strict=False)
            if (ends >= AGREED or same_rest) and all(_alike(*pair) for pair in pairs):
                return first, more - first
    return None


def _what(tape: Sequence[AllocatorEvent], run: Sequence[AllocatorEvent]) -> str:
    if not tape or not run:
        return "missing" if not tape else "extra"
    if len(tape) == len(run) == 1 and tape[0].kind == run[0].kind:
        return "size"
    same = sorted(event[:2] for event in tape) == sorted(event[:2] for event in run)
    return "order" if same else "other"


def _module(tape: Sequence[AllocatorEvent], at: int) -> str:
    """The place in the model of one of the tape's events, or of its last one."""
    return tape[min(at, len(tape) - 1)].where if tape else ""


def _peak(events: Sequence[AllocatorEvent]) -> int:
    held = highest = 0
    for event in events:
        held += event.nbytes if event.kind == "alloc" else -event.nbytes
        highest = max(highest, held)
    return highest
