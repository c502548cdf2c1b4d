"""How far a card goes: frames x resolution, with the best way to train in each cell.

A few strategies (the ladder) are priced at all shapes at once by what they allocate (`planner.search.batched_peaks`).
Where that alone does not decide, near the budget, the shape is replayed as an estimate would; a replay also tells how
much that strategy loses to fragmentation, so the next cells of it need fewer. Pure, given a search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from planner.catalog.shapes import grid
from planner.errors import NotEstimatedError
from planner.estimate.estimate import outside_bytes
from planner.layout import margin
from planner.layout.cublas import kept_bytes, workspace_bytes
from planner.layout.phases import encodings
from planner.layout.recorded_run import workspace_kernels
from planner.layout.run import Run
from planner.search.batched_peaks import PeakForms, peak_forms
from planner.search.capacity_axes import lengths, sizes
from planner.search.objectives.objective import Objective
from planner.search.screening import QuickEstimate, Screen
from planner.search.search import Search
from planner.spec.job import Job
from planner.spec.plan import Estimate, Verdict
from planner.spec.rules import ResolvedStrategy

UNKNOWN_OVERHEAD = (1.0, 1.20)
"""Reserved over allocated before a replay: what is allocated is a lower bound, and a fifth above it is more than
fragmentation was seen to take (19 %: checkpoints offloaded, most blocks swapped, 117 frames on 8 GB)."""
OVERHEAD_SPREAD = 0.01
"""The same to either side of the last replay of the strategy."""
OTHERS_SPREAD = 0.03
"""The same to either side of what other strategies were seen to lose."""
ONE = 2**40
"""A round number of bytes, to read the margin's share off."""
Shape = tuple[int, int, int]
"""Frames (of an image model: the batch), height, width."""


@dataclass(frozen=True)
class Cell:
    """One shape of the map: the best verdict of any plan of the ladder at that shape, and which plan has it."""

    shape: Shape
    verdict: Verdict
    rung: int | None
    """index into the ladder; None where nothing fits"""
    device_bytes: int
    """of that way, or of the one that needs least"""
    replayed: bool
    tiled: bool = False
    """the clip is encoded in tiles, as the VAE does not take it whole"""


@dataclass(frozen=True)
class Capacity:
    """The map. ``cells[row][column]``: a row per size, a column per length (of an image model: per batch)."""

    axis: str
    """frames or batch"""
    lengths: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]
    ladder: tuple[QuickEstimate, ...]
    cells: tuple[tuple[Cell, ...], ...]


# ---- the map


KNOTS = (1, 3, 5, 7, 9, 30, 150)
"""Which of the lengths, beside the first and the last, a run with stages of its own shape is laid out at."""

OFF_THE_LINE = 0.05
"""By how much a peak may be beside the line: a choice that held for the four plans it was tried on."""

VAE_OVERHEAD = 1.25
"""So much is taken to be reserved over what is allocated where a VAE shares the step's allocator (CogVideoX's: 1.2);
so near to the budget it is replayed."""

BytesByExtent = dict[tuple[int, int], int]
"""(length, pixels) -> bytes, for what a longer or larger clip never needs less of."""


