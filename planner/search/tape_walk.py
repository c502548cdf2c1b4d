"""A tape walked at a shape, without laying it out: what each of its templates does to what is allocated.

The blocks in the middle of a model are alike, so a template is summed up once for all stretches that it stands for.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from planner.errors import VplanError
from planner.garbage_collection import recording_cache
from planner.layout.attention_kernel import copies_of_masks_of_numbers, padded_masks
from planner.tape.format import CATEGORIES, Growing, Tape, values_of
from planner.tape.levels import whole_blocks
from planner.tape.templates import TemplateColumns, columns_of, in_order, sections_of, target_block

WEIGHT, GRADIENT = CATEGORIES.index("weight"), CATEGORIES.index("gradient")

Weight = tuple[int, str, int]
"""(run, name in its block, bytes)"""


BlockOfRun = tuple[int, int]
"""(run, block)"""


class TemplateBytes(NamedTuple):
    """What a template allocates, bytes: all buffers, weights and gradients."""

    sizes: list[int]
    """by position, in the allocator's whole blocks; nothing for the workspaces of attention's kernels, nor for a mask
    beside its padded copy or such a copy of a mask of numbers"""
    weights: list[Weight]
    gradients: int


class LevelChange(NamedTuple):
    """How a stretch changes the allocated bytes: by how much in the end, and the most on the way."""

    rise: int
    most: int
    """the highest on the way"""
    inputs: int
    """what it frees of what other blocks made in forward, but for weights"""


class FreeingTemplate(NamedTuple):
    """A template with those whose buffers it frees, as blocks that are alike have them."""

    columns: TemplateColumns
    others: tuple[TemplateColumns, ...]
    places: list[int]
    """per event: where its size stands among those of ``columns`` and, negated, of ``others``, with a 0 behind all for
    what is freed by name"""
    inputs: list[int]
    """events that free what other blocks made in forward, but for weights"""
    masks: list[tuple[int, int]]
    """of what ``columns`` makes: (mask, its padded copy)"""
    copies: list[int]
    """of what ``columns`` makes: padded copies of masks of numbers"""

    @classmethod
    def of(cls, columns: TemplateColumns, freed: Sequence[tuple[TemplateColumns, bool]]) -> FreeingTemplate:
        """``freed``: the template that made it, and whether in another block's forward."""
        others = tuple(other for other, _ in freed)
        starts = list(itertools.accumulate((len(each.sizes) for each in (columns, *others)), initial=0))
        places = list(map(operator.add, map(starts.__getitem__, columns.origins), columns.positions))
        for at in (at for tensors in columns.named.values() for at, position, _ in tensors if position < 0):
            places[at] = starts[-1]
        inputs = [
            event
            for event, (origin, position) in enumerate(zip(columns.origins, columns.positions, strict=True))
            if origin and freed[origin - 1][1] and others[origin - 1].categories[position] != "weight"
        ]
        masks, copies = padded_masks(columns.ops), copies_of_masks_of_numbers(columns.ops)
        return cls(columns, others, places, inputs, masks, copies)


class TapeOrder(NamedTuple):
    """A piece of a tape in order, at whatever shape: its stretches, of which most do the same as others."""

    piece: str
    templates: tuple[FreeingTemplate, ...]
    """each template with what it frees, by when it first runs"""
    indices: list[int]
    """of every stretch, the index of its template"""
    counts: dict[int, int]
    """index of a template -> how many stretches it is"""
    last_template: dict[BlockOfRun, int]
    """block -> the index of its last stretch's template"""
    forward: tuple[BlockOfRun, ...]
    """blocks that run forward, in order"""
    backward: dict[BlockOfRun, list[int]]
    """block -> the places of the stretches that run it backward"""

    def template_of(self, place: int) -> FreeingTemplate:
        """The template of a stretch."""
        return self.templates[self.indices[place]]


@recording_cache(maxsize=256)
def order_of(tape: Tape, piece: str) -> TapeOrder:
    """A piece of a tape, worked out once for all shapes. A VplanError where its events free what is not there."""
    sections, block_counts = sections_of(tape, piece), [run.count for run in tape.runs]
    index_of: dict[tuple[object, ...], int] = {}
    columns_by_section: list[dict[int, TemplateColumns]] = []
    templates: list[FreeingTemplate] = []
    indices: list[int] = []
    last: dict[BlockOfRun, int] = {}
    forward: dict[BlockOfRun, None] = {}
    backward: dict[BlockOfRun, list[int]] = {}
    try:
        for section in sections:
            run = section.run
            here: dict[int, TemplateColumns] = {}
            columns_by_section.append(here)
            for block, template in in_order(section, block_counts):
                columns = here[block] = columns_of(template, tape)
                freed = []
                for back, mode, to in columns.bases:
                    other = sections[len(columns_by_section) - 1 - back]
                    at = target_block(mode, to, other.run, block, block_counts)
                    is_input = other.passes == "forward" and other.run is not None and (other.run, at) != (run, block)
                    freed.append((columns_by_section[-1 - back][at], is_input))
                key = (id(columns), *((id(other), is_input) for other, is_input in freed))
                if key not in index_of:
                    index_of[key] = len(templates)
                    templates.append(FreeingTemplate.of(columns, freed))
                if run is not None:
                    last[run, block] = index_of[key]
                    if section.passes == "forward":
                        forward[run, block] = None
                    elif section.passes == "backward":
                        backward.setdefault((run, block), []).append(len(indices))
                indices.append(index_of[key])
    except (KeyError, IndexError) as error:
        raise _not_there(tape, piece, error) from None
    return TapeOrder(piece, tuple(templates), indices, Counter(indices), last, tuple(forward), backward)


