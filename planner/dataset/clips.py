"""Reads one video or image file: header, resized frames, sound. Uses PyAV for videos and Pillow for images."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy
from av.container import InputContainer
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream
from PIL import Image, ImageOps, UnidentifiedImageError

VIDEOS = (".mp4", ".mov", ".m4v", ".mkv", ".webm", ".avi", ".gif")
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")

UNEVEN = Fraction(1, 2)
"""By how many frames one may be early or late in a video that is taken by frame number: containers round time stamps
to milliseconds."""

Pixels = numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.uint8]]
"""Frames (F, H, W, 3), RGB."""

Waves = numpy.ndarray[tuple[int, ...], numpy.dtype[Any]]
"""Samples (T,), between -1 and 1."""


class UnusableError(ValueError):
    """Raised for a file that cannot be used for training. The message is meant to follow the file's name."""


class Media(NamedTuple):
    """Frame count, frame rate and size in pixels of a video or image, with its rotation applied."""

    frames: int
    """1 for an image"""
    fps: Fraction
    """0 for an image, and for a video that does not state it"""
    height: int
    width: int
    times: tuple[Fraction, ...] = ()
    """seconds from the first frame to each, where they do not follow each other evenly"""


def probe(path: Path) -> Media:
    """Size, frame count and rate of a file, from its header and, for a video, its first frame. Raises an UnusableError
    for a broken file.

    If a container does not state its number of frames (Matroska), or two rates that differ, as phones and screen
    recorders write them, its packets are read for their time stamps, without decoding them.
    """
    return _image_size(path) if path.suffix.lower() in IMAGES else _video_size(path)


def frames(path: Path, indices: Sequence[int], height: int, width: int, threads: int = 0) -> Pixels:
    """The frames at `indices`, which never fall but may repeat, cropped and resized to (F, height, width, 3). Raises an
    UnusableError for a broken file.

    Videos are decoded from their start: frame n is the n-th decoded one, whatever its time stamp. ``threads``: decoder
    threads; 0: as many as FFmpeg chooses.
    """
    if path.suffix.lower() in IMAGES:
        try:
            with Image.open(path) as image:
                ImageOps.exif_transpose(image, in_place=True)  # loads it
                picture = _in_colour(image)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise UnusableError(f"broken image ({_short(error)})") from None
        return numpy.stack([numpy.asarray(_fit(picture, height, width))])
    return _video_frames(path, indices, (height, width), threads)


def has_sound(path: Path) -> bool:
    """Whether a file has a sound stream. Raises an UnusableError for a file that cannot be read."""
    if path.suffix.lower() in IMAGES:
        return False
    try:
        with av.open(str(path)) as container:
            return bool(container.streams.audio)
    except (av.FFmpegError, OSError) as error:
        raise UnusableError(f"corrupt video ({_short(error)})") from None


def sound(path: Path, rate: int) -> Waves:
    """The sound of a file as mono fp32 samples between -1 and 1, (n,), at `rate` samples per second. Raises an
    UnusableError for a file without sound or with a decoding error."""
    parts: list[Waves] = []
    try:
        with av.open(str(path)) as container:
            if not container.streams.audio:
                raise UnusableError("no sound in it")
            resampler = av.AudioResampler(format="s16", layout="mono", rate=rate)
            # None flushes what the resampler still holds (av.AudioResampler.resample).
            for frame in itertools.chain(container.decode(audio=0), [None]):
                parts += [part.to_ndarray()[0] for part in resampler.resample(frame)]
    except (av.FFmpegError, OSError) as error:
        raise UnusableError(f"corrupt sound ({_short(error)})") from None
    if not parts:
        raise UnusableError("no sound in it")
    return numpy.concatenate(parts).astype(numpy.float32) / 32768.0


def _image_size(path: Path) -> Media:
    try:
        with Image.open(path) as image:
            turned = image.getexif().get(0x0112, 1) >= 5  # Orientation: 5 to 8 are turned by 90 degrees
            width, height = image.size[::-1] if turned else image.size
            _check_depth(image)
    except UnidentifiedImageError:
        raise UnusableError("not an image, or broken") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UnusableError(f"broken image ({_short(error)})") from None
    return Media(1, Fraction(0), height, width)


def _check_depth(image: Image.Image) -> None:
    """Raises an UnusableError for 32-bit pixels: files do not say which value is white."""
    if image.mode in ("I", "F") and image.format != "PNG":  # Pillow before 11 reads a PNG's 16 bits into 32
        raise UnusableError("its pixels have 32 bits, and 8 or 16 are read")