class Forms:
    """Allocated bytes of strategies at many shapes; what cards have in common is worked out once."""

    def __init__(self, screen: Screen, job: Job, objective: Objective) -> None:
        self.screen = screen
        self.job = job.replace(buckets=())
        self.objective = objective
        self.straight: set[ResolvedStrategy] = set()
        """Strategies whose peaks are on straight lines between a few lengths"""
        self.outside: dict[ResolvedStrategy, int] = {}
        """Strategy -> device bytes that are neither torch's nor CUDA's context"""
        self.encoded: dict[bool, BytesByExtent] = {}
        """In tiles or not -> allocated bytes of what is cached before training, less cuBLAS's workspace"""
        self.host: dict[ResolvedStrategy, BytesByExtent] = {}
        """Strategy -> host RAM"""
        self._forms: dict[tuple[object, ...], tuple[PeakForms | None, int]] = {}
        """What is alike -> its forms, and what of them is cuBLAS's workspace"""
        self._allocated: dict[tuple[object, ...], dict[Shape, int]] = {}
        self._jobs: dict[Shape, Job] = {}
        self._grids: dict[Shape, dict[str, int]] = {}

    def at(self, shape: Shape) -> Job:
        """The job with another shape (length, height, width); cached."""
        if shape not in self._jobs:
            self._jobs[shape] = self.objective.put(self.job.replace(height=shape[1], width=shape[2]), shape[0])
        return self._jobs[shape]

    def grid(self, search: Search, shape: Shape) -> dict[str, int]:
        """The grid (values of the tape's atoms) of the job at a shape; cached."""
        if shape not in self._grids:
            self._grids[shape] = grid(search.question.model, self.at(shape))
        return self._grids[shape]

    def allocated(self, search: Search, strategy: ResolvedStrategy, shapes: Sequence[Shape]) -> list[int]:
        """The peak allocated bytes of the job at each shape, without what is encoded before training."""
        question = search.question
        # Cards differ in their attention's kernel, and in a workspace: where that is there all the time, by so much.
        kept = kept_bytes(question.gpu, question.machine.torch)
        alike = (
            strategy,
            0 if kept else workspace_bytes(question.gpu),
            workspace_kernels(strategy, question.machine, self.screen.facts(question.candidate(self.job, strategy))),
        )
        by_shape = self._allocated.setdefault(alike, {})
        by_recording: dict[int, list[Shape]] = {}
        for shape in shapes:
            by_recording.setdefault(self._recording(search, shape), []).append(shape)
        for recording, there in by_recording.items():
            new = [shape for shape in there if shape not in by_shape]
            if new:
                forms, laid_out = self._of(search, strategy, self.at(new[0]), (*alike, recording))
                if forms is None:
                    self.straight.add(strategy)
                    between = self._between(search, strategy, new)
                    by_shape |= {shape: peak - kept for shape, peak in between.items()}
                else:
                    peaks = forms.at([self.grid(search, shape) for shape in new]) - laid_out
                    by_shape.update(zip(new, map(int, peaks), strict=True))
        return [by_shape[shape] + kept for shape in shapes]

    def _recording(self, search: Search, shape: Shape) -> int:
        """What tells which recording holds for a shape: its batch, or only whether it is more than one sample."""
        batch = self.at(shape).batch_size
        return batch if search.question.model.shape.batches else min(batch, 2)

    def _between(self, search: Search, strategy: ResolvedStrategy, shapes: Sequence[Shape]) -> dict[Shape, int]:
        """Laid out at a few lengths of each size, and on straight lines between them: a peak is the largest of what
        rises evenly with the length, which such lines do not cut short."""
        peaks: dict[Shape, int] = {}
        for size in dict.fromkeys(shape[1:] for shape in shapes):
            lengths = sorted(shape[0] for shape in shapes if shape[1:] == size)
            knots = sorted({lengths[0], lengths[-1], *(lengths[at] for at in KNOTS if at < len(lengths))})
            jobs = [self.at((length, *size)) for length in knots]
            exact = [self.screen.allocated_bytes(search.question.candidate(job, strategy)) for job in jobs]
            between = np.interp(lengths, knots, exact)
            peaks |= {(length, *size): int(peak) for length, peak in zip(lengths, between, strict=True)}
        return peaks

    def _of(
        self, search: Search, strategy: ResolvedStrategy, job: Job, key: tuple[object, ...]
    ) -> tuple[PeakForms | None, int]:
        """Of one recording. None where a stage beside the model is laid out at the shape itself, and so knows no
        other."""
        if key not in self._forms:
            candidate = search.question.candidate(job, strategy)
            facts = self.screen.facts(candidate)
            where = grid(search.question.model, job)
            run = self.screen.run_cache.lay_out_for_peaks(candidate, facts, where, self.screen.trainer)
            self.outside[strategy] = outside_bytes(run) - facts.gpu.context_bytes
            own_shape = run.samples_only or run.phases.encode or (run.phases.validation and not job.validation)
            self._forms[key] = (
                None if own_shape else peak_forms(run),
                kept_bytes(facts.gpu, search.question.machine.torch),
            )
        return self._forms[key]


