"""Assigns clips to a plan's shapes and selects their frames. Imports no torch.

A plan's shapes are its buckets, or its single shape. A clip gets the shape that keeps most of it: the share of the
picture left after cropping to the shape's aspect ratio, times the share of its frames that is used. Ties go to the
shape with the least upscaling, then to the largest, then to the first in the plan. Shapes longer than the clip are
excluded, so a short clip gets a shape that it fills, and an image one with a single frame. If a source lists
resolutions, a clip is assigned once for each of them.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import NamedTuple

from planner.catalog.profiles import ModelProfile
from planner.dataset.captions import Fault
from planner.dataset.sources import DataSource
from planner.errors import VplanError
from planner.spec.job import Bucket, Job
from planner.units import plural

ROUNDED = Fraction(1, 1000)
"""Seconds by which a time stamp may be late: containers round to milliseconds."""


Places = tuple[Fraction, ...]
"""Rising places in a clip, counted in frames as if all lasted equally long."""


class Clip(NamedTuple):
    """A usable file with its caption."""

    path: Path
    name: str
    """path relative to the folder, with forward slashes"""
    caption: str
    frames: int
    fps: Fraction
    height: int
    width: int
    times: tuple[Fraction, ...] = ()
    """as `Media.times`"""
    reference: Path | None = None
    """the image that it is an edit of, for models that edit images"""
    control: Path | None = None
    """the control video, for models that take one"""

    def shown(self, places: Places, timed: bool) -> tuple[int, ...]:
        """The frames in the file at these places: the nearest, or, if it is ``timed`` and they last unequally long,
        those on screen at that moment, so that one comes several times where it stands longer."""
        if not (timed and self.times):
            return tuple(int(place + Fraction(1, 2)) for place in places)
        moments = (place / self.fps + ROUNDED for place in places)
        return tuple(bisect.bisect_right(self.times, moment) - 1 for moment in moments)

    def seconds(self, index: int) -> Fraction:
        """When a frame in the file comes on screen. Raises a ZeroDivisionError if the clip has no frame rate."""
        return self.times[index] if self.times else index / self.fps


class Sample(NamedTuple):
    """A clip with the shape that it is trained at and the frames that are used."""

    clip: Clip
    bucket: Bucket
    indices: tuple[int, ...]
    """frame indices in the file, as many as the bucket has frames"""
    flip: bool = False
    """whether it is mirrored, left to right"""
    repeats: int = 1
    """occurrences per epoch"""
    weight: float = 1.0
    """factor of its loss"""


class TooShortError(VplanError):
    """A clip is shorter than every shape of the plan."""

    def __init__(self, message: str, usable: int) -> None:
        super().__init__(message, "")
        self.usable = usable
        """frames of the clip at its sampling rate"""


def model_fps(profile: ModelProfile) -> Fraction | None:
    """Frames per second that a model was trained at; None for image models."""
    if profile.kind == "image":
        return None
    rate = profile.inputs.get("frame_rate") or profile.traits.frames_per_second
    if rate is None:
        raise VplanError(f"profile {profile.name}: no frames_per_second", "add it to the profile's traits")
    return Fraction(rate)


class Assignment(NamedTuple):
    """A source's clips, cut to the shapes of a plan."""

    samples: tuple[Sample, ...]
    """in the order of the clips"""
    unfit: list[Fault]
    """clips that fit no shape"""
    notes: tuple[str, ...]
    """for the user"""


