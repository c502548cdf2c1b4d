"""Which of a plan's shapes a clip is trained at, and which of its frames. Imports no torch.

A plan's shapes are its buckets, or its one shape. A clip gets the shape that keeps most of it: the share of the picture
that is left after cropping to the shape's aspect, times the share of its frames that is used; of equals the one that
enlarges least, then the largest, then the first in the plan. Shapes longer than the clip are no choice, so a clip that
is shorter than the plan goes to the longest of the plan's shapes that it fills.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal, NamedTuple

from planner.catalog.profiles import ModelProfile
from planner.catalog.shapes import check_shape
from planner.errors import VplanError
from planner.spec.job import Bucket, Job


@dataclass(frozen=True)
class FrameSampling:
    """How frames are taken from clips: rate, spacing, sizes, and whether faulty clips are skipped."""

    sampling: Literal["fps", "even"] = "fps"
    """fps: from the first frame on, at the model's rate (a slower file's frames one by one: none is repeated);
    even: spread over the whole clip"""
    fps: float | None = None
    """the rate to sample at; the model's own when not given"""
    sizes: Literal["plan", "native"] = "plan"
    """plan: resized and cropped to a shape of the plan; native: every clip at its own size, cropped to what the model
    divides by, and refused where that is larger than the plan"""
    skip_bad: bool = False
    """leave out what cannot be used instead of refusing the folder"""


class Clip(NamedTuple):
    """A file that can be trained on, with its caption."""

    path: Path
    name: str
    """relative to the folder, with slashes"""
    caption: str
    frames: int
    fps: Fraction
    height: int
    width: int
    reference: Path | None = None
    """the image it was made from"""
    control: Path | None = None
    """the video that steers it, frame by frame"""


class Sample(NamedTuple):
    """A clip with the plan's shape that it is trained at, and the frames that are taken of it."""

    clip: Clip
    bucket: Bucket
    indices: tuple[int, ...]
    """frames of the file, as many as the bucket has"""


def model_fps(profile: ModelProfile) -> Fraction | None:
    """Frames per second a model was trained at; None for image models."""
    if profile.kind == "image":
        return None
    rate = profile.inputs.get("frame_rate") or profile.traits.frames_per_second
    if rate is None:
        raise VplanError(f"profile {profile.name}: no frames_per_second", "add it to the profile's traits")
    return Fraction(rate)


def assign(
    clips: Iterable[Clip], profile: ModelProfile, job: Job, reading: FrameSampling
) -> tuple[tuple[Sample, ...], list[tuple[str, str]], tuple[str, ...]]:
    """(samples in the order of clips, (name, reason) of clips that no shape takes, what was not used, in words)."""
    if reading.fps is not None and not 0 < reading.fps <= 1000:
        raise VplanError(f"fps {reading.fps} is not a video frame rate", "use frames per second, as 16")
    if reading.sizes == "native" and profile.shape.only_listed:
        raise VplanError(f"{profile.title} supports its listed sizes only", "let the plan's shapes decide")
    rate = Fraction(reading.fps).limit_denominator(1001) if reading.fps else model_fps(profile)
    samples, unfit = [], []
    for clip in clips:
        steps = _step(clip, rate) if reading.sampling == "fps" else Fraction(1)
        usable = int((clip.frames - 1) / steps) + 1
        try:
            bucket = _native(clip, usable, profile, job) if reading.sizes == "native" else _best(clip, usable, job)
            if profile.shape.window:
                samples += _windows(clip, bucket, steps, usable)
                continue
        except VplanError as error:
            unfit.append((clip.name, error.message))
            continue
        indices = _even(clip.frames, bucket.frames) if reading.sampling == "even" else _rising(bucket.frames, steps)
        samples.append(Sample(clip, bucket, indices))
    return tuple(samples), unfit, _notes(samples, rate, reading)


def _windows(clip: Clip, bucket: Bucket, step: Fraction, usable: int) -> list[Sample]:
    """A clip's windows, one behind the other, each to be trained beside another; frames at its end may fill none."""
    count = usable // bucket.frames
    if not clip.fps:
        raise VplanError("has no frame rate")
    if count < 2:
        raise VplanError(f"too short: {usable} frames at the model's rate, less than two windows of {bucket.frames}")
    indices = _rising(count * bucket.frames, step)
    return [Sample(clip, bucket, indices[at : at + bucket.frames]) for at in range(0, len(indices), bucket.frames)]


def _step(clip: Clip, rate: Fraction | None) -> Fraction:
    """Frames of the file per frame taken."""
    return max(Fraction(1), clip.fps / rate) if rate and clip.fps else Fraction(1)