class _CellEstimate(NamedTuple):
    verdict: Verdict
    device_bytes: int
    replayed: bool = False
    tiled: bool = False


def _cell_of(shape: Shape, rung: int | None, cell: _CellEstimate) -> Cell:
    return Cell(shape, cell.verdict, rung, cell.device_bytes, cell.replayed, cell.tiled)


class Room:
    """What one machine has room for besides the training step: host RAM, and encoding before training."""

    def __init__(self, search: Search, forms: Forms) -> None:
        self.search = search
        self.forms = forms

    def has_ram(self, shape: Shape, strategy: ResolvedStrategy) -> bool:
        """Whether the host has enough RAM for a strategy at a shape; true when its RAM is not known."""
        question = self.search.question
        if question.machine.host_ram is None:
            return True
        priced = self.forms.host.setdefault(strategy, {})
        return _at_most(
            question.machine.host_ram,
            shape,
            priced,
            lambda: self.search.screen.host_ram_bytes(question.candidate(self.forms.at(shape), strategy)),
        )

    def encoding(self, shape: Shape, strategy: ResolvedStrategy) -> ResolvedStrategy | None:
        """The way itself, where what is cached before training fits at a shape; in tiles, where that does; or None."""
        card = self.search.question.gpu
        room = int(self.search.question.budget_bytes / margin.interval(ONE)[1] * ONE)
        room -= card.context_bytes + kept_bytes(card, self.search.question.machine.torch)
        for tiled in (strategy.vae_tiling, True):
            way = strategy.replace(vae_tiling=tiled) if tiled != strategy.vae_tiling else strategy
            priced = self.forms.encoded.setdefault(tiled, {})
            if _at_most(room, shape, priced, partial(self._encode_bytes, shape, way)):
                return way
        return None

    def _encode_bytes(self, shape: Shape, way: ResolvedStrategy) -> int:
        question, job = self.search.question, self.forms.at(shape)
        candidate = question.candidate(job, way)
        run = Run(candidate, self.search.screen.facts(candidate), grid(question.model, job))
        workspace = kept_bytes(question.gpu, question.machine.torch)
        return max((entry.only.peak_bytes - workspace for entry in encodings(run)), default=0)


