"""Adapters as sd-scripts and musubi-tuner write them, where recordings have peft's.

peft casts each layer's input to the adapter's fp32 (peft tuners/lora/layer.py ``_cast_input_dtype``), and autocast
casts it back for the product, which keeps that copy for backward: one for every adapted layer. A ``LoRAModule`` gives
its input to ``lora_down`` as it is (sd-scripts networks/lora_flux.py:124, musubi-tuner networks/lora.py:116
``forward``), so under autocast it keeps the layer's own input, once for all layers that share it.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from planner.garbage_collection import recording_cache
from planner.layout.adapters import OUTPUT, SCALED_OUTPUT
from planner.layout.checkpoints.recomputation import CAST
from planner.layout.run import Run
from planner.tape.program import Moment, Stage

COMPUTED = frozenset({"addmm", "mm", "add", "mul", OUTPUT, SCALED_OUTPUT})
"""Operators of a layer and its adapter, and what is added for adapters that are not recorded: their results are no
input of the adapter."""

Stretches = list[tuple[Moment, list[int]]]
Place = tuple[int, int]
"""(stretch, position in it)"""


def inputs_as_they_are(run: Run) -> None:
    """The copies of adapters' inputs go, and the inputs stay as long as those would have."""
    strategy = run.strategy
    if run.job.method != "lora" or strategy.adapter_dtype != "fp32" or strategy.autocast == "none":
        return
    if run.in_own_code:
        return
    for stage in filter(None, (run.first_step, run.step, run.accumulate)):
        _uncast(run, stage)


class _Pair(NamedTuple):
    """An fp32 copy of a tensor and the copy of that in 16 bits, as they come."""

    wide: int
    half: int
    start: int
    """position of the first"""
    position: int
    """behind both"""


class _Events(NamedTuple):
    """Where a list of events frees what, and makes copies."""

    frees: dict[int, int]
    """buffer -> position"""
    leaving: dict[int, int]
    """the same of what was made elsewhere"""
    casts: list[int]
    """positions at which copies are made"""


class _List:
    """A list of events with the set of buffers that are copies, as a cache key: compared by identity, because stages
    share their lists."""

    def __init__(self, events: list[int], copies: Container[int]) -> None:
        self.events = events
        self.copies = copies

    def __hash__(self) -> int:
        return id(self.events)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _List) and self.events is other.events


@recording_cache(maxsize=1024)
def _of_events(these: _List) -> _Events:
    """Strategies, and shapes, of one recording have most of their lists in common."""
    events = these.events
    frees = {~event: position for position, event in enumerate(events) if event < 0}
    made = {event for event in events if event >= 0}
    leaving = {buffer: position for buffer, position in frees.items() if buffer not in made}
    return _Events(frees, leaving, [at for at, event in enumerate(events) if event in these.copies])


class _Shape:
    """The buffer sizes of a run, as a cache key: equal for the same recording and shape, unless a strategy resized
    buffers."""

    def __init__(self, run: Run) -> None:
        self.sizes = run.sizes
        self._of = run if run.resized else run.recording
        self._grid = tuple(run.grid.values())

    def __hash__(self) -> int:
        return hash((id(self._of), self._grid))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Shape) and self._of is other._of and self._grid == other._grid


class _Freed:
    """Where the buffers of a stage are freed."""

    def __init__(self, lists: list[_Events]) -> None:
        self.lists = lists
        self.leaving = {buffer: (at, place) for at, one in enumerate(lists) for buffer, place in one.leaving.items()}

    def of(self, at: int, buffer: int) -> Place | None:
        """The place that frees a buffer which the ``at``-th stretch makes; None where it stays."""
        own = self.lists[at].frees.get(buffer)
        return self.leaving.get(buffer) if own is None else (at, own)


def _copies(run: Run) -> frozenset[int]:
    """The recorded buffers that are copies of others in another format; transformations add none."""
    return frozenset(buffer for buffer, operator in enumerate(run.program.op) if operator == CAST)


