"""Which shapes a capacity map shows: its columns and rows, by the model's own rules."""

from __future__ import annotations

import math

from planner.catalog.profiles import ModelProfile
from planner.search.objectives.objective import Objective, batch, frames
from planner.spec.job import Job

COLUMNS, ROWS = 12, 8
AREAS = (0.25, 0.4, 0.63, 1.0, 1.5, 2.25, 3.0, 4.0)
"""Rows of the map, as shares of the job's own pixels."""


def axis(model: ModelProfile) -> Objective:
    """The objective that a capacity map draws along: frames for a video model, batch size for an image model."""
    return frames(model) if model.kind == "video" else batch(model)


def usable(model: ModelProfile) -> list[int]:
    """The lengths a model takes (of an image model: the batches), rising."""
    return [value for value in axis(model).values if isinstance(value, int)]


def lengths(model: ModelProfile, job: Job) -> tuple[int, ...]:
    """The columns: evenly spread from the shortest to twice the usual or the job's own, which is among them."""
    values, own = usable(model), axis(model).read(job)
    assert isinstance(own, int)
    usual = model.shape.default_frames if model.kind == "video" else COLUMNS // 2
    last = sum(value <= 2 * max(own, usual) for value in values) - 1
    count = min(COLUMNS, last + 1)
    chosen = {values[round(index * last / max(count - 1, 1))] for index in range(count)}
    if own not in chosen:
        chosen.remove(min(chosen, key=lambda value: abs(value - own)))
    return tuple(sorted(chosen | {own}))


def sizes(model: ModelProfile, job: Job) -> tuple[tuple[int, int], ...]:
    """The rows: a quarter to four times the job's pixels in its own form, listed sizes where they are near."""
    if model.shape.only_listed:
        return tuple(sorted(set(model.shape.resolutions), key=lambda size: size[0] * size[1])[:ROWS])
    area, multiple = job.height * job.width, model.shape.size_multiple
    upright = [size for size in model.shape.resolutions if (size[0] > size[1]) == (job.height > job.width)]
    found = {(job.height, job.width)}
    for share in (share for share in AREAS if share != 1):
        scaled = [max(1, round(side * math.sqrt(share) / multiple)) * multiple for side in (job.height, job.width)]
        near = [size for size in upright if abs(size[0] * size[1] / (area * share) - 1) < 0.2]
        found.add(near[0] if near else (scaled[0], scaled[1]))
    return tuple(sorted(found, key=lambda size: (size[0] * size[1], size)))
