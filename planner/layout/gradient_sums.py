"""The workspace of the sums that make gradients of what is broadcast over tokens: biases, norms, scales, shifts.

Each adds up the rows of a matrix, and where there are many CUDA splits every column over several blocks, which meet in
a buffer from the caching allocator (`planner.layout.optimizer.reduction_workspace`): 133 MiB for 3840 columns of 4608
rows on an H100. Recordings on a CPU lack it. A tape does not say what an operator reads, so the rows are worked out of
the events around the sum.

A linear layer makes the gradients of its input and its weight first, so those two say how many rows there are. Else the
sum reads a product that is gone behind it; or, for a shift, what the product of the scale beside it is made of next; or
the newest tensor with its columns. A part of a tensor (the text's tokens of text and clip) is not on a tape, so the
newest tensor can have more rows than are read.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from planner.layout.optimizer.reduction_workspace import column_mean_bytes
from planner.layout.run import Run
from planner.tape.format import Monomial, Tape
from planner.tape.variants.precision import Precision

PERSISTENT = frozenset({"weight", "gradient", "optimizer", "batch", "workspace"})
"""Categories of what no sum of a gradient reads."""

SUM_WORKSPACE = "sum over rows"
"""The operator's name of a workspace."""

NEWEST = 6
"""Tensors back from the sum among which is what it reads: a gradient that an operator has just passed on."""


class Summed(NamedTuple):
    """What a sum reads."""

    buffer: int
    """the tensor; of a linear layer the gradient of its input, which has as many rows"""

    weight_gradient: int | None
    """of a linear layer"""

    number_bytes: int | None
    """of a number of what it makes, where a cast behind it shows that"""


def gradient_sums(run: Run) -> None:
    """Adds the workspace of each sum in backward: it comes behind the sum's own output, and is gone with the
    operator."""
    if run.samples_only:
        return
    as_recorded = run.strategy.context_parallel == 1 and not run.job.trainable
    workspaces = run.shared_at_shape(_workspaces, run.facts.gpu.name) if as_recorded else _workspaces(run)
    # One for each sum, also where this shape's takes none: buckets have different ones, and what is made behind them
    # (an average of the weights) must have the same number in all.
    sums = run.shared(_sums)
    sizes = [workspaces.get(made, 0) for made in sums]
    buffers = dict(zip(sums, run.add_new(sizes, "temporary", SUM_WORKSPACE), strict=True))
    if not workspaces:
        return
    for position, (moment, events) in enumerate(run.step.stretches):
        if not workspaces.keys().isdisjoint(events):
            merged: list[int] = []
            rest = 0
            for behind in (at + 1 for at, event in enumerate(events) if event in workspaces):
                buffer = buffers[events[behind - 1]]
                merged += [*events[rest:behind], buffer, ~buffer]
                rest = behind
            run.step.stretches[position] = (moment, merged + events[rest:])


def _workspaces(run: Run) -> dict[int, int]:
    """Buffer that a sum makes -> the workspace in bytes, of those that take one."""
    precision, sizes = Precision.of(run.job, run.strategy), run.sizes
    taken: dict[int, int] = {}
    by_size: dict[tuple[int, int, int], int] = {}  # blocks are much alike
    for made, summed in run.shared(_sums).items():
        halved = precision.trained != "fp32" or (summed.weight_gradient is not None and precision.autocast)
        number_bytes = summed.number_bytes or (2 if halved or _is_halved(run, made) else 4)
        columns, rows = sizes[made] // number_bytes, sizes[summed.buffer] // sizes[made]
        if summed.weight_gradient is not None:
            rows = sizes[summed.buffer] * columns // sizes[summed.weight_gradient]
        key = rows, columns, number_bytes
        if key not in by_size:
            by_size[key] = column_mean_bytes(rows, columns, run.facts.gpu, number_bytes)
        if by_size[key]:
            taken[made] = by_size[key]
    return taken


def _is_halved(run: Run, made: int) -> bool:
    """Whether a sum is of 16 bits, by its columns: a gate's gradient has as many numbers as a bias or a norm."""
    lengths, nbytes = run.shared(_weight_lengths), _coefficient(run, made)
    return nbytes // 2 in lengths and nbytes // 4 not in lengths


