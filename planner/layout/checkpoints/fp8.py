"""Checkpoints in 8 bits, as a transformation of a Run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from planner.errors import NotEstimatedError
from planner.layout.checkpoints.block_inputs import block_inputs
from planner.layout.checkpoints.recomputation import (
    Recomputations,
    alike_stretches,
    at_stretch,
    forward_events,
    recomputations,
)
from planner.layout.run import STRATEGY_MOMENT, Run
from planner.tape.format import Monomial, Tape
from planner.tape.program import Block, Moment, frees

NUMBER_BYTES = (2, 4)
"""Of what blocks hand on."""

KERNEL_BYTES = {2: 13 + 11, 4: 25 + 21}
"""What the kernels read and write for each number, of 2 bytes and of 4. The norm reads it, the quotient reads and
writes one, a product does so in place, the cast reads that and writes one byte. The way back reads the byte and writes
the number, which a quotient and a product read and write in place."""


Inputs = tuple[tuple[Block, tuple[int, ...]], ...]
"""Block -> the buffers of its inputs that are rounded."""


class _Woven(NamedTuple):
    """A step with 8-bit checkpoints, whatever the shape."""

    stretches: list[tuple[Moment, list[int]]]
    rounded: list[int]
    """the inputs, in order; each has three new buffers, numbered on from those of the run: the largest number of each
    token, the quotient, and the values in 8 bits"""


def fp8_checkpoints(run: Run) -> None:
    """A checkpointed block's input is rounded to 8 bits, beside the largest number of each token, before the block
    runs, and goes with the block. It comes back when the block is recomputed and goes with that; what is rounded goes
    where the input itself would, behind the block's backward (trainers/memory/fp8_inputs.py).
    """
    if run.strategy.gradient_checkpointing != "fp8":
        return
    inputs, width, number = _rounded_inputs(run), _width(run), _number_bytes(run)
    if run.step.stretches == run.recording.step.stretches and not run.resized:
        found = run.shared_at_shape(_recomputations)
        woven = run.shared(_woven_recording, inputs, found, len(run.sizes))
    else:
        alike = alike_stretches(run)
        woven = _woven(run, alike, inputs, recomputations(run, alike, forward_events(run)), len(run.sizes))
    for buffer in woven.rounded:
        nbytes = run.sizes[buffer]
        run.new(nbytes // width, "activation", "checkpoint tokens")
        run.new(nbytes, "temporary", "checkpoint quotient")
        run.new(nbytes // number, "activation", "checkpoint in 8 bits")
        run.work.backward_bytes += KERNEL_BYTES[number] * (nbytes // number)
    run.step.stretches = woven.stretches.copy()


def _recomputations(run: Run) -> Recomputations:
    return recomputations(run, run.shared(alike_stretches), run.shared(forward_events))


def _woven_recording(recording: Run, inputs: Inputs, recomputations: Recomputations, first_new: int) -> _Woven:
    return _woven(recording, recording.shared(alike_stretches), inputs, recomputations, first_new)


def _woven(run: Run, alike: dict[int, int], inputs: Inputs, recomputations: Recomputations, first_new: int) -> _Woven:
    """The step with each block's inputs rounded before its forward, and back before it is recomputed. ``alike``,
    ``recomputations``: as `alike_stretches` and `recomputations` say them; ``first_new``: the number of the first new
    buffer."""
    by_block = dict(inputs)
    over = {(moment.module_list, moment.block): at for at, (moment, _) in enumerate(run.step.stretches)}
    kept: dict[int, list[int]] = {}
    brought: set[Block] = set()
    freed: set[Block] = set()
    woven: list[tuple[Moment, list[int]]] = []
    for at, (moment, events) in enumerate(run.step.stretches):
        block = (moment.module_list, moment.block)
        given = by_block.get(block, ())
        if given and moment.passes == "forward" and given[0] not in kept:
            woven.append((STRATEGY_MOMENT._replace(passes="checkpoint"), _rounding(given, kept, first_new)))
            events = [*events, *(~buffer for buffer in given)]
        elif given and moment.passes == "backward":
            begins, ends = at_stretch(recomputations[alike[at]], len(events), at == over[block])
            coming = () if block in brought else given
            brought.add(block)
            going: list[int] = []
            if ends is not None and block not in freed:
                going = frees(given)
                freed.add(block)
            events = _recomputed(events, kept, (begins, coming), (ends or 0, going))
        woven.append((moment, events))
    return _Woven(woven, [*kept])


def _rounded_inputs(run: Run) -> Inputs:
    """What blocks compute of that which checkpoints keep: tables have another width than the model."""
    width = _width(run)
    computed = (
        (block, tuple(buffer for buffer in given if run.sizes[buffer] % width == 0))
        for block, given in block_inputs(run).items()
    )
    return tuple((block, given) for block, given in computed if given)


def _rounding(given: Sequence[int], kept: dict[int, list[int]], first_new: int) -> list[int]:
    """The events that round a block's inputs; what stays of each goes into ``kept``."""
    events: list[int] = []
    for buffer in given:
        largest = first_new + 3 * len(kept)
        quotient, values = largest + 1, largest + 2
        events += [largest, quotient, values, ~quotient]
        kept[buffer] = [values, largest]
    return events


