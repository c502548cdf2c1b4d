"""Allocated peaks of one strategy at many shapes at once: for capacity maps and for the longest clip.

What is allocated at any moment is a sum of buffer sizes with whole-number counts that do not depend on the shape. A
moment that another one dominates cannot be the peak; the others' counts times the sizes at many shapes is one matrix
product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.replay import BLOCK_ROUND_BYTES
from planner.run import Run
from planner.tape import Monomial, Tape

PICKED = 12
"""Moments that all others are compared with: more take out few."""


@dataclass(frozen=True)
class PeakForms:
    """``counts[m, s]``.

    How many buffers of the s-th size are alive at moment m, for every moment that can be the peak.
    """

    counts: NDArray[np.float64]
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
    """The moments of a laid-out run that can be its allocated peak, at whatever shape. One-off, a fraction of a second.

    What transformations add (swap ring, buckets) are plain bytes that do not depend on the shape.
    """
    columns: dict[object, int] = {}
    column = np.array([columns.setdefault(run.program.sizes[index], len(columns)) for index in run.program.buffers])
    events = np.array([event for _, stage in run.stages for event in stage.ops])
    rises = events >= 0
    at = column[np.where(rises, events, ~events)]
    # What is allocated is highest where a row of allocations ends; each row of them, with the frees behind, is one.
    row = np.cumsum(np.concatenate(([False], rises[1:] & ~rises[:-1])))
    shape = (int(row[-1]) + 1, len(columns))
    made, freed = (
        np.bincount(row[which] * shape[1] + at[which], minlength=shape[0] * shape[1]).reshape(shape)
        for which in (rises, ~rises)
    )
    alive = np.cumsum(made, axis=0, dtype=np.int16)
    alive[1:] -= np.cumsum(freed, axis=0, dtype=np.int16)[:-1]
    assert alive.min() >= 0, "more buffers of one size alive than 16 bits count"
    return PeakForms(_undominated(alive).astype(float), tuple(columns))  # type: ignore[arg-type]


def _undominated(moments: NDArray[np.int16]) -> NDArray[np.int16]:
    """Without most of the rows that others reach in every column. All of them would cost more than the product."""
    kept: list[NDArray[np.int16]] = []
    left = moments[np.argsort(-moments.sum(axis=1), kind="stable")]
    while len(left) and len(kept) < PICKED:
        kept.append(left[0])  # the largest sum that is left: none of the others reaches it
        left = left[(left > left[0]).any(axis=1)]
    return np.vstack([*kept, left])