def _weight_lengths(run: Run) -> frozenset[int]:
    """How many numbers the model's weights have, trained or not."""
    precision = Precision.of(run.job, run.strategy)
    stored = 4 if precision.trained == "fp32" and run.job.method == "full" else 2
    return frozenset(_coefficient(run, buffer) // stored for buffer in run.named("weight").values())


class _Recorded(NamedTuple):
    """What is recorded of every buffer, by number."""

    operators: list[str]
    categories: list[str]
    coefficients: list[int]
    tokens: list[bool]
    """whether its size grows with the clip or the text"""
    weight_lengths: frozenset[int]

    @classmethod
    def of(cls, run: Run) -> _Recorded:
        program = run.program
        coefficients = [size if isinstance(size, int) else size[1].coefficient for size in program.sizes]
        tokens = list(map(_grows, program.sizes))
        return cls(
            list(program.op),
            list(program.category),
            list(map(coefficients.__getitem__, program.buffers)),
            list(map(tokens.__getitem__, program.buffers)),
            run.shared(_weight_lengths),
        )


def _sums(run: Run) -> dict[int, Summed]:
    """What each sum of backward reads that adds up rows, by the buffer that it makes."""
    sums = {buffer for buffer, name in enumerate(run.program.op) if name == "sum"}
    if not sums:
        return {}
    recorded = _Recorded.of(run)
    sums = {buffer for buffer in sums if not recorded.tokens[buffer]}
    live: dict[int, None] = {}
    found: dict[int, Summed] = {}
    for moment, events in run.step.stretches if sums else ():
        if moment.passes != "backward":
            continue
        for at, event in enumerate(events):
            if event < 0:
                live.pop(~event, None)
            else:
                if event in sums and (summed := _summed(recorded, events, at, live)):
                    found[event] = summed
                if recorded.categories[event] not in PERSISTENT:
                    live[event] = None
    return found


def _summed(recorded: _Recorded, events: list[int], at: int, live: dict[int, None]) -> Summed | None:
    """What the sum at a place of a stretch reads; None where nothing that backward made has its columns in rows.
    ``live``: what is there, the newest last."""
    operators, coefficients, cast = recorded.operators, recorded.coefficients, _cast_bytes(recorded, events, at)
    made = [event for event in events[max(0, at - NEWEST) : at] if event >= 0][-2:]
    if [operators[event] for event in made] == ["mm", "mm"]:
        return Summed(made[0], made[1], cast)
    behind = {~event for event in itertools.takewhile(lambda event: event < 0, events[at + 1 :])}
    gone = [buffer for buffer in reversed(live) if buffer in behind and operators[buffer] == "mul"]
    following = [event for event in events[at + 1 : at + 1 + NEWEST] if event >= 0]
    scaled = following[cast is not None :][:1]
    products = [buffer for buffer in (*gone, *scaled) if operators[buffer] == "mul"]
    others = [buffer for buffer in itertools.islice(reversed(live), NEWEST) if operators[buffer] != "mm"]
    made_bytes = coefficients[events[at]]
    # A sum over channels is as long as a text of fixed length, and not as a weight.
    is_vector = not recorded.weight_lengths.isdisjoint({made_bytes // 2, made_bytes // 4})
    for buffer in (*products, *(others if is_vector else ())):
        whole = coefficients[buffer]
        # Such a text's rows do not grow, which a product shows all the same.
        rows = recorded.tokens[buffer] or (is_vector and buffer in products and whole > made_bytes)
        if rows and whole % made_bytes == 0:
            return Summed(buffer, None, cast)
    return None


def _cast_bytes(recorded: _Recorded, events: list[int], at: int) -> int | None:
    """Bytes of a number of the sum at a place of a stretch: 4 where it is cast to half its size next, 2 where to twice;
    None where it is not."""
    made = recorded.coefficients[events[at]]
    following = next((event for event in events[at + 1 : at + 1 + NEWEST] if event >= 0), None)
    if following is None or recorded.operators[following] != "_to_copy" or recorded.tokens[following]:
        return None
    return {made: 4, 4 * made: 2}.get(2 * recorded.coefficients[following])


def _coefficient(run: Run, buffer: int) -> int:
    size = run.program.sizes[run.program.buffers[buffer]]
    return size if isinstance(size, int) else size[1].coefficient


def _grows(size: tuple[Tape, Monomial] | int) -> bool:
    """Whether a size grows with the clip or the text."""
    if isinstance(size, int):
        return False
    tape, monomial = size
    constant = tape.of_batch | {"R"}
    grown = any(power and name not in constant for name, power in zip(tape.atoms, monomial.exponents, strict=True))
    return grown or any(monomial.inner_exponents)
