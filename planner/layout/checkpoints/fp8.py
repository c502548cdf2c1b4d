"""Checkpoints in 8 bits, as a transformation of a Run."""

from __future__ import annotations

import itertools
import math

from planner.errors import NotEstimatedError
from planner.layout.checkpoints.block_inputs import block_inputs
from planner.layout.checkpoints.recomputation import alike_stretches, forward_events, recomputations
from planner.layout.run import STRATEGY_MOMENT, Run
from planner.tape.format import Monomial, Tape
from planner.tape.program import Block, Moment

NUMBER_BYTES = (2, 4)
"""Of what blocks hand on."""

KERNEL_BYTES = {2: 13 + 11, 4: 25 + 21}
"""What the kernels read and write for each number, of 2 bytes and of 4. The norm reads it, the quotient reads and
writes one, a product does so in place, the cast reads that and writes one byte. The way back reads the byte and writes
the number, which a quotient and a product read and write in place."""


def fp8_checkpoints(run: Run) -> None:
    """A checkpointed block's input is rounded to 8 bits, beside the largest number of each token, before the block
    runs, and goes with the block. It comes back when the block is recomputed and goes with that; what is rounded goes
    where the input itself would, behind the block's backward (trainers/memory/fp8_inputs.py).
    """
    if run.strategy.gradient_checkpointing != "fp8":
        return
    alike, inputs = alike_stretches(run), _rounded_inputs(run)
    found = recomputations(run, alike, forward_events(run))
    over = {(moment.module_list, moment.block): at for at, (moment, _) in enumerate(run.step.stretches)}
    number = _number_bytes(run)
    rounded: dict[int, list[int]] = {}
    brought: set[Block] = set()
    freed: set[Block] = set()
    woven: list[tuple[Moment, list[int]]] = []
    for at, (moment, events) in enumerate(run.step.stretches):
        block = (moment.module_list, moment.block)
        given = inputs.get(block, [])
        if given and moment.passes == "forward" and given[0] not in rounded:
            woven.append((STRATEGY_MOMENT._replace(passes="checkpoint"), _rounding(run, given, number, rounded)))
            events = [*events, *(~buffer for buffer in given)]
        elif given and moment.passes == "backward":
            begins, ends = found[alike[at]] or (0, len(events) if at == over[block] else None)
            coming = [] if block in brought else given
            brought.add(block)
            going: list[int] = []
            if ends is not None and block not in freed:
                going = [~buffer for buffer in given]
                freed.add(block)
            events = _recomputed(events, rounded, (begins, coming), (ends or 0, going))
        woven.append((moment, events))
    run.step.stretches = woven


def _rounded_inputs(run: Run) -> dict[Block, list[int]]:
    """What blocks compute of that which checkpoints keep: tables have another width than the model."""
    width = _width(run)
    return {
        block: hidden
        for block, given in block_inputs(run).items()
        if (hidden := [buffer for buffer in given if run.sizes[buffer] % width == 0])
    }


def _rounding(run: Run, given: list[int], number: int, rounded: dict[int, list[int]]) -> list[int]:
    """The events that round a block's inputs, of ``number`` bytes a number; what of each is kept goes into
    ``rounded``."""
    width = _width(run)
    events: list[int] = []
    for buffer in given:
        nbytes = run.sizes[buffer]
        largest = run.new(nbytes // width, "activation", "checkpoint tokens")
        quotient = run.new(nbytes, "temporary", "checkpoint quotient")
        values = run.new(nbytes // number, "activation", "checkpoint in 8 bits")
        events += [largest, quotient, values, ~quotient]
        rounded[buffer] = [values, largest]
        run.work.backward_bytes += KERNEL_BYTES[number] * (nbytes // number)
    return events


def _recomputed(
    events: list[int], rounded: dict[int, list[int]], begins: tuple[int, list[int]], ends: tuple[int, list[int]]
) -> list[int]:
    """A block's backward, in which what is rounded goes in place of the inputs. ``begins``, ``ends``: what else happens
    before which event, the inputs' own frees not counted."""
    places = [at for at, event in enumerate(events) if ~event not in rounded]
    made: list[int] = []
    start = 0
    for place, more in (begins, ends):
        stop = places[place] if place < len(places) else len(events)
        made += [*_instead(events[start:stop], rounded), *more]
        start = max(start, stop)
    return [*made, *_instead(events[start:], rounded)]


def _instead(events: list[int], rounded: dict[int, list[int]]) -> list[int]:
    """Events with the frees of what is rounded in place of those of the inputs."""
    return [each for event in events for each in ([~kept for kept in rounded.get(~event, ())] or (event,))]


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
            counted.insert(0, (size[1].coefficient, width * _tokens_counted_in(*size)))
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
