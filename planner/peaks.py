"""Allocated peaks of one strategy at many shapes at once: for capacity maps and for the longest clip.

What is allocated at any moment is a sum of buffer sizes with whole-number counts that do not depend on the shape. Of
all moments only those no other moment dominates can be the peak; their counts times the sizes at many shapes is one
matrix product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.replay import BLOCK_ROUND_BYTES
from planner.run import Run
from planner.tape import Monomial, Tape


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
    column = [columns.setdefault(run.program.sizes[index], len(columns)) for index in run.program.buffers]
    alive = np.zeros(len(columns), dtype=np.int32)
    moments = []
    rising = False
    for _, stage in run.stages:
        for event in stage.ops:
            if event >= 0:
                alive[column[event]] += 1
                rising = True
            else:
                if rising:
                    moments.append(alive.copy())
                    rising = False
                alive[column[~event]] -= 1
    moments.append(alive)
    return PeakForms(_undominated(np.array(moments)).astype(float), tuple(columns))  # type: ignore[arg-type]


def _undominated(moments: NDArray[np.int32]) -> NDArray[np.int32]:
    """The rows that no other row reaches in every column."""
    kept: NDArray[np.int32] = np.empty((0, moments.shape[1]), dtype=np.int32)
    for row in moments[np.argsort(-moments.sum(axis=1), kind="stable")]:
        if not (kept >= row).all(axis=1).any():
            kept = np.vstack([kept, row])
    return kept