def _not_there(tape: Tape, piece: str, error: LookupError) -> VplanError:
    return tape.damaged(f"{piece} refers to {error.args[0]}, which is not there")


class Levels(NamedTuple):
    """Allocated bytes along a piece."""

    peaks: list[int]
    """of every stretch, the most on its way"""
    end: int


class TapeWalk:
    """A tape at a shape, with what each of its templates was found to do."""

    def __init__(self, tape: Tape, grid: Mapping[str, int], bare: bool) -> None:
        self.tape = tape
        self.bare = bare
        values = tape.values(grid)
        assert not tape.growing, "only the chunks of a VAE grow"
        self.sizes = values_of((size for size in tape.sizes if not isinstance(size, Growing)), values)
        self.whole = list(map(whole_blocks, self.sizes))
        self.trained: set[tuple[int, str]] = set()
        """(run, name in its block)"""
        self._allocated: dict[int, TemplateBytes] = {}
        self._changes: dict[int, LevelChange] = {}
        self._named: dict[tuple[int, int, str], int] = {}
        """(category, run, name in its block) -> bytes: the blocks of a run are alike."""

    def levels(self, order: TapeOrder, start: int) -> Levels:
        """The levels of a piece that begins at ``start`` bytes. A VplanError for a tape whose events free what is not
        there."""
        changes: list[LevelChange] = []
        try:
            for template in order.templates:  # in order: what is freed by name is the latest of that name
                self.allocated_by(template)
                changes.append(self.change_by(template))
        except KeyError as error:
            raise _not_there(self.tape, order.piece, error) from None
        peaks, level = [], start
        for index in order.indices:
            peaks.append(level + changes[index].most)
            level += changes[index].rise
        return Levels(peaks, level)

    def allocated_by(self, template: FreeingTemplate) -> TemplateBytes:
        """What a template allocates."""
        columns = template.columns
        if id(columns) not in self._allocated:
            sizes = list(map(self.whole.__getitem__, columns.sizes))
            for position, _ in columns.kernels:
                sizes[position] = 0
            for mask, copy in template.masks:  # which the mask itself may stand for
                sizes[mask], sizes[copy] = 0, sizes[mask]
            for copy in template.copies:  # which others may do without
                sizes[copy] = 0
            weights, gradients = [], 0
            for (category, _, run, _), tensors in columns.named.items():
                for _, position, leaf in tensors:
                    if position < 0:
                        continue
                    nbytes = self.sizes[columns.sizes[position]]
                    if self.bare and category in (WEIGHT, GRADIENT):
                        sizes[position] = nbytes = 0
                    self._named[category, run, leaf] = nbytes
                    if category == WEIGHT:
                        weights.append((run, leaf, nbytes))
                    elif category == GRADIENT:
                        self.trained.add((run, leaf))
                        gradients += nbytes
            self._allocated[id(columns)] = TemplateBytes(sizes, weights, gradients)
        return self._allocated[id(columns)]

    def change_by(self, template: FreeingTemplate) -> LevelChange:
        """What a template does that frees what others made. They, and it, were asked of `allocated_by` before."""
        if id(template) not in self._changes:
            own = self._allocated[id(template.columns)].sizes
            others = (map(operator.neg, self._allocated[id(other)].sizes) for other in template.others)
            pool = [*own, *itertools.chain.from_iterable(others), 0]
            changes = list(map(pool.__getitem__, template.places))
            for (category, _, run, _), tensors in template.columns.named.items():
                for at, position, leaf in tensors:
                    if position < 0:
                        changes[at] = -whole_blocks(self._named[category, run, leaf])
            levels = list(itertools.accumulate(changes))
            rise, most = (levels[-1], max(levels)) if levels else (0, 0)
            self._changes[id(template)] = LevelChange(rise, most, -sum(map(changes.__getitem__, template.inputs)))
        return self._changes[id(template)]
