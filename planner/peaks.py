"""Allocated peaks of one strategy at many shapes at once: for capacity maps and for the longest clip.

What is allocated at any moment is a sum of buffer sizes with whole-number counts that do not depend on the shape. A
moment that another one dominates cannot be the peak; the others' counts times the sizes at many shapes is one matrix
product.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.program import Moment, Stage
from planner.replay import BLOCK_ROUND_BYTES
from planner.run import Run
from planner.tape import Monomial, Tape

Counts = NDArray[np.float64]
"""Buffers by size, whole numbers as in the columns of a PeakForms; or a row of them for every moment."""
PICKED = 12
"""Moments that all others are compared with: more take out few."""


@dataclass(frozen=True)
class PeakForms:
    """``counts[m, s]``.

    How many buffers of the s-th size are alive at moment m, for every moment that can be the peak.
    """

    counts: Counts
    sizes: tuple[tuple[Tape, Monomial] | int, ...]

    def at(self, grids: Sequence[Mapping[str, int]]) -> NDArray[np.int64]:
        """Allocated peak in bytes at each shape. Exact below 2**53 bytes."""
        table = np.empty((len(self.sizes), len(grids)))
        atoms: dict[int, NDArray[np.float64]] = {}
        for row, size in enumerate(self.sizes):
            if isinstance(size, int):
                table[row] = size
            else:
                tape, monomial = size
                if id(tape) not in atoms:
                    atoms[id(tape)] = np.array([tape.values(grid) for grid in grids], dtype=float).T
                table[row] = _evaluate(monomial, atoms[id(tape)])
        rounded = np.ceil(table / BLOCK_ROUND_BYTES) * BLOCK_ROUND_BYTES
        peaks: NDArray[np.int64] = (self.counts @ rounded).max(axis=0).astype(np.int64)
        return peaks


def _evaluate(size: Monomial, atoms: NDArray[np.float64]) -> NDArray[np.float64]:
    value = size.coefficient * _product(atoms, size.exponents)
    if size.multiple:
        dimension = size.inner * _product(atoms, size.inner_exponents)
        value = value * np.ceil(dimension / size.multiple) * size.multiple
    return value


def _product(atoms: NDArray[np.float64], exponents: Sequence[int]) -> NDArray[np.float64]:
    product = np.ones(atoms.shape[1])
    for atom, exponent in zip(atoms, exponents, strict=True):
        if exponent:
            product = product * atom**exponent
    return product


def peak_forms(run: Run) -> PeakForms:
    """The moments of a laid-out run that can be its allocated peak, at whatever shape. One-off, tens of milliseconds.

    What transformations add (swap ring, buckets) are plain bytes that do not depend on the shape.
    """
    columns: dict[object, int] = {}
    of_size = np.array([columns.setdefault(size, len(columns)) for size in run.program.sizes])
    column = of_size[np.array(run.program.buffers)]
    moments: dict[int, tuple[Counts, Counts]] = {}
    bases: dict[int, list[Counts]] = {}
    base = np.zeros(len(columns))
    for _, stage in run.stages:
        if id(stage) not in moments:
            moments[id(stage)] = _moments(stage, column, len(columns))
        bases.setdefault(id(stage), []).append(base)
        base = base + moments[id(stage)][1]
    # A stage that comes again, as a later step, mostly finds all that it found before, and the optimizer's states.
    found = [moments[stage][0] + base for stage, every in bases.items() for base in _undominated(np.array(every))]
    alive = np.vstack(found)
    assert alive.min() >= 0, "frees follow allocations"
    return PeakForms(_undominated(alive), tuple(columns))  # type: ignore[arg-type]


def _moments(stage: Stage, column: NDArray[np.int64], columns: int) -> tuple[Counts, Counts]:
    """Buffers made less those freed since a stage began: at its moments that can be the highest, and at its end.

    What is allocated is highest where a row of allocations ends; each row of them, with the frees before it, is one.
    """
    events = np.array(stage.ops, dtype=np.int64)
    if not len(events):
        return np.empty((0, columns)), np.zeros(columns)
    ends = np.cumsum([0, *(len(stretch) for _, stretch in stage.stretches)])
    rises = events >= 0
    last = rises & ~np.append(rises[1:], False)
    last[ends[1:] - 1] |= rises[ends[1:] - 1]  # a row ends with its stretch, so that blocks are alike
    before = np.concatenate(([0], np.cumsum(last)))
    rows = int(before[-1]) + 1
    at = column[np.where(rises, events, ~events)] * rows + before[:-1]
    change = np.bincount(at, np.where(rises, 1.0, -1.0), columns * rows).reshape(columns, rows)
    alive = np.cumsum(change, axis=1, dtype=np.float64).T
    return alive[:-1][~_between(stage, alive, before[ends])], alive[-1]


def _between(stage: Stage, alive: Counts, first: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The moments halfway from a block before to the block behind, where a sum of sizes is no peak whatever the sizes.

    ``first``: the first moment of every stretch, and the number of moments.
    """
    sweeps: dict[tuple[str, str, int], list[int]] = {}
    parts: Counter[Moment] = Counter()
    for index, (moment, _) in enumerate(stage.stretches):
        sweeps.setdefault((moment.module_list, moment.passes, parts[moment]), []).append(index)
        parts[moment] += 1
    found = np.zeros(first[-1], dtype=bool)
    for sweep in sweeps.values():
        for length, like in itertools.groupby(sweep, key=lambda index: int(first[index + 1] - first[index])):
            rows = first[list(like)][:, None] + np.arange(length)
            blocks = alive[rows]
            halfway = (blocks[:-2] + blocks[2:] == 2 * blocks[1:-1]).all(axis=2)
            found[rows[1:-1][halfway]] = True
    return found


def _undominated(moments: Counts) -> Counts:
    """Without most of the rows that others reach in every column. All of them would cost more than the product."""
    kept: list[Counts] = []
    left = moments[np.argsort(-moments.sum(axis=1), kind="stable")]
    while len(left) and len(kept) < PICKED:
        kept.append(left[0])  # the largest sum that is left: none of the others reaches it
        left = left[(left > left[0]).any(axis=1)]
    return np.vstack([*kept, left])
