"""Allocated peaks of one strategy at many shapes at once: for capacity maps and for the longest clip.

What is allocated at any moment is a sum of buffer sizes with whole-number counts that do not depend on the shape. A
moment that another one dominates cannot be the peak; the others' counts times the sizes at many shapes is one matrix
product.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.allocator.caching import BLOCK_ROUND_BYTES
from planner.layout.run import Run
from planner.tape.format import Monomial, Tape
from planner.tape.program import Moment, Stage

Counts = NDArray[np.float64]
"""Buffers by size, whole numbers as in the columns of a PeakForms; or a row of them for every moment."""
PICKED = 100
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
        # No BLAS: it would start threads, which on busy cores cost a hundred times so small a product.
        peaks: NDArray[np.int64] = np.einsum("ms,sg->mg", self.counts, rounded).max(axis=0).astype(np.int64)
        return peaks


def _evaluate(size: Monomial, atoms: NDArray[np.float64]) -> NDArray[np.float64]:
    value = size.coefficient * _product(atoms, size.exponents)
    if size.multiple:
        dimension, multiple = size.inner * _product(atoms, size.inner_exponents), abs(size.multiple)
        needed = (dimension % multiple > 0) | (size.multiple > 0)
        rounded = np.ceil(dimension / multiple) * multiple * needed
        value = value * np.where(value <= size.above, dimension, rounded)
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
    columns: dict[tuple[Tape, Monomial] | int, int] = {}
    of_size = np.array([columns.setdefault(size, len(columns)) for size in run.program.sizes])
    column = of_size[np.array(list(run.program.buffers))]
    moments: dict[int, tuple[Counts, Counts]] = {}
    bases: dict[int, list[Counts]] = {}
    base, rows = np.zeros(len(columns)), _Rows(column, len(columns))
    for _, stage in run.stages:
        if id(stage) not in moments:
            moments[id(stage)] = _moments(stage, rows)
        bases.setdefault(id(stage), []).append(base)
        base = base + moments[id(stage)][1]
    # A stage that comes again, as a later step, mostly finds all that it found before, and the optimizer's states.
    found = [moments[stage][0] + base for stage, every in bases.items() for base in _undominated(np.array(every))]
    alive = np.vstack(found)
    assert alive.min() >= 0, "frees follow allocations"
    return PeakForms(_undominated(alive), tuple(columns))


class _Rows(dict[bytes, tuple[Counts, Counts]]):
    """Stretches of a run by what they make and free, in order, as bytes: blocks are alike, and so are steps.

    Each is buffers made less those freed since the stretch began: at every moment that can be its highest (what is
    allocated is highest where a row of allocations ends), and at its end.
    """

    def __init__(self, column: NDArray[np.int64], columns: int) -> None:
        """``column``: of every buffer, among so many ``columns``."""
        super().__init__()
        self.column = column
        self.columns = columns
        self._likes: dict[int, bytes] = {}

    def like(self, events: list[int]) -> bytes:
        """The key of a stretch. A first step and a later one share most of their lists."""
        if id(events) not in self._likes:
            numbers = np.array(events, dtype=np.int64)
            sizes = np.where(numbers >= 0, self.column[numbers], ~self.column[~numbers])
            self._likes[id(events)] = sizes.tobytes()
        return self._likes[id(events)]

    def __missing__(self, key: bytes) -> tuple[Counts, Counts]:
        events = np.frombuffer(key, dtype=np.int64)
        rises = events >= 0
        last = rises & ~np.append(rises[1:], False)
        row = np.cumsum(last) - last
        at = row * self.columns + np.where(rises, events, ~events)
        count = int(last.sum()) + 1
        change = np.bincount(at, np.where(rises, 1.0, -1.0), count * self.columns).reshape(count, self.columns)
        alive: Counts = np.cumsum(change, axis=0, dtype=np.float64)
        self[key] = _undominated(alive[:-1]), alive[-1]
        return self[key]


def _moments(stage: Stage, rows: _Rows) -> tuple[Counts, Counts]:
    """Buffers made less those freed since a stage began: at its moments that can be the highest, and at its end."""
    likes = [rows.like(events) for _, events in stage.stretches]
    starts = np.cumsum([np.zeros(rows.columns), *(rows[like][1] for like in likes)], axis=0)
    dropped = _between(stage, likes, starts)
    found = [starts[at] + rows[like][0] for at, like in enumerate(likes) if at not in dropped]
    return np.vstack([np.empty((0, rows.columns)), *found]), starts[-1]


def _between(stage: Stage, likes: Sequence[bytes], starts: Counts) -> set[int]:
    """The stretches that are like that of the block before and that of the block behind, and begin halfway between
    them: there a sum of sizes is no peak whatever the sizes. ``starts``: what is alive where each begins."""
    sweeps: dict[tuple[str, str, int], list[int]] = {}
    parts: Counter[Moment] = Counter()
    for index, (moment, _) in enumerate(stage.stretches):
        sweeps.setdefault((moment.module_list, moment.passes, parts[moment]), []).append(index)
        parts[moment] += 1
    found = set()
    for sweep in sweeps.values():
        begun = starts[sweep]
        halfway = (begun[:-2] + begun[2:] == 2 * begun[1:-1]).all(axis=1)
        for before, at, behind, linear in zip(sweep, sweep[1:], sweep[2:], halfway, strict=False):
            if linear and likes[before] == likes[at] == likes[behind]:
                found.add(at)
    return found


def _undominated(moments: Counts) -> Counts:
    """Without most of the rows that others reach in every column. All of them would cost more than the product."""
    kept: list[Counts] = []
    left = moments[np.argsort(-moments.sum(axis=1), kind="stable")]
    while len(left) and len(kept) < PICKED:
        kept.append(left[0])  # the largest sum that is left: none of the others reaches it
        left = left[(left > left[0]).any(axis=1)]
    return np.vstack([*kept, left])