def _recomputed(
    events: list[int],
    kept: Mapping[int, list[int]],
    begins: tuple[int, Sequence[int]],
    ends: tuple[int, Sequence[int]],
) -> list[int]:
    """A block's backward, in which what is rounded goes in place of the inputs. ``begins``, ``ends``: what else happens
    before which event, the inputs' own frees not counted."""
    places = [at for at, event in enumerate(events) if ~event not in kept]
    made: list[int] = []
    start = 0
    for place, more in (begins, ends):
        stop = places[place] if place < len(places) else len(events)
        made += [*_instead(events[start:stop], kept), *more]
        start = max(start, stop)
    return [*made, *_instead(events[start:], kept)]


def _instead(events: list[int], kept: Mapping[int, list[int]]) -> list[int]:
    """Events with the frees of what is kept of the inputs in place of theirs."""
    return [each for event in events for each in (frees(kept.get(~event, ())) or (event,))]


def _width(run: Run) -> int:
    """Numbers of a token in what blocks hand on. Raises a NotEstimatedError where the model's config does not say."""
    width = run.facts.model.hidden_size
    if width is None:
        fault = f"checkpoints in 8 bits are not estimated for {run.facts.model.title}"
        raise NotEstimatedError(fault, "use --gradient-checkpointing offload")
    return width


def _number_bytes(run: Run) -> int:
    """Bytes of a number in what blocks hand on, by how its size grows with the tokens, or by the clip's tokens where
    the model has one size. Raises a NotEstimatedError where neither gives so many for each of the model's width."""
    width, cells = _width(run), math.prod(run.grid[atom] for atom in "BFHW")
    for buffer in itertools.chain.from_iterable(block_inputs(run).values()):
        size, counted = run.program.sizes[run.program.buffers[buffer]], [(run.sizes[buffer], width * cells)]
        if not isinstance(size, int) and isinstance(size[1], Monomial):
            samples = size[0].regime.get("B", 1)  # those of a tape of one batch are in the coefficient
            counted.insert(0, (size[1].coefficient, width * samples * _tokens_counted_in(*size)))
        for nbytes, numbers in counted:
            if nbytes // numbers in NUMBER_BYTES and not nbytes % numbers:
                return nbytes // numbers
    fault = f"what blocks of {run.facts.model.title} hand on is not {width} numbers a token"
    raise NotEstimatedError(f"{fault}: checkpoints in 8 bits are not estimated", "use --gradient-checkpointing full")


def _tokens_counted_in(tape: Tape, size: Monomial) -> int:
    """The number of tokens that a size's length is counted in, where it is rounded up; else 1."""
    lengths = [name for name, power in zip(tape.atoms, size.exponents, strict=True) if power]
    parts = [part for name in lengths for part in (tape.sums[name][1] if name in tape.sums else (name,))]
    return max((tape.rounded[part][1] for part in parts if part in tape.rounded), default=1)