class Mapper(Room):
    """Finds the verdict of every shape of one job on one machine."""

    def __init__(self, search: Search, forms: Forms) -> None:
        super().__init__(search, forms)
        self._overheads: dict[ResolvedStrategy, tuple[float, float]] = {}
        """Strategy -> reserved over allocated, from and to, by its last replay"""
        self._most_overhead: dict[ResolvedStrategy, float] = {}
        """The same, the most that any replay of it told"""
        self._encoding: dict[ResolvedStrategy, int] = {}
        """Strategy -> on the device, to encode the smallest shape before training: text encoders do the same for all"""

    def map(self, rungs: Sequence[QuickEstimate]) -> Capacity:
        """The capacity map over a ladder of plans, the fastest first."""
        model = self.search.question.model
        columns, rows = lengths(model, self.forms.job), sizes(model, self.forms.job)
        shapes = [(length, height, width) for height, width in rows for length in columns]
        allocated = [self.forms.allocated(self.search, rung.strategy, shapes) for rung in rungs]
        for height, width in reversed(rows):  # what is encoded whole at a row's end is so at all that is smaller
            way = rungs[0].strategy if rungs else None
            if way is None or self.encoding((columns[-1], height, width), way) == way:
                break
        card = self.search.question.gpu
        beside = card.context_bytes + kept_bytes(card, self.search.question.machine.torch)
        for rung in rungs:
            self._encoding[rung.strategy] = self._encode_bytes((columns[0], *rows[0]), rung.strategy) + beside
        # The largest first: who has the RAM there has it everywhere.
        cells: dict[Shape, Cell] = {}
        for index in reversed(range(len(shapes))):
            cells[shapes[index]] = self._cell(shapes[index], rungs, [of_rung[index] for of_rung in allocated])
        table = tuple(tuple(cells[(length, *size)] for length in columns) for size in rows)
        return Capacity(self.forms.objective.fields[0].removesuffix("_size"), columns, rows, tuple(rungs), table)

    def _cell(self, shape: Shape, rungs: Sequence[QuickEstimate], allocated: Sequence[int]) -> Cell:
        """As a search answers: what fits without loss, what fits, what is tight without loss, what is tight."""
        by_rung: dict[int, _CellEstimate] = {}
        for wanted in ("fits", "tight"):
            for index, (rung, nbytes) in enumerate(zip(rungs, allocated, strict=True)):
                if index not in by_rung:
                    by_rung[index] = self._estimate_cell(shape, rung, nbytes)
                if by_rung[index].verdict == wanted:
                    return _cell_of(shape, index, by_rung[index])
        return _cell_of(shape, None, min(by_rung.values(), key=lambda cell: cell.device_bytes))

    def _estimate_cell(self, shape: Shape, rung: QuickEstimate, allocated: int) -> _CellEstimate:
        question, strategy = self.search.question, rung.strategy
        outside, compiled = rung.device_bytes - rung.allocated_bytes, strategy.compile != "none"
        overhead = self._overheads.get(strategy) or self._usual()
        ends = overhead
        if strategy in self.forms.straight:
            ends = 1 - OFF_THE_LINE, max(overhead[1] * (1 + OFF_THE_LINE), VAE_OVERHEAD)
        best, worst = (margin.verdict(int(allocated * end) + outside, question.budget_bytes, compiled) for end in ends)
        guess = max(int(allocated * (sum(overhead) / 2)) + outside, self._encoding[strategy])
        if best == worst == "no" or not self.has_ram(shape, strategy):
            return _CellEstimate("no", guess)
        way = self.encoding(shape, strategy)
        if way is None:
            return _CellEstimate("no", guess)
        tiled = way != strategy
        if best == worst:
            return _CellEstimate(best, guess, tiled=tiled)
        try:
            estimate = self.search.fresh_estimate(self.forms.at(shape), way)
        except NotEstimatedError:
            return _CellEstimate("no", guess)
        seen = reserved_bytes(estimate) / allocated
        self._overheads[strategy] = max(1.0, seen - OVERHEAD_SPREAD), seen + OVERHEAD_SPREAD
        self._most_overhead[strategy] = max(seen, self._most_overhead.get(strategy, 1.0))
        return _CellEstimate(estimate.verdict, estimate.peak.device_bytes, True, tiled)

    def _usual(self) -> tuple[float, float]:
        seen = self._most_overhead.values()
        return (max(1.0, min(seen) - OTHERS_SPREAD), max(seen) + OTHERS_SPREAD) if seen else UNKNOWN_OVERHEAD


def reserved_bytes(estimate: Estimate) -> int:
    """The highest reserved bytes of all phases but encoding."""
    return max(estimate.phases[phase].reserved_bytes for phase in estimate.phases if phase != "encode")


def _at_most(limit: int, shape: Shape, priced: BytesByExtent, price: Callable[[], int]) -> bool:
    """Whether a shape needs at most that much, by what larger or smaller ones need, or else priced itself."""
    length, area = shape[0], shape[1] * shape[2]
    if any(nbytes <= limit for at, nbytes in priced.items() if at[0] >= length and at[1] >= area):
        return True
    if any(nbytes > limit for at, nbytes in priced.items() if at[0] <= length and at[1] <= area):
        return False
    priced[length, area] = price()
    return priced[length, area] <= limit