def _uncast(run: Run, stage: Stage) -> None:
    """Takes the copies of adapters' inputs out of a stage. Of each pair of copies (fp32, and 16 bits again) one of four
    things is true: it stays, as copies of gradients do that nothing frees; it carries a gradient back, and the fp32 one
    goes; the same fp32 tensor is cast once more, and all three go; or it is an adapter's input, and both go (the
    fp32 one alone where that input is not found), while the tensor they were made of stays until the later of its own
    end and the copy's."""
    stretches = stage.stretches
    copies, shape = run.shared(_copies), _Shape(run)
    event_lists = [_List(events, copies) for _, events in stretches]
    freed = _Freed(list(map(_of_events, event_lists)))
    gone: dict[int, int] = {}
    """copy -> the stretch that makes it"""
    stays: dict[int, tuple[int, int]] = {}
    """input -> the stretch that makes it, and the copy with whose free it goes now"""
    for at, (moment, events) in enumerate(stretches):
        for pair in _pairs(event_lists[at], shape) if moment.block >= 0 else ():
            half = freed.of(at, pair.half)
            if half is None or freed.of(at, pair.wide) is None:  # a gradient, which stays
                continue
            if _is_gradient(run, events, pair):
                gone[pair.wide] = at
            elif (again := _cast_again(run, events, pair, freed, at)) is not None:
                gone |= dict.fromkeys((pair.wide, pair.half, again), at)
            else:
                gone[pair.wide] = at
                source = _input(run, events, pair, gone)
                if source is None or (last := freed.of(at, source)) is None:
                    continue
                gone[pair.half] = at
                if source in stays:
                    last = freed.of(at, stays[source][1])
                if last is not None and half > last:
                    stays[source] = at, pair.half
    stage.stretches = _without(stretches, freed, gone, stays)


def _without(stretches: Stretches, freed: _Freed, gone: dict[int, int], stays: dict[int, tuple[int, int]]) -> Stretches:
    """The stretches without copies that are gone, and in which inputs go with the free of a copy, as ``stays`` says."""
    changes: dict[int, dict[int, list[int]]] = {}
    """stretch -> position -> what comes there instead"""
    for at in set(gone.values()):
        events = stretches[at][1]
        changes[at] = {place: [] for place in freed.lists[at].casts if gone.get(events[place]) == at}
    frees = [(at, copy, list[int]()) for copy, at in gone.items()]
    frees += [(at, source, []) for source, (at, _) in stays.items()]
    frees += [(at, copy, [~source]) for source, (at, copy) in stays.items()]
    for made_at, buffer, instead in frees:
        if place := freed.of(made_at, buffer):
            changes.setdefault(place[0], {})[place[1]] = instead
    changed = stretches.copy()
    for at, there in changes.items():
        moment, events = stretches[at]
        kept: list[int] = []
        start = 0
        for position, instead in sorted(there.items()):
            kept += events[start:position]
            kept += instead
            start = position + 1
        changed[at] = (moment, kept + events[start:])
    return changed


@recording_cache(maxsize=4096)
def _pairs(these: _List, shape: _Shape) -> list[_Pair]:
    """Every fp32 copy whose next large neighbour is its own copy in 16 bits."""
    events, sizes = these.events, shape.sizes
    found = []
    for position in _of_events(these).casts:
        event = events[position]
        for behind, other in enumerate(events[position + 1 : position + 5], start=position + 1):
            if other >= 0 and 2 * sizes[other] >= sizes[event]:
                if other in these.copies and 2 * sizes[other] == sizes[event]:
                    found.append(_Pair(event, other, position, behind + 1))
                break
    return found


def _is_gradient(run: Run, events: list[int], pair: _Pair) -> bool:
    """Whether the fp32 copy goes at once: a gradient on its way back through the casts."""
    for event in events[pair.position :]:
        if event == ~pair.wide:
            return True
        if event >= 0 and run.sizes[event] >= run.sizes[pair.half]:
            return False
    return False


def _cast_again(run: Run, events: list[int], pair: _Pair, freed: _Freed, at: int) -> int | None:
    """The second copy in 16 bits of the same fp32 tensor: what attention gives in fp32 is cast for its output layer and
    for that one's adapter, in the ``at``-th stretch. It gives what it was given, 16 bits, where queries are turned in
    place."""
    for event in events[pair.position :]:
        if event == ~pair.wide:
            return None
        if event < 0 or run.program.op[event] != CAST or run.sizes[event] != run.sizes[pair.half]:
            continue
        if freed.of(at, event):
            return event  # not a gradient of an adapter, which may be as large
    return None


def _input(run: Run, events: list[int], pair: _Pair, gone: Container[int]) -> int | None:
    """The tensor that was cast: the last of its size that is no layer's result, no copy of this kind and no weight."""
    category, operators, sizes, size = run.program.category, run.program.op, run.sizes, run.sizes[pair.half]
    for position in range(pair.start - 1, -1, -1):
        event = events[position]
        alike = event >= 0 and sizes[event] == size
        if alike and event not in gone and operators[event] not in COMPUTED and category[event] != "weight":
            return event
    return None
