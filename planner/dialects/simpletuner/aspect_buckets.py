"""Sizes that SimpleTuner trains: the buckets that it makes of a set's resolution, both ways, read at bc8e6ab.

A bucket has the area of a square, whose side is rounded to ``aspect_bucket_alignment``, and sides that are rounded so
too (helpers/multiaspect/image.py ``calculate_new_size_by_pixel_area``). Which there are follows from the samples,
unless a set is cropped to aspects of its own (``crop_aspect`` "closest"), of which one may stand alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from planner.catalog import lookup
from planner.dialects.base.bindings import Fields, InexpressibleError, Settings, UnsupportedValue
from planner.dialects.base.values import as_list, integer, number
from planner.dialects.simpletuner.models import CONFIG, family_of, model_of, of, written
from planner.errors import VplanError, quoted

DATASET = "dataset:"
"""The first set of the data file, as it is written."""

BUCKETS = f"{DATASET}crop_aspect_buckets"

SAMPLES = "data:samples"
"""[resolution, resolution_type, frames, aspects] of each set of ``data_backend_config``, None where it does not say."""

NOT_FOUND = "data:not-found"
"""That the data file which the config names is not here, and how to pass it."""

VALIDATED_FRAMES = "validation_num_video_frames"

ALIGNMENT = "aspect_bucket_alignment"
USUAL_ALIGNMENT = 64
FORCED = {
    **dict.fromkeys(("flux", "sdxl", "sd1x", "sd2x", "sd3", "lumina2", "hidream", "sana", "ltxvideo", "ltxvideo2"), 64),
    **dict.fromkeys(("qwen_image", "wan"), 32),
    **dict.fromkeys(("anima", "flux2"), 16),
}
"""``model_family`` -> the ``aspect_bucket_alignment`` that it has whatever the config says, of those that do not take
it from there (``check_user_config`` in helpers/models/*/model.py)."""

FORCED_OF_FLAVOUR = {"ti2v-5b-2.2": 64}
"""The same of a ``model_flavour`` (helpers/models/wan/model.py)."""

ALIGNMENTS = (64, 32, 16)
"""Those that are tried for a size (field_registry/sections/advanced.py has 24 and 8 too)."""

FRAME_STEPS = {"wan": 8, "sanavideo": 8, "ltxvideo": 8, "ltxvideo2": 8}
"""``model_family`` -> n of the n * k + 1 frames that it cuts clips to, where it is more than its VAE joins
(``adjust_video_frames`` in helpers/models/{wan,sanavideo,ltxvideo,ltxvideo2}/model.py)."""


def size_of(settings: Settings) -> Fields:
    """The largest sample of the data file: of a set that is cropped to aspects of its own one of these, of all others a
    square. What a set does not say is the config's."""
    model = lookup.model(model_of(settings)["model"])
    alignment = _alignment(family_of(settings), str(of(settings, "model_flavour") or ""), of(settings, ALIGNMENT))
    own = [settings.get(DATASET + name) for name in ("resolution", "resolution_type", "video.num_frames")]
    sizes = []
    for resolution, kind, frames, aspects in settings.get(SAMPLES) or [[*own, settings.get(BUCKETS)]]:
        edge = _edge(resolution or of(settings, "resolution"), kind or of(settings, "resolution_type"))
        clip = 1
        if model.kind == "video":
            frames = frames or of(settings, VALIDATED_FRAMES) or 0
            clip = _frames(integer(frames, "num_frames"), family_of(settings), model.vae.temporal)
        for aspect in as_list(aspects or 1.0):
            value = aspect.get("aspect") if isinstance(aspect, dict) else aspect
            sizes.append((clip, *_bucket(edge, number(value, "crop_aspect_buckets"), alignment)))
    frames, width, height = max(sizes, key=lambda size: (size[1] * size[2] * max(1, size[0]), size))
    return {"height": height, "width": width, "frames": frames or None}


def cropped(settings: Settings) -> bool:
    """Whether a set is cropped to aspects of its own."""
    return any(aspects for *_, aspects in settings.get(SAMPLES) or [])


def size_notes(settings: Settings, fields: Fields) -> Iterator[str]:
    """Whose sizes are taken, in words."""
    if cropped(settings):
        yield f"samples are cropped to {fields['width']}x{fields['height']} (crop_aspect_buckets)"
    else:
        whose = "the largest set's" if SAMPLES in settings else "the config's"
        yield f"a square of {whose} resolution: buckets have its pixels"
    if missing := settings.get(NOT_FOUND):
        assumed = "the config's resolution is assumed"
        if lookup.model(fields["model"]).kind == "video":
            frames = of(settings, VALIDATED_FRAMES)
            assumed += f", and {VALIDATED_FRAMES} {frames}" if frames else ", and the model's usual frames"
        yield f"data_backend_config {missing}: {assumed}"


def _alignment(family: str, flavour: str, given: Any) -> int:
    forced = FORCED_OF_FLAVOUR.get(flavour) or FORCED.get(family)
    return forced or max(1, integer(given or USUAL_ALIGNMENT, ALIGNMENT))


def _edge(resolution: Any, kind: Any) -> float:
    """``resolution`` as the side of a square: in pixels, or megapixels where ``resolution_type`` is ``area``."""
    try:
        side = float(resolution)
    except (TypeError, ValueError):
        raise VplanError(f"resolution {quoted(resolution)} is no number", "write 1024") from None
    return float((side * 1024 * 1024) ** 0.5) if str(kind) == "area" or side < 16 else side


def _bucket(edge: float, aspect: float, alignment: int) -> tuple[int, int]:
    """Width and height of a bucket."""
    side, root = _rounded(int(edge), alignment), math.sqrt(aspect) if aspect > 0 else 1.0
    return _rounded(side * root, alignment), _rounded(side / root, alignment)


def _rounded(side: float, alignment: int) -> int:
    return max(alignment, round(side / alignment) * alignment)


def _frames(frames: int, family: str, temporal: int) -> int:
    """What is trained of a clip of so many frames. ``temporal``: the frames that the VAE joins to one."""
    step = FRAME_STEPS.get(family, temporal)
    return (frames - 1) // step * step + 1 if frames > 1 else frames


# ---- written

ASPECT_DIGITS = 4


class _Crop(NamedTuple):
    """What makes a bucket."""

    resolution: int
    aspect: float
    alignment: int

    @property
    def size(self) -> tuple[int, int]:
        return _bucket(self.resolution, self.aspect, self.alignment)


def write_size(fields: Fields) -> Settings:
    """The settings of a set for samples of one size. Raises an InexpressibleError with the nearest for one that it has
    no bucket for, or a length that it cuts."""
    model = lookup.model(fields["model"])
    family, flavour = written(model.name)
    found = _crop(family, flavour, fields["width"], fields["height"])
    frames = _frames(fields["frames"], family, model.vae.temporal) if model.kind == "video" else fields["frames"]
    why = f"the sides of its buckets are multiples of {found.alignment}"
    nearest = {"width": (found.size[0], why), "height": (found.size[1], why)}
    nearest["frames"] = frames, f"it cuts clips to {FRAME_STEPS.get(family, model.vae.temporal)} * n + 1 frames"
    wrong = [UnsupportedValue(name, fields[name], *near) for name, near in nearest.items() if fields[name] != near[0]]
    if wrong:
        raise InexpressibleError(*wrong)
    settings: Settings = {f"{DATASET}resolution": found.resolution, f"{DATASET}resolution_type": "pixel_area"}
    if found.aspect != 1.0:
        settings[BUCKETS] = [found.aspect]
    if model.kind == "video":
        settings[f"{DATASET}video.num_frames"] = frames
    if found.alignment != _alignment(family, flavour, None):
        settings[f"{CONFIG}{ALIGNMENT}"] = found.alignment
    return settings


def _crop(family: str, flavour: str, width: int, height: int) -> _Crop:
    """What makes a bucket of this size, or of one near it."""
    forced = FORCED_OF_FLAVOUR.get(flavour) or FORCED.get(family)
    tried = [crop for each in ([forced] if forced else ALIGNMENTS) for crop in _crops(width, height, each)]
    return min(tried, key=lambda crop: abs(crop.size[0] - width) + abs(crop.size[1] - height))  # the first of these


def _crops(width: int, height: int, alignment: int) -> Iterator[_Crop]:
    """What may make this size: its own aspect and area, or others that are rounded to it."""
    resolution = _rounded(math.isqrt(width * height), alignment)
    yield _Crop(resolution, round(width / height, ASPECT_DIGITS), alignment)
    wanted = _rounded(width, alignment), _rounded(height, alignment)
    if wanted[0] == wanted[1]:
        yield _Crop(wanted[0], 1.0, alignment)
        return
    for side in (resolution, resolution - alignment, resolution + alignment):
        # side * root is rounded to the width, and side / root to the height
        least = max((wanted[0] - alignment / 2) / side, side / (wanted[1] + alignment / 2))
        most = min((wanted[0] + alignment / 2) / side, side / max(1, wanted[1] - alignment / 2))
        if side > 0 and least < most:
            yield _Crop(side, round(((least + most) / 2) ** 2, ASPECT_DIGITS), alignment)
