"""Writes grey clips and pictures: `media_worker.py QUESTION`, a JSON file `{"rate", "media": [[PATH, FRAMES, HEIGHT,
WIDTH]]}`, where one frame is a picture. Runs in a Python of anybody's, so it takes the library that is there."""

from __future__ import annotations

import json
import sys
from typing import Any

GREY = 128


def main() -> None:
    """Write what the question asks for."""
    with open(sys.argv[1], encoding="utf-8") as file:
        question = json.load(file)
    for path, frames, height, width in question["media"]:
        if frames == 1:
            _write_picture(path, height, width)
        else:
            _write_clip(path, frames, height, width, question["rate"])


def _write_picture(path: str, height: int, width: int) -> None:
    from PIL import Image

    Image.new("RGB", (width, height), (GREY, GREY, GREY)).save(path)


def _write_clip(path: str, frames: int, height: int, width: int, rate: int) -> None:
    for write in (_with_av, _with_imageio, _with_opencv):
        try:
            return write(path, frames, height, width, rate)
        except ImportError:
            continue
    raise ImportError("no library for clips: none of av, imageio-ffmpeg, cv2")


def _with_av(path: str, frames: int, height: int, width: int, rate: int) -> None:
    import av

    with av.open(path, "w") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for _ in range(frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(_frame(height, width), format="rgb24")))
        container.mux(stream.encode())


def _with_imageio(path: str, frames: int, height: int, width: int, rate: int) -> None:
    import imageio
    import imageio_ffmpeg  # noqa: F401  what imageio would miss only while it writes

    with imageio.get_writer(path, format="FFMPEG", fps=rate, macro_block_size=1) as writer:
        for _ in range(frames):
            writer.append_data(_frame(height, width))


def _with_opencv(path: str, frames: int, height: int, width: int, rate: int) -> None:
    import cv2

    writer = cv2.VideoWriter(path, cv2.VideoWriter_fourcc(*"mp4v"), rate, (width, height))
    for _ in range(frames):
        writer.write(_frame(height, width))
    writer.release()


def _frame(height: int, width: int) -> Any:
    import numpy

    return numpy.full((height, width, 3), GREY, numpy.uint8)


if __name__ == "__main__":
    main()
