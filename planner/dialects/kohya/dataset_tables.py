"""The datasets of kohya's trainers: a file of `[general]` and several `[[datasets]]`, each with its own size and batch.

A key that a dataset has not is that of `[general]`, else a flag's (sd-scripts 48d368f library/config_util.py
``generate_params_by_fallbacks``; musubi-tuner 30c658c dataset/config_utils.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from planner.dialects.base.bindings import Fields, InexpressibleError, Settings, UnsupportedValue
from planner.spec.job import Bucket

DATASET = "dataset:"
GENERAL = f"{DATASET}general"
_TABLE = re.compile(rf"({DATASET}datasets\[(\d+)\])\.")

Flags = Mapping[str, str]
"""Key -> the flag that says it where the file does not."""


def tables(settings: Settings) -> list[str]:
    """What the names of the settings of each dataset begin with, in the file's order; ``dataset:general`` where it has
    none."""
    numbers = {int(match[2]): match[1] for match in map(_TABLE.match, settings) if match}
    return [numbers[number] for number in sorted(numbers)] or [GENERAL]


def where(settings: Settings, table: str, key: str, flags: Flags) -> str:
    """The setting that says a dataset's key: its own, that of all, a flag; its own where none does."""
    own = f"{table}.{key}"
    places = (own, f"{GENERAL}.{key}", flags.get(key, ""))
    return next((place for place in places if settings.get(place) is not None), own)


def value(settings: Settings, table: str, key: str, flags: Flags) -> Any:
    """What is said of a dataset's key; None where nothing is."""
    return settings.get(where(settings, table, key, flags))


def fields_of(shapes: Sequence[Bucket]) -> Fields:
    """The fields of the samples' shapes, of several datasets: as the largest, and buckets where they are not all alike,
    which have a batch of their own where these are not."""
    distinct = tuple(dict.fromkeys(shapes))
    largest = max(distinct, key=lambda each: (each.pixels, each.batch_size or 1))
    alike = len({each.batch_size for each in distinct}) == 1
    buckets = tuple(each.replace(batch_size=None) for each in distinct) if alike else distinct
    return {**largest.__dict__, "buckets": buckets if len(distinct) > 1 else ()}


def changed(
    settings: Settings, before: Fields, after: Fields, shape_of: Callable[[str], Sequence[Bucket]], flags: Flags
) -> Settings | None:
    """The settings of a file of several datasets that other sizes and batches change, each where it is said; None of a
    file of one. ``shape_of``: the shapes of a dataset, by what its settings begin with. Raises an InexpressibleError
    where datasets would be left out, or their clips become shorter, which is said in words."""
    datasets = tables(settings)
    if len(datasets) < 2:
        return None
    old, new = _shapes(before), _shapes(after)
    pairs = dict(zip(old, new, strict=False))
    written: Settings = {}
    for table in datasets:
        for shape in shape_of(table):
            other = pairs.get(shape)
            if len(old) != len(new) or other is None or other.frames != shape.frames:
                why = "each of its datasets has a shape of its own"
                raise InexpressibleError(UnsupportedValue("buckets", after["buckets"], before["buckets"], why))
            sides, batch = (other.height, other.width), other.batch_size
            if sides != (shape.height, shape.width):
                written[where(settings, table, "resolution", flags)] = [other.width, other.height]
            if batch != shape.batch_size:
                written[where(settings, table, "batch_size", flags)] = batch
    return written


def _shapes(fields: Fields) -> list[Bucket]:
    own = Bucket.read({name: fields[name] for name in ("frames", "height", "width", "batch_size")})
    batch = fields["batch_size"]
    return [each.replace(batch_size=each.batch_size or batch) for each in fields["buckets"]] or [own]
