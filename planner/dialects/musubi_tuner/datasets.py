"""The dataset's file of musubi-tuner, in its words and in ours, read at 30c658c."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from planner.catalog import lookup
from planner.catalog.profiles import ModelProfile
from planner.dialects.base.bindings import Fields, InexpressibleError, Settings, UnsupportedValue
from planner.dialects.base.values import as_list, integer
from planner.dialects.kohya import dataset_tables
from planner.dialects.musubi_tuner.models import AT, model_of
from planner.errors import VplanError
from planner.spec.job import MAX_SIDE, Bucket

SIZE, BATCH = "dataset:general.resolution", "dataset:general.batch_size"
FRAMES, EXTRACTION = "dataset:datasets[0].target_frames", "dataset:datasets[0].frame_extraction"
SHAPE = ("frames", "height", "width", "batch_size", "buckets")
LONGEST = 129
"""``max_frames`` of datasets that take whole clips (dataset/config_utils.py)."""

IMAGES = ("image_directory", "image_jsonl_file")
"""Keys of a dataset of images, whatever the model (dataset/config_utils.py:231)."""

VIDEOS = ("video_directory", "video_jsonl_file")
SHORTEST = 1
"""``target_frames`` of a dataset of clips that does not say them (dataset/config_utils.py:68)."""

STEP = 16
"""Pixels that the sides of buckets are whole steps of, for every model that is priced (dataset/bucket.py
``ARCHITECTURE_STEPS_MAP``)."""


def shape_of(settings: Settings) -> Fields:
    """The fields of the samples' shapes (frames, height, width, batch, buckets) that the settings mean: those of every
    dataset of the file. Images are one frame, of a video model too."""
    model = lookup.model(model_of(settings)["model"])
    tables = dataset_tables.tables(settings)
    return dataset_tables.fields_of([shape for table in tables for shape in _shapes(settings, table, model)])


def changed_shape(settings: Settings, before: Fields, after: Fields) -> Settings | None:
    """What of the file says other sizes and batches of several datasets (`dataset_tables.changed`)."""
    model = lookup.model(model_of(settings)["model"])
    return dataset_tables.changed(settings, before, after, lambda table: _shapes(settings, table, model), {})


def _shapes(settings: Settings, table: str, model: ModelProfile) -> list[Bucket]:
    """The shapes of one dataset's samples, with its batch size."""

    def key(name: str) -> Any:
        return dataset_tables.value(settings, table, name, {})

    size = as_list(key("resolution") or [model.shape.resolutions[0][1], model.shape.resolutions[0][0]])
    width, height = (integer(side, "resolution") for side in (size[0], size[-1]))
    images = model.kind == "image" or any(key(name) for name in IMAGES)
    width, height = bucket_of(width, height, not images or bool(key("enable_bucket")))
    shape = {"height": height, "width": width, "batch_size": integer(key("batch_size") or 1, "batch_size")}
    lengths = [1] if images else _lengths(settings, table, model)
    return [Bucket.read({"frames": length, **shape}, "the dataset") for length in lengths]


def _lengths(settings: Settings, table: str, model: ModelProfile) -> list[int]:
    """Frames of a dataset's clips, rounded as the trainer rounds them (dataset/image_video_dataset.py
    ``rounded_target_frames``)."""

    def key(name: str) -> Any:
        return dataset_tables.value(settings, table, name, {})

    if key("frame_extraction") == "full":
        lengths = [integer(key("max_frames") or LONGEST, "max_frames")]
    else:
        given = key("target_frames") or (SHORTEST if any(key(name) for name in VIDEOS) else model.shape.default_frames)
        lengths = [integer(length, "target_frames") for length in as_list(given)]
    return sorted({model.shape.cut(length) for length in lengths})


