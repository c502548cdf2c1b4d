"""Logs samples to accelerate's trackers: images and videos, each with its prompt."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import av
from PIL import Image

MILLISECONDS = 1000


def track_samples(trackers: Sequence[Any], step: int, files: Sequence[Path], prompts: Sequence[str]) -> None:
    """Logs the samples of one step to the ``trackers`` that can show images, tensorboard and wandb, as diffusers'
    examples do in ``log_validation``."""
    for tracker in trackers:
        if tracker.name == "tensorboard":
            _to_tensorboard(tracker.writer, step, files, prompts)
        elif tracker.name == "wandb":
            import wandb

            tracker.log(
                {"samples": [_wandb_medium(wandb, *each) for each in zip(files, prompts, strict=True)]}, step=step
            )


def _wandb_medium(wandb: Any, path: Path, prompt: str) -> Any:
    if path.suffix == ".png":
        return wandb.Image(str(path), caption=prompt)
    return wandb.Video(str(path), caption=prompt, format="mp4")


def _to_tensorboard(writer: Any, step: int, files: Sequence[Path], prompts: Sequence[str]) -> None:
    """Writes image summaries with the files' own bytes, and videos as GIFs, the only video format that TensorBoard
    shows in them. The writer's ``add_video`` does the same but needs moviepy."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    for number, (path, prompt) in enumerate(zip(files, prompts, strict=True), start=1):
        content = path.read_bytes() if path.suffix == ".png" else gif(path)
        with Image.open(io.BytesIO(content)) as picture:
            width, height = picture.size
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=content)
        summary = Summary(value=[Summary.Value(tag=f"samples/{number}", image=image)])
        writer._get_file_writer().add_summary(summary, step)
        writer.add_text(f"samples/{number}/prompt", prompt, step)


def gif(video: Path) -> bytes:
    """A video file as an animated GIF, at its own size and speed."""
    with av.open(str(video)) as container:
        stream = container.streams.video[0]
        rate = float(stream.average_rate or 1)
        first, *others = [Image.fromarray(frame.to_ndarray(format="rgb24")) for frame in container.decode(stream)]
    content = io.BytesIO()
    first.save(content, "GIF", save_all=True, append_images=others, duration=round(MILLISECONDS / rate), loop=0)
    return content.getvalue()