def assign(clips: Iterable[Clip], profile: ModelProfile, job: Job, source: DataSource) -> Assignment:
    """Cuts each of a source's clips to the shapes of the plan that suit it best. Raises a VplanError for a resolution
    that the plan does not have, or a way to choose frames that the model cannot use."""
    rate = model_fps(profile) if source.fps is None else Fraction(source.fps).limit_denominator(1001)
    if profile.shape.window and source.frames in ("even", "random"):
        fault = f"{profile.title} trains on all of a clip, window by window, not on {source.frames} frames"
        raise VplanError(fault, "leave out frames, or --frame-sampling")
    groups = [_shapes_of(size, job) for size in source.sizes] or [job.shapes]
    samples: list[Sample] = []
    unfit: list[Fault] = []
    lengths: set[int] = set()
    for clip in clips:
        step = sampling_step(clip, source, rate)
        made: list[Sample] = []
        try:
            for shapes in groups:
                usable = int((clip.frames - 1) / step) + 1
                bucket = _best(clip, usable, shapes)
                if profile.shape.window:
                    drawn = dict.fromkeys(_windows(clip, bucket, step, usable, least=2), source.repeats)
                else:
                    drawn = _drawn(clip, bucket, step, usable, source)
                chosen: Counter[tuple[int, ...]] = Counter()
                for places, repeats in drawn.items():
                    chosen[clip.shown(places, timed=bool(rate) or source.frames == "even")] += repeats
                made += [
                    Sample(clip, bucket, indices, flip, repeats, source.weight)
                    for indices, repeats in chosen.items()
                    for flip in ((False, True) if source.flip else (False,))
                ]
        except VplanError as error:
            unfit.append(Fault(clip.name, error.message))
            lengths |= {error.usable} if isinstance(error, TooShortError) else set()
            continue
        samples += made
    fix = _shorter_shapes(lengths, profile, job)
    faults = [fault._replace(fix=fix) for fault in unfit]
    return Assignment(tuple(samples), faults, _notes(samples, rate, source))


def _shorter_shapes(lengths: set[int], profile: ModelProfile, job: Job) -> str:
    """How to plan for clips of these frame counts, which are too short for every shape of the plan: add one shape for
    the shortest video, and one for images. Empty if the model takes no such clips."""
    least = profile.shape.min_frames
    frames = {length: profile.shape.cut(length) for length in lengths}
    videos = [count for length, count in frames.items() if length > 1 and count >= least]
    added = sorted(videos)[:1] + [1] * (1 in lengths and least == 1)
    if not added:
        return ""
    like = min(job.shapes, key=lambda shape: shape.frames)
    more = [like.replace(frames=count) for count in dict.fromkeys(added)]
    return f"plan with shapes as short, as --buckets {','.join(shape.words for shape in (*job.shapes, *more))}"


def _shapes_of(size: tuple[int, int], job: Job) -> tuple[Bucket, ...]:
    """The plan's shapes with a given (height, width). Raises a VplanError if there are none."""
    shapes = tuple(shape for shape in job.shapes if (shape.height, shape.width) == size)
    if not shapes:
        buckets = ",".join([*(shape.words for shape in job.shapes), f"{job.shapes[0].frames}x{size[0]}x{size[1]}"])
        fault = f"resolution {size[0]}x{size[1]} is not among the plan's shapes"
        raise VplanError(fault, f"plan with it, as --buckets {buckets}")
    return shapes


def _drawn(clip: Clip, bucket: Bucket, step: Fraction, usable: int, source: DataSource) -> dict[Places, int]:
    """Selections of places in a clip -> occurrences of each per epoch."""
    if source.frames == "even":
        return {_even(clip.frames, bucket.frames): source.repeats}
    if source.frames == "windows":
        return dict.fromkeys(_windows(clip, bucket, step, usable), source.repeats)
    first = _rising(bucket.frames, step)
    if source.frames == "first":
        return {first: source.repeats}
    # Depends on nothing but file name and number, so that a resumed run finds what it encoded.
    last = clip.frames - 1 - int(first[-1] + Fraction(1, 2))
    starts = [Random(f"{clip.path.name} {number}").randint(0, last) for number in range(source.repeats)]
    return {tuple(start + place for place in first): times for start, times in sorted(Counter(starts).items())}


def _windows(clip: Clip, bucket: Bucket, step: Fraction, usable: int, least: int = 1) -> list[Places]:
    """The places of a clip's consecutive windows; frames left over at its end are not used. ``least``: how many windows
    the model needs. Raises a VplanError if there are fewer, or if it needs several and the clip has no frame rate."""
    count = usable // bucket.frames
    if least > 1 and not clip.fps:
        raise VplanError("has no frame rate")
    if count < least:
        raise VplanError(f"too short: {usable} frames at the model's rate, less than two windows of {bucket.frames}")
    places = _rising(count * bucket.frames, step)
    return [places[at : at + bucket.frames] for at in range(0, len(places), bucket.frames)]


def _step(clip: Clip, rate: Fraction | None) -> Fraction:
    """Frames in the file per frame used."""
    return max(Fraction(1), clip.fps / rate) if rate and clip.fps else Fraction(1)