def _in_colour(image: Image.Image) -> Image.Image:
    """An image as RGB. Pillow's own conversion clips 16-bit grey at 255, which turns nearly everything white."""
    _check_depth(image)
    if image.mode == "I" or image.mode.startswith("I;16"):
        image = Image.fromarray((numpy.asarray(image) // 257).astype(numpy.uint8))
    return image if image.mode == "RGB" else image.convert("RGB")


def _video_size(path: Path) -> Media:
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise UnusableError("corrupt video (no video stream)")
            stream = container.streams.video[0]
            count, fps, times = _count_and_rate(container, stream)
            if not count:
                raise UnusableError("zero frames")
            # Reading packets may have come to the end of the file.
            container.seek(0)
            first = next(container.decode(stream), None)
    except (av.FFmpegError, OSError) as error:
        raise UnusableError(f"corrupt video ({_short(error)})") from None
    if first is None:
        raise UnusableError("zero frames")
    turned = first.rotation % 180 != 0
    height, width = (first.width, first.height) if turned else (first.height, first.width)
    return Media(count, fps, height, width, times)


def _count_and_rate(container: InputContainer, stream: VideoStream) -> tuple[int, Fraction, tuple[Fraction, ...]]:
    """(frames, frames per second, `Media.times`) of a video."""
    stated = Fraction(stream.average_rate or stream.guessed_rate or 0)
    if stream.frames and stated and _nearly(stated, Fraction(stream.base_rate or stated)):
        return stream.frames, stated, ()
    stamps = [packet.pts for packet in container.demux(stream) if packet.size]
    if len(stamps) < 2 or None in stamps or stream.time_base is None:
        return len(stamps), stated, ()
    first, *_, last = ordered = sorted(stamp for stamp in stamps if stamp is not None)
    if first == last:
        return len(stamps), stated, ()
    fps = (len(stamps) - 1) / (Fraction(last - first) * stream.time_base)
    times = tuple((stamp - first) * stream.time_base for stamp in ordered)
    if all(abs(seconds * fps - number) <= UNEVEN for number, seconds in enumerate(times)):
        return len(stamps), stated if _nearly(stated, fps) else fps.limit_denominator(1001), ()
    return len(stamps), fps, times


def _nearly(one: Fraction, other: Fraction) -> bool:
    return abs(one - other) <= other / 100


def _video_frames(path: Path, indices: Sequence[int], size: tuple[int, int], threads: int) -> Pixels:
    numbers, pictures, last = frozenset(indices), {}, max(indices)
    reformatter = VideoReformatter()  # keeps its tables; frame.reformat would make them for each frame
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            stream.thread_type, stream.codec_context.thread_count = "AUTO", threads
            for number, frame in enumerate(container.decode(video=0)):
                if frame.is_corrupt:
                    raise UnusableError(f"corrupt video (frame {number} is damaged)")
                if number in numbers:
                    picture = Image.fromarray(reformatter.reformat(frame, format="rgb24").to_ndarray())
                    if frame.rotation:
                        picture = picture.rotate(frame.rotation, expand=True)
                    pictures[number] = numpy.asarray(_fit(picture, *size))
                if number == last:
                    break
    except (av.FFmpegError, OSError) as error:
        raise UnusableError(f"corrupt video ({_short(error)})") from None
    if len(pictures) < len(numbers):
        raise UnusableError(f"corrupt video (it ends before frame {last})")
    return numpy.stack([pictures[index] for index in indices])


def _fit(picture: Image.Image, height: int, width: int) -> Image.Image:
    """Crops to the largest centred part with the target's aspect ratio and resizes it (antialiased bicubic)."""
    scale = min(picture.width / width, picture.height / height)
    left, top = (picture.width - width * scale) / 2, (picture.height - height * scale) / 2
    box = (max(0.0, left), max(0.0, top), min(picture.width, left + width * scale), 0.0)
    box = (*box[:3], min(picture.height, top + height * scale))
    return picture.resize((width, height), Image.Resampling.BICUBIC, box=box)


def _short(error: Exception) -> str:
    """A library's error message on one line, at most 80 characters; only the reason of an OS or FFmpeg error."""
    text = getattr(error, "strerror", None) or str(error)
    return " ".join(text.split())[:80] or type(error).__name__
