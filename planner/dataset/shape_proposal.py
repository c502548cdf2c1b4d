"""Proposes the shapes of a plan from the clips it is to be trained on: `--buckets auto`.

Every clip has a shape of its own that keeps most of it: its aspect at no more pixels than were asked for, its length at
the model's rate, both rounded down to what the model takes. Of all these the fewest are chosen that keep nearly as much
of the data together: one after the other the one that adds most, until no clip is left out and a further one adds less
than `WORTH` of the data. Which shape a clip then gets says `planner.dataset.buckets.assign`, by the same measure.
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
"""A further shape is proposed where it keeps this much more of all frames and pictures."""

MOST = 12
"""Shapes that are proposed at the most: each is one more that must fit, and a micro-batch has samples of one only."""

MOST_ASPECTS, MOST_LENGTHS = 16, 16
"""The commonest that are looked at."""


def propose(
    clips: Sequence[tuple[Clip, DataSource]], model: ModelProfile, pixels: int, longest: int
) -> tuple[Bucket, ...]:
    """The shapes for some clips, the largest first. ``pixels``: of one frame; ``longest``: frames, at most. A
    VplanError where the model takes none of the clips."""
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
    return tuple(sorted(_cover(kinds, shapes), key=_volume, reverse=True))


def _cover(kinds: Counter[tuple[int, int, int]], shapes: Iterable[Bucket]) -> list[Bucket]:
    """The shapes that keep most of the clips, chosen one by one."""
    kept = {shape: {kind: _kept(kind, shape) for kind in kinds} for shape in dict.fromkeys(shapes)}
    best = dict.fromkeys(kinds, 0.0)
    chosen: list[Bucket] = []

    def gain(shape: Bucket) -> float:
        return sum(max(0.0, kept[shape][kind] - best[kind]) * count for kind, count in kinds.items())

    while len(chosen) < MOST:
        further = max(kept, key=lambda shape: (gain(shape), _volume(shape)))
        adds = gain(further)
        first = any(not best[kind] and kept[further][kind] for kind in kinds)  # of clips that no other shape takes
        if adds < WORTH * kinds.total() and not first:
            short = [kind for kind in kinds if not best[kind] and any(kept[shape][kind] for shape in kept)]
            if not short:
                break
            further = max(kept, key=lambda shape: (kept[shape][short[0]], _volume(shape)))
        chosen.append(further)
        best = {kind: max(share, kept[further][kind]) for kind, share in best.items()}
    return chosen


def _kept(kind: tuple[int, int, int], shape: Bucket) -> float:
    """The share of such a clip that a shape keeps; 0 where it is longer than the clip."""
    usable, height, width = kind
    return kept_picture(height, width, shape) * shape.frames / usable if shape.frames <= usable else 0.0


def _usable(clip: Clip, model: ModelProfile, source: DataSource) -> int:
    """Frames of a clip at the rate at which it is sampled."""
    step = sampling_step(clip, source, model_fps(model))
    return int((clip.frames - 1) / step) + 1


def _length(usable: int, model: ModelProfile, longest: int) -> int:
    """The most frames that the model takes of so many; 0 where it takes none."""
    rules = model.shape
    frames = rules.cut(min(usable, longest))
    if frames == 1 and model.kind == "video" and usable > 1 and rules.min_frames > 1:
        return 0
    return frames if frames >= rules.min_frames else 0


def _size(height: int, width: int, model: ModelProfile, pixels: int) -> tuple[int, int]:
    """The height and width that a picture is trained at: its aspect, at no more pixels than it has or than were asked
    for, in multiples that the model takes; of those that it lists where it takes no other."""
    if model.shape.only_listed:
        picture = Bucket(frames=1, height=height, width=width)
        return max(model.shape.resolutions, key=lambda size: kept_picture(size[0], size[1], picture))
    multiple = model.shape.size_multiple
    scale = min(1.0, math.sqrt(pixels / (height * width)))
    high, wide = (max(1, round(side * scale / multiple)) for side in (height, width))
    while high * wide * multiple**2 > max(pixels, multiple**2) and max(high, wide) > 1:
        high, wide = (high - 1, wide) if high >= wide else (high, wide - 1)
    return high * multiple, wide * multiple


def _volume(shape: Bucket) -> int:
    return shape.frames * shape.height * shape.width