def _rising(count: int, step: Fraction) -> Places:
    """``count`` places from 0 at even steps."""
    return tuple(number * step for number in range(count))


def _even(frames: int, count: int) -> Places:
    """``count`` places in a clip, evenly spaced from the first to the last."""
    step = Fraction(frames - 1, count - 1) if count > 1 else Fraction(0)
    return _rising(count, step)


def _best(clip: Clip, usable: int, of_plan: Sequence[Bucket]) -> Bucket:
    """The shape that keeps most of a clip (see the module docstring). Raises a TooShortError if all are too long."""
    shapes = [shape for shape in of_plan if shape.frames <= usable]
    if not shapes:
        shortest = min(shape.frames for shape in of_plan)
        what = "an image" if clip.frames == 1 else f"too short: {usable} frames at the model's rate"
        raise TooShortError(f"{what}, and the plan's shortest shape has {shortest}", usable)

    def worth(shape: Bucket) -> tuple[float, float, int]:
        share = kept_picture(clip.height, clip.width, shape) * shape.frames / usable
        return share, min(1.0, 1 / _enlarged(clip, shape)), shape.pixels

    return max(shapes, key=worth)


def kept_picture(height: int, width: int, shape: Bucket) -> float:
    """Share of a picture that is left after cropping to a shape's aspect ratio."""
    ratio = (width * shape.height) / (height * shape.width)
    return min(ratio, 1 / ratio)


def sampling_step(clip: Clip, source: DataSource, rate: Fraction | None) -> Fraction:
    """Frames in the file per frame used. ``rate``: the model's frame rate, used if the source sets none."""
    if source.frames == "even":
        return Fraction(1)
    return _step(clip, rate if source.fps is None else Fraction(source.fps).limit_denominator(1001))


def _enlarged(clip: Clip, shape: Bucket) -> float:
    """Scale factor per side when the picture is resized; below 1 it shrinks."""
    return max(shape.height / clip.height, shape.width / clip.width)


def _notes(samples: list[Sample], rate: Fraction | None, source: DataSource) -> tuple[str, ...]:
    """Notes on how clips were fitted: samples by shape, and what is cut, cropped, upscaled or sped up."""
    if not samples:
        return ()
    shapes = Counter(sample.bucket.words for sample in samples)
    notes = ["samples by shape (frames x height x width): " + ", ".join(f"{n} of {s}" for s, n in shapes.items())]
    clips = {sample.clip: sample for sample in samples if not sample.flip}  # the last sample of each clip
    if len(clips) < len(samples):
        made = [f"{source.frames} parts"] * (source.frames in ("random", "windows"))
        made += ["mirrored"] * source.flip + ["several resolutions"] * (len(source.resolutions) > 1)
        notes.append(f"{len(samples)} samples of {plural(len(clips), 'clip')}{': ' if made else ''}{', '.join(made)}")
    samples = list(clips.values())
    cut = [s for s in samples if source.frames == "first" and s.indices[-1] + _step(s.clip, rate) < s.clip.frames]
    if cut and len(clips) == sum(shapes.values()):
        used = sum(len(sample.indices) for sample in samples)
        unused = sum(int((s.clip.frames - 1) / _step(s.clip, rate)) + 1 - len(s.indices) for s in cut)
        share = unused / (used + unused)
        notes.append(f"cut to the length of their shape: {plural(len(cut), 'clip')}, {share:.0%} of all frames unused")
    if rate and (uneven := [s for s in samples if s.clip.times]):
        notes.append(f"frames of unequal length, taken by their time stamps: {plural(len(uneven), 'clip')}")
    if cropped := [s for s in samples if kept_picture(s.clip.height, s.clip.width, s.bucket) < 0.9]:
        notes.append(f"cropped by more than a tenth of the picture: {plural(len(cropped), 'file')}")
    if enlarged := [s for s in samples if _enlarged(s.clip, s.bucket) > 1]:
        notes.append(f"smaller than their shape, so upscaled: {plural(len(enlarged), 'file')}")
    if rate and (slow := [s for s in samples if source.frames != "even" and 0 < s.clip.fps < rate * 9 / 10]):
        slower = f"under {float(rate):g} frames a second, so faster in training"
        notes.append(f"{slower}: {plural(len(slow), 'clip')}")
    return tuple(notes)
