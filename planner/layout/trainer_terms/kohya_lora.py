"""Adapters as sd-scripts and musubi-tuner write them, where recordings have peft's.

peft casts each layer's input to the adapter's fp32 (peft tuners/lora/layer.py ``_cast_input_dtype``), and autocast
casts it back for the product, which keeps that copy for backward: one for every adapted layer. A ``LoRAModule`` gives
its input to ``lora_down`` as it is (sd-scripts networks/lora_flux.py:124, musubi-tuner networks/lora.py:116
``forward``), so under autocast it keeps the layer's own input, once for all layers that share it.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import NamedTuple

from planner.layout.run import Run
from planner.tape.program import Stage

CAST = "_to_copy"
COMPUTED = frozenset({"addmm", "mm", "add", "mul"})
"""Operators of a layer and its adapter: their results are no input of the adapter."""

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
    position: int
    """behind both"""


def _uncast(run: Run, stage: Stage) -> None:
    freed: dict[int, Place] = {
        ~event: (at, position)
        for at, (_, events) in enumerate(stage.stretches)
        for position, event in enumerate(events)
        if event < 0
    }
    gone: set[int] = set()
    stays: dict[int, int] = {}
    """input -> the copy with whose free it goes now"""
    casts = {buffer for buffer, op in enumerate(run.program.op) if op == CAST} & freed.keys()
    for moment, events in stage.stretches:
        for pair in _pairs(run, events, casts) if moment.block >= 0 else ():
            half = freed.get(pair.half)
            if _is_gradient(run, events, pair):
                gone.add(pair.wide)
            elif (again := _cast_again(run, events, pair, freed)) is not None:
                gone |= {pair.wide, pair.half, again}
            else:
                gone.add(pair.wide)
                source = _input(run, events, pair, gone)
                if source is None or half is None or source not in freed:
                    continue
                gone.add(pair.half)
                last = freed[stays.get(source, source)]
                if half > last:
                    stays[source] = pair.half
    ends = {half: source for source, half in stays.items()}
    changed = gone | stays.keys() | ends.keys()
    changed |= {~buffer for buffer in changed}
    for at, (moment, events) in enumerate(stage.stretches):
        if changed.isdisjoint(events):
            continue
        kept = []
        for event in events:
            buffer = event if event >= 0 else ~event
            if event < 0 and buffer in ends:
                kept.append(~ends[buffer])
            elif buffer not in gone and not (event < 0 and buffer in stays):
                kept.append(event)
        stage.stretches[at] = (moment, kept)


def _pairs(run: Run, events: list[int], casts: Set[int]) -> list[_Pair]:
    """Every fp32 copy whose next large neighbour is its own copy in 16 bits; a gradient, which stays, is none.
    ``casts``: the copies that are freed."""
    sizes = run.sizes
    found = []
    for position in [at for at, event in enumerate(events) if event in casts]:
        event = events[position]
        for behind, other in enumerate(events[position + 1 : position + 5], start=position + 1):
            if other >= 0 and 2 * sizes[other] >= sizes[event]:
                if other in casts and 2 * sizes[other] == sizes[event]:
                    found.append(_Pair(event, other, behind + 1))
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


def _cast_again(run: Run, events: list[int], pair: _Pair, freed: Mapping[int, Place]) -> int | None:
    """The second copy in 16 bits of the same fp32 tensor: what attention gives in fp32 is cast for its output layer and
    for that one's adapter. It gives what it was given, 16 bits, where queries are turned in place."""
    for event in events[pair.position :]:
        if event == ~pair.wide:
            return None
        if event in freed and run.program.op[event] == CAST and run.sizes[event] == run.sizes[pair.half]:
            return event  # not a gradient of an adapter, which may be as large
    return None


def _input(run: Run, events: list[int], pair: _Pair, gone: set[int]) -> int | None:
    """The tensor that was cast: the last of its size that is no layer's result, no copy of this kind and no weight."""
    category = run.program.category
    for event in reversed(events[: events.index(pair.wide)]):
        alike = event >= 0 and run.sizes[event] == run.sizes[pair.half]
        if alike and event not in gone and run.program.op[event] not in COMPUTED and category[event] != "weight":
            return event
    return None
