"""diffusion-pipe's evaluation: the loss on held-out sets, by forward passes alone, at the sizes of each set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from planner.dialects.base.bindings import Fields, Settings
from planner.dialects.base.script import Script
from planner.dialects.diffusion_pipe.models import AT, BATCH, IMAGE_BATCH, shape_of
from planner.spec.job import Bucket
from planner.untrusted import flat

EVALUATED = "config:eval_datasets"
READ = "evaluation:"
"""Before the settings of an evaluation set's file, with its name: `evaluation:NAME:resolutions`."""


def is_given(settings: Settings) -> bool:
    """Whether a run evaluates."""
    return bool(settings.get(EVALUATED)) or any(key.startswith(f"{EVALUATED}[") for key in settings)


def sets_of(config: dict[str, Any], script: Script) -> Settings:
    """The settings of the files of all evaluation sets, which a config lists by path, or by name and path (train.py
    ``eval_data_map``); None for a file that is not here."""
    settings: Settings = {}
    listed = config.get("eval_datasets")
    for number, item in enumerate(listed if isinstance(listed, list) else ()):
        named = item if isinstance(item, dict) else {"name": f"eval{number}", "config": item}
        path = str(named.get("config", ""))
        data = script.document(path) if path else None
        prefix = f"{READ}{str(named.get('name', number)).replace(':', ' ')}:"
        settings |= {prefix: path} if data is None else {prefix + key: value for key, value in flat(data, path).items()}
    return settings


def notes(settings: Settings, fields: Fields) -> Iterator[str]:
    """What evaluation takes beside a training step: it keeps nothing for a backward pass, and at samples that are no
    larger it takes less. What it takes at larger ones is not estimated."""
    trained = max(map(_numbers, _shapes(fields)))
    for name in dict.fromkeys(key.split(":")[1] for key in settings if key.startswith(READ)):
        prefix = f"{READ}{name}:"
        if prefix in settings:
            what = f"eval_datasets: {settings[prefix]} is not here (it can be passed too), and {name} is not estimated"
            yield f"{what}: where its samples are larger than those that train, it may take more than this"
            continue
        largest = max(_shapes(_fields_of(settings, prefix)), key=_numbers)
        size = f"{largest.frames} frames of {largest.height}x{largest.width}, batch {largest.batch_size}"
        if _numbers(largest) > trained:
            what = f"eval_datasets: {name} is evaluated at {size}, more than any batch that trains"
            yield f"{what}: its forward passes are not estimated, and may take more than this ({AT} train.py)"
        else:
            yield f"eval_datasets: {name} is evaluated at {size}: forward passes alone, of no more than a step trains"


def _fields_of(settings: Settings, prefix: str) -> Fields:
    """The fields of the shapes of an evaluation set, read as a dataset's; batches are its own where they are told."""
    others = {
        key: value for key, value in settings.items() if not key.startswith((READ, "dataset", BATCH, IMAGE_BATCH))
    }
    own = {f"dataset:{key.removeprefix(prefix)}": each for key, each in settings.items() if key.startswith(prefix)}
    return shape_of({**others, **own, **_batches(settings), "dataset": True})


def _batches(settings: Settings) -> Settings:
    """Batches of evaluation under the names of training's, which they are where no others are told; of images the
    batch is that of clips, unless one of their own is told (train.py ``eval_image_micro_batch_size_per_gpu``)."""
    trained = {key: value for key, value in settings.items() if key.startswith(BATCH)}
    clips, images = (_under(name, settings) for name in (BATCH, IMAGE_BATCH))
    clips = clips or trained
    return {**clips, **(images or {key.replace(BATCH, IMAGE_BATCH): value for key, value in clips.items()})}


def _under(name: str, settings: Settings) -> Settings:
    """What evaluation has under its own name of a setting, as a number or row by row."""
    own = name.replace("config:", "config:eval_")
    return {key.replace(own, name): value for key, value in settings.items() if key.startswith(own)}


def _shapes(fields: Fields) -> list[Bucket]:
    """All shapes of a job's fields, each with its batch."""
    batch = fields["batch_size"]
    if fields["buckets"]:
        return [each.replace(batch_size=each.batch_size or batch) for each in fields["buckets"]]
    return [Bucket.read({name: fields[name] for name in ("frames", "height", "width", "batch_size")})]


def _numbers(shape: Bucket) -> int:
    return shape.pixels * (shape.batch_size or 1)