def bucket_of(width: int, height: int, bucketed: bool) -> tuple[int, int]:
    """Width and height of a resolution of whole steps, which is its own largest bucket; else those of the largest, and
    of several the one most like it in shape: each sample goes to the one of its own shape, and they have as many pixels
    at most (dataset/bucket.py ``BucketSelector``). Clips are always put into buckets (dataset/image_video_dataset.py
    ``VideoDataset.retrieve_latent_cache_batches``). ``bucketed``: whether this dataset is; raises a VplanError where
    its images are cut to the size as it is."""
    if width % STEP == height % STEP == 0 or max(width, height) > MAX_SIDE:
        return width, height
    if not bucketed:
        fault = f"resolution [{width}, {height}] is not made of whole steps of {STEP} pixels, and enable_bucket is off"
        near = [side // STEP * STEP or STEP for side in (width, height)]
        raise VplanError(
            f"{fault}: images are cut to it as it is, which is not priced ({AT})",
            f"use {near}, or enable_bucket = true",
        )

    def pixels_and_likeness(size: tuple[int, int]) -> tuple[int, float]:
        return size[0] * size[1], -abs(size[0] / size[1] - width / height)

    buckets = list(_buckets(width * height))
    if not buckets:
        raise VplanError(f"resolution [{width}, {height}] is less than one step of {STEP} pixels", "use a larger one")
    return max(buckets, key=pixels_and_likeness)


def _buckets(area: int) -> Iterator[tuple[int, int]]:
    side = math.isqrt(area)
    for one in range(max(STEP, side // 2 // STEP * STEP), side + STEP, STEP):
        other = area // one // STEP * STEP
        if other:
            yield from ((one, other), (other, one))


def notes(settings: Settings, fields: Fields) -> Iterator[str]:
    """How the datasets' sizes are read, in words."""
    model = lookup.model(fields["model"])
    for table in dataset_tables.tables(settings):
        said = [
            integer(side, "resolution")
            for side in as_list(dataset_tables.value(settings, table, "resolution", {}) or 0)
        ]
        width, height = said[0], said[-1]
        if width % STEP or height % STEP:
            shape = _shapes(settings, table, model)[0]
            what = f"buckets of whole steps of {STEP} pixels with as many pixels at most"
            largest = f"the largest, {shape.width}x{shape.height}, is priced"
            yield f"resolution [{width}, {height}] stands for {what}: {largest}"
    if any(each.batch_size for each in fields["buckets"]):
        each = [_in_words(shape) for shape in fields["buckets"]]
        yield f"datasets of {', '.join(each)}: the one that needs most is priced"


def _in_words(shape: Bucket) -> str:
    frames = f"{shape.frames} frames of " if shape.frames > 1 else ""
    return f"{frames}{shape.height}x{shape.width} at batch {shape.batch_size}"


def dataset_key(settings: Settings, key: str) -> Any:
    """The value of a key of the dataset's file, of the first dataset or else of the general section; None when it is
    absent."""
    return settings.get(f"dataset:datasets[0].{key}", settings.get(f"dataset:general.{key}"))


def write_shape(fields: Fields) -> Settings:
    """The settings for the samples' shapes. Raises an InexpressibleError for buckets that the trainer cannot be
    told."""
    sizes = {(bucket.height, bucket.width) for bucket in fields["buckets"]}
    lengths = sorted(bucket.frames for bucket in fields["buckets"]) or [fields["frames"]]
    odd = len(sizes) > 1 or any(bucket.batch_size for bucket in fields["buckets"]) or len(set(lengths)) < len(lengths)
    image = lookup.model(fields["model"]).kind == "image"
    if odd or (sizes and (sizes != {(fields["height"], fields["width"])} or image or len(lengths) == 1)):
        why = "a dataset has one size and one batch size, with several lengths"
        raise InexpressibleError(UnsupportedValue("buckets", fields["buckets"], (), why))
    if fields["frames"] != lengths[-1]:
        raise InexpressibleError(UnsupportedValue("frames", fields["frames"], lengths[-1], "the longest bucket counts"))
    settings: Settings = {SIZE: [fields["width"], fields["height"]], BATCH: fields["batch_size"]}
    return settings if image else settings | {FRAMES: lengths}
