"""diffusion-pipe's models and datasets, in its words and in ours."""

from __future__ import annotations

import re
from typing import Any

from planner.catalog import lookup
from planner.dialects.base.bindings import (
    Fields,
    Inexpressible,
    NotSaidError,
    Settings,
)
from planner.dialects.base.launchers import known_model
from planner.dialects.base.values import listed, whole
from planner.errors import VplanError, quoted
from planner.spec.job import Bucket

AT = "diffusion-pipe 8f83dbf"
TYPES: dict[str, tuple[str, str]] = {
    "wan2.1-t2v-1.3b": ("wan", "ckpt_path"),
    "wan2.1-t2v-14b": ("wan", "ckpt_path"),
    "wan2.1-i2v-14b-480p": ("wan", "ckpt_path"),
    "wan2.1-i2v-14b-720p": ("wan", "ckpt_path"),
    "wan2.2-t2v-a14b": ("wan", "ckpt_path"),
    "wan2.2-i2v-a14b": ("wan", "ckpt_path"),
    "wan2.2-ti2v-5b": ("wan", "ckpt_path"),
    "hunyuan-video": ("hunyuan-video", "ckpt_path"),
    "flux.1-dev": ("flux", "diffusers_path"),
    "flux.1-kontext-dev": ("flux", "diffusers_path"),
    "ltx-video-2b": ("ltx-video", "diffusers_path"),
    "ltx-video-13b": ("ltx-video", "diffusers_path"),
    "qwen-image": ("qwen_image", "diffusers_path"),
    "qwen-image-edit": ("qwen_image", "diffusers_path"),
    "sd3.5-medium": ("sd3", "diffusers_path"),
    "sd3.5-large": ("sd3", "diffusers_path"),
    "sdxl": ("sdxl", "checkpoint_path"),
}
"""Model -> ``[model] type`` and the key that names its weights (docs/supported_models.md)."""

PATHS = ("ckpt_path", "diffusers_path", "checkpoint_path", "transformer_path", "single_file_path")
WHICH = ("config:model.type", *(f"config:model.{name}" for name in PATHS))
EXPERTS = ("low", "high")


def model_of(given: Settings) -> Fields:
    """The model that the settings mean, and its expert."""
    kind = given.get("config:model.type")
    candidates = [name for name, (own, _) in TYPES.items() if own == kind]
    if not candidates:
        raise VplanError(f"model.type {quoted(kind)} is not supported here", f"supported: {', '.join(TYPES)}")
    paths = [given.get(f"config:model.{name}") for name in PATHS]
    named = given.get("model") or known_model(*reversed(paths), *paths)
    model = named if named in candidates else None
    if model is None and len(candidates) > 1:
        raise VplanError(
            f"cannot tell which {kind} model this is from {quoted(paths[0] or paths[1])}", "add --model NAME"
        )
    fields: Fields = {"model": model or candidates[0], "experts": None}
    if lookup.model(fields["model"]).experts > 1:
        fields["experts"] = "high" if "high" in str(given.get("config:model.transformer_path", "")).lower() else "low"
    return fields


def say_model(fields: Fields) -> Settings:
    """What names a model, or a NotSaidError."""
    model = fields["model"]
    if model not in TYPES:
        why = f"of the known models it trains {', '.join(TYPES)}"
        raise NotSaidError(Inexpressible("model", model, next(iter(TYPES)), why))
    kind, path = TYPES[model]
    said: Settings = {"config:model.type": kind, f"config:model.{path}": f"models/{model}"}
    if lookup.model(model).experts > 1:
        if fields["experts"] not in EXPERTS:
            why = "one run trains one expert (docs/supported_models.md, Wan2.2)"
            raise NotSaidError(Inexpressible("experts", fields["experts"], "low", why))
        said["config:model.transformer_path"] = f"models/{model}/{fields['experts']}_noise_model"
    return said


# ---- the dataset's file: size buckets, which say exactly what a sample is

BUCKETS = "dataset:size_buckets"
BATCH = "config:micro_batch_size_per_gpu"


def shape_of(given: Settings) -> Fields:
    """The size buckets, or the resolutions as squares with every frame bucket."""
    model = lookup.model(model_of(given)["model"])
    usual = model.shape
    rows = rows_of(given, BUCKETS)
    if not rows:
        sizes = rows_of(given, "dataset:resolutions") or [[usual.resolutions[0][1], usual.resolutions[0][0]]]
        frames = listed(given.get("dataset:frame_buckets") or (1 if "dataset" in given else usual.default_frames))
        rows = [[*(size if isinstance(size, list) else (size, size)), each] for size in sizes for each in frames]
    shapes = [_bucket(row, usual.size_multiple) for row in rows]
    worst = max(shapes, key=lambda one: (one.frames * one.height * one.width, one.frames))
    batches = [row[-1] if isinstance(row, list) and row else row for row in rows_of(given, BATCH)]
    batch = max(whole(each, "micro_batch_size_per_gpu") for each in batches or [given.get(BATCH, 1)])
    shape = {"frames": worst.frames, "height": worst.height, "width": worst.width, "batch_size": batch}
    return {**shape, "buckets": tuple(shapes) if len(shapes) > 1 else ()}


def _bucket(row: Any, step: int) -> Bucket:
    """[width, height, frames] as a bucket; sides are made multiples, as its buckets are."""
    if not isinstance(row, list) or len(row) != 3:
        raise VplanError(f"the size {quoted(row)} of the dataset is not understood", "write [width, height, frames]")
    width, height, frames = (whole(each, "a size of the dataset") for each in row)
    sides = {"width": width // step * step or step, "height": height // step * step or step}
    return Bucket.read({"frames": frames, **sides}, where="the dataset")


def rows_of(given: Settings, key: str) -> list[Any]:
    """The items of a list, which comes flat where they are lists themselves."""
    if isinstance(given.get(key), list):
        return list(given[key])
    return [value for name, value in given.items() if re.fullmatch(re.escape(key) + r"\[\d+\]", name)]


def say_shape(fields: Fields) -> Settings:
    """What says the samples' shapes, or a NotSaidError."""
    buckets = fields["buckets"]
    own = (fields["frames"], fields["height"], fields["width"])
    if any(bucket.batch_size for bucket in buckets) or len(buckets) == 1 or len(set(buckets)) < len(buckets):
        why = "size buckets share one batch size here"
        raise NotSaidError(Inexpressible("buckets", buckets, (), why))
    worst = max(buckets, key=lambda one: (one.frames * one.height * one.width, one.frames), default=None)
    if worst and (worst.frames, worst.height, worst.width) != own:
        wanted = {"frames": worst.frames, "height": worst.height, "width": worst.width}
        why = "the largest size bucket counts"
        raise NotSaidError(*(Inexpressible(name, fields[name], value, why) for name, value in wanted.items()))
    rows = [[bucket.width, bucket.height, bucket.frames] for bucket in buckets] or [[own[2], own[1], own[0]]]
    return {BUCKETS: rows, BATCH: fields["batch_size"]}
