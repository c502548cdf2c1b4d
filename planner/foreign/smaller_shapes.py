"""Shorter clips and smaller sizes that fit where no option of a trainer is enough for a command."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from planner.dialects.base.bindings import Fixed, InexpressibleError
from planner.foreign.case import Case
from planner.foreign.change_words import changed_words
from planner.foreign.least_memory import LeastMemory
from planner.foreign.pricing import Pricing
from planner.foreign.smallest_change import Fix
from planner.search.objectives.objective import Objective, Value, frames, smaller_sizes
from planner.spec.job import Bucket, Job, ValidationShape

REPLAYS = 6
"""Shapes that are replayed, the largest first, before it is given up: each is smaller by twice as many steps."""

MUCH = 0.5
"""Of what was asked for: where less than this fits as the command is, what fits with its options is told too."""

COSTS = {"frames": "shorter clips", "resolution": "smaller pictures"}


@dataclass(frozen=True)
class Smaller:
    """An objective's values below those of a job, and the job with one of them: of several shapes those above it are
    cut to its frames, or left out for its size."""

    objective: Objective
    values: Sequence[Value]

    @property
    def cost(self) -> str:
        """What it is, in words."""
        return COSTS[self.objective.name]

    def size(self, job: Job) -> int:
        """The largest of a job's shapes, as the objective counts."""
        return max(self._size(shape) for shape in job.shapes)

    def put(self, job: Job, value: Value) -> Job:
        """The job with a value."""
        if not job.buckets:
            return self.objective.put(job, value)
        if isinstance(value, int):
            shapes = [each.replace(frames=min(each.frames, value)) for each in job.buckets]
        else:
            shapes = [each for each in job.buckets if self._size(each) <= self.objective.size(value)]
        distinct = tuple(dict.fromkeys(shapes))
        largest = max(distinct, key=lambda each: each.pixels)
        own = {name: side for name, side in largest.__dict__.items() if side is not None}
        return job.replace(**own, buckets=distinct if len(distinct) > 1 else ())

    def _size(self, shape: Bucket) -> int:
        return shape.frames if self.objective.name == "frames" else shape.height * shape.width


class Found(NamedTuple):
    """The largest value that fits, and the change of the command to it."""

    value: Value
    fix: Fix


def shapes(together: LeastMemory) -> Iterator[Fix]:
    """The longest clip and the largest size that fit with the command's other options as they are; where none does, or
    little is left, with as many of the changes that need least as are enough there."""
    case = _with_its_sample(together.case)
    for smaller in _kinds(case):
        as_it_is = _largest(case, smaller, together.pricing)
        left = smaller.size(as_it_is.fix.case.job) if as_it_is else 0
        if as_it_is is not None:
            yield as_it_is.fix
        if left < MUCH * smaller.size(case.job):
            found = _with_options(case, smaller, together)
            if found is not None and smaller.size(found.case.job) > left:
                yield found


def _kinds(case: Case) -> Iterator[Smaller]:
    """What may become smaller: the clips of a video, and the size."""
    model, job = case.model, case.job
    longest = max(shape.frames for shape in job.shapes)
    if model.kind == "video":
        clips = frames(model)
        yield Smaller(clips, clips.below(job.replace(frames=longest)))
    sizes = smaller_sizes(model, job)
    if job.buckets:
        areas = {shape.height * shape.width: (shape.height, shape.width) for shape in job.buckets}
        yield Smaller(sizes, [areas[area] for area in sorted(areas)[:-1]])
    else:
        yield Smaller(sizes, sizes.below(job))


def _with_its_sample(case: Case) -> Case:
    """The case with the shape of its validation sample said, where the trainer has settings for that: they stay where
    clips become shorter."""
    settable = {name for binding in case.dialect.bindings if not isinstance(binding, Fixed) for name in binding.fields}
    if case.job.validation is not None or case.strategy.validation_mode == "off" or "validation" not in settable:
        return case
    shape = ValidationShape.read({name: case.fields[name] for name in ("frames", "height", "width")})
    return replace(case, job=case.job.replace(validation=shape))


def _with_options(case: Case, smaller: Smaller, together: LeastMemory) -> Fix | None:
    """The largest value with all options that need less, and of these as many as are enough there."""
    if together.full is None:
        return None
    found = _largest(case.changed(together.full.changes), smaller, together.pricing)
    if found is None:
        return None
    there = _at(case, smaller, found.value)
    options = LeastMemory(there, found.fix.outcome, together.pricing, together.moves).enough(together.full)
    if options is None:
        return None
    return replace(options, change=(*found.fix.change, *options.change), cost=smaller.cost, costs={})


def _largest(case: Case, smaller: Smaller, pricing: Pricing) -> Found | None:
    """The largest value that fits: bisected on quick estimates, believed only when replayed."""
    values = smaller.values
    if not values or not pricing.may_be("fits", _at(case, smaller, values[0])):
        return None
    low, high = 1, len(values)  # how many values, from the smallest, may fit
    while low < high:
        middle = (low + high + 1) // 2
        may = pricing.may_be("fits", _at(case, smaller, values[middle - 1]))
        low, high = (middle, high) if may else (low, middle - 1)
    step = 1
    for _ in range(REPLAYS):
        if low <= 0:
            return None
        other = _at(case, smaller, values[low - 1])
        outcome = pricing.outcome(other)
        if outcome.estimate.verdict == "fits":
            return Found(values[low - 1], Fix(tuple(_words(case, other, smaller)), smaller.cost, False, other, outcome))
        low, step = low - step, step * 2
    return None


def _at(case: Case, smaller: Smaller, value: Value) -> Case:
    return replace(case, job=smaller.put(case.job, value))


def _words(case: Case, other: Case, smaller: Smaller) -> list[str]:
    """The flags of another shape; in words where the trainer takes it from its data."""
    fields = frozenset({*smaller.objective.fields, *(("buckets",) if case.job.buckets else ())})
    with contextlib.suppress(InexpressibleError):
        if words := list(changed_words(case, other.fields, fields)):
            return words
    largest = max(other.job.shapes, key=lambda each: each.height * each.width)
    most = "at most " if len(other.job.shapes) > 1 else ""
    if smaller.objective.name == "frames":
        return [f"{most}{smaller.size(other.job)} frames"]
    return [f"{most}{largest.height}x{largest.width} pixels"]