def _rising(count: int, step: Fraction) -> tuple[int, ...]:
    """The frames nearest to so many even steps from the first one."""
    return tuple(int(number * step + Fraction(1, 2)) for number in range(count))


def _even(frames: int, count: int) -> tuple[int, ...]:
    """So many of a clip's frames from the first to the last, evenly."""
    step = Fraction(frames - 1, count - 1) if count > 1 else Fraction(0)
    return _rising(count, step)


def _best(clip: Clip, usable: int, job: Job) -> Bucket:
    """The plan's shape that keeps most of a clip, as the module says."""
    shapes = [shape for shape in job.shapes if shape.frames <= usable]
    if not shapes:
        least = min(shape.frames for shape in job.shapes)
        raise VplanError(f"too short: {usable} frames at the model's rate, and the plan's shortest shape has {least}")

    def worth(shape: Bucket) -> tuple[float, float, int]:
        share = _kept_picture(clip, shape) * shape.frames / usable
        return share, min(1.0, 1 / _enlarged(clip, shape)), shape.frames * shape.height * shape.width

    return max(shapes, key=worth)


def _kept_picture(clip: Clip, shape: Bucket) -> float:
    """Share of the picture that cropping to a shape's aspect leaves."""
    ratio = (clip.width * shape.height) / (clip.height * shape.width)
    return min(ratio, 1 / ratio)


def _enlarged(clip: Clip, shape: Bucket) -> float:
    """How many times larger, per side, the picture becomes; under 1 it shrinks."""
    return max(shape.height / clip.height, shape.width / clip.width)


def _native(clip: Clip, usable: int, profile: ModelProfile, job: Job) -> Bucket:
    """A clip's own size and the most frames the model's rule and the plan allow."""
    rules, largest = profile.shape, max(job.shapes, key=_volume)
    frames = min(usable, max(shape.frames for shape in job.shapes))
    # The VAE takes 1 + n * frame_step frames.
    frames -= (frames - 1) % rules.frame_step
    height, width = (side // rules.size_multiple * rules.size_multiple for side in (clip.height, clip.width))
    if not height or not width:
        raise VplanError(f"{clip.height}x{clip.width} is smaller than {profile.title} takes")
    check_shape(profile, frames, height, width)
    bucket = Bucket(frames=frames, height=height, width=width, batch_size=largest.batch_size)
    if _volume(bucket) > _volume(largest):
        shape, most = _printable(bucket), _printable(largest)
        raise VplanError(f"larger than the plan: {shape}, and the plan's largest shape is {most}")
    return bucket


def _volume(shape: Bucket) -> int:
    """Pixels of a whole clip, which tokens and so memory go by."""
    return shape.frames * shape.height * shape.width


def _printable(shape: Bucket) -> str:
    return f"{shape.frames}x{shape.height}x{shape.width}"


def _notes(samples: list[Sample], rate: Fraction | None, reading: FrameSampling) -> tuple[str, ...]:
    """What is worth knowing of how clips were fitted: samples by shape, and what of them is not used."""
    if not samples:
        return ()
    shapes = Counter(_printable(sample.bucket) for sample in samples)
    notes = ["samples by shape (frames x height x width): " + ", ".join(f"{n} of {s}" for s, n in shapes.items())]
    if len(of_clips := {sample.clip: sample for sample in samples}) < len(samples):
        notes.append(f"{len(samples)} windows of {len(of_clips)} clips")
        samples = list(of_clips.values())  # the last of each
    used_frames = sum(len(sample.indices) for sample in samples)
    cut = [s for s in samples if reading.sampling == "fps" and s.indices[-1] + _step(s.clip, rate) < s.clip.frames]
    if cut and len(samples) == sum(shapes.values()):
        unused = sum(int((s.clip.frames - 1) / _step(s.clip, rate)) + 1 - len(s.indices) for s in cut)
        share = unused / (used_frames + unused)
        notes.append(f"{len(cut)} clips are longer than their shape: {share:.0%} of all frames are unused")
    cropped = [s for s in samples if _kept_picture(s.clip, s.bucket) < 0.9]
    if cropped and reading.sizes == "plan":
        notes.append(f"{len(cropped)} clips lose more than a tenth of their picture to cropping")
    if enlarged := [s for s in samples if _enlarged(s.clip, s.bucket) > 1]:
        notes.append(f"{len(enlarged)} clips are smaller than their shape and are upscaled")
    if rate and (slow := [s for s in samples if reading.sampling == "fps" and 0 < s.clip.fps < rate * 9 / 10]):
        notes.append(f"{len(slow)} clips have fewer than {float(rate):g} frames a second and will look faster")
    return tuple(notes)
