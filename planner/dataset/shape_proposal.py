"""Proposes the shapes of a plan from the clips that it will train on (`--buckets auto`).

The candidates combine the sizes and lengths of all clips: a clip's aspect ratio at no more pixels than requested,
rounded to a size that the model takes, and its length at the model's frame rate, rounded down to one that it takes.
Shapes are chosen greedily, each time the one that adds most, until every clip fits a shape and a further one would add
less than `WORTH` of the data. `planner.dataset.buckets.assign` then assigns clips to shapes by the same measure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from planner.catalog.profiles import ModelProfile
from planner.dataset.buckets import Clip, kept_picture, model_fps, sampling_step
from planner.dataset.sources import DataSource
from planner.errors import VplanError
from planner.spec.job import Bucket

WORTH = 0.02
"""The least that a further shape must add to what is kept, as a share of all data."""

MOST = 12
"""The most shapes that are proposed: each one must fit, and a micro-batch has samples of a single shape."""

MOST_ASPECTS, MOST_LENGTHS = 16, 16
"""How many of the most common sizes and lengths are considered."""


def propose(
    clips: Sequence[tuple[Clip, DataSource]], model: ModelProfile, pixels: int, longest: int
) -> tuple[Bucket, ...]:
    """The shapes for some clips, largest first. ``pixels``: the most per frame; ``longest``: the most frames. Raises a
    VplanError if the model takes none of the clips."""
    kinds = Counter((_usable(clip, model, source), clip.height, clip.width) for clip, source in clips)
    lengths = [length for length in (_length(usable, model, longest) for usable, _, _ in kinds) if length]
    if not lengths:
        raise VplanError(f"{model.title} takes none of these clips: they are too short", "add longer ones")
    sizes = Counter({_size(height, width, model, pixels): count for (_, height, width), count in kinds.items()})
    shapes = [
        Bucket(frames=frames, height=height, width=width)
        for frames, _ in Counter(lengths).most_common(MOST_LENGTHS)
        for (height, width), _ in sizes.most_common(MOST_ASPECTS)
    ]
    shapes += [shapes[0].replace(frames=min(lengths))] if min(lengths) < min(shape.frames for shape in shapes) else []
    return tuple(sorted(_cover(kinds, shapes), key=lambda shape: shape.pixels, reverse=True))


def _cover(kinds: Counter[tuple[int, int, int]], shapes: Iterable[Bucket]) -> list[Bucket]:
    """Chooses shapes greedily, as the module docstring says; at most `MOST`."""
    kept = {shape: {kind: _kept(kind, shape) for kind in kinds} for shape in dict.fromkeys(shapes)}
    best = dict.fromkeys(kinds, 0.0)
    chosen: list[Bucket] = []

    def gain(shape: Bucket) -> float:
        return sum(max(0.0, kept[shape][kind] - best[kind]) * count for kind, count in kinds.items())

    while len(chosen) < MOST:
        further = max(kept, key=lambda shape: (gain(shape), shape.pixels))
        adds = gain(further)
        first = any(not best[kind] and kept[further][kind] for kind in kinds)  # takes clips that no chosen shape does
        if adds < WORTH * kinds.total() and not first:
            short = [kind for kind in kinds if not best[kind] and any(kept[shape][kind] for shape in kept)]
            if not short:
                break
            further = max(kept, key=lambda shape: (kept[shape][short[0]], shape.pixels))
        chosen.append(further)
        best = {kind: max(share, kept[further][kind]) for kind, share in best.items()}
    return chosen


def _kept(kind: tuple[int, int, int], shape: Bucket) -> float:
    """The share that a shape keeps of a clip (usable frames, height, width); 0 if the clip is too short."""
    usable, height, width = kind
    return kept_picture(height, width, shape) * shape.frames / usable if shape.frames <= usable else 0.0


def _usable(clip: Clip, model: ModelProfile, source: DataSource) -> int:
    """Frames of a clip at its sampling rate."""
    step = sampling_step(clip, source, model_fps(model))
    return int((clip.frames - 1) / step) + 1


def _length(usable: int, model: ModelProfile, longest: int) -> int:
    """The most frames, up to ``usable`` and ``longest``, that the model takes; 0 if it takes no clip so short."""
    rules = model.shape
    frames = rules.cut(min(usable, longest))
    if frames == 1 and model.kind == "video" and usable > 1 and rules.min_frames > 1:
        return 0
    return frames if frames >= rules.min_frames else 0


def _size(height: int, width: int, model: ModelProfile, pixels: int) -> tuple[int, int]:
    """The (height, width) to train a picture at: its aspect ratio, at its own size or shrunk to ``pixels``, rounded to
    multiples that the model takes without exceeding ``pixels``. If the model only takes listed sizes, the best of
    these."""
    if model.shape.only_listed:
        picture = Bucket(frames=1, height=height, width=width)
        return max(model.shape.resolutions, key=lambda size: kept_picture(size[0], size[1], picture))
    multiple = model.shape.size_multiple
    scale = min(1.0, math.sqrt(pixels / (height * width)))
    high, wide = (max(1, round(side * scale / multiple)) for side in (height, width))
    while high * wide * multiple**2 > max(pixels, multiple**2) and max(high, wide) > 1:
        high, wide = (high - 1, wide) if high >= wide else (high, wide - 1)
    return high * multiple, wide * multiple
