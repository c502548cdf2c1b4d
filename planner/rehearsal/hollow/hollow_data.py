"""A small set of grey clips or pictures with captions, put where a command looks for its data.

Which files a trainer's reader wants is known in `planner.foreign.data_layouts`; here they are written. Clips and
pictures are written by the libraries of the command's own Python, which has to read them anyway.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from planner.errors import VplanError, quoted
from planner.rehearsal.hollow.tensor_files import TensorEntry, write_safetensors

MEDIA_WORKER = Path(__file__).resolve().parents[3] / "trainers" / "hollow" / "media_worker.py"
MEDIA_SECONDS = 300.0
CAPTION = "a grey square"
FRAMES_PER_SECOND = 16


class Medium(NamedTuple):
    """One clip or picture."""

    path: Path
    frames: int
    """1 is a picture"""
    height: int
    width: int


@dataclass(frozen=True)
class HollowData:
    """The files of a data set."""

    places: tuple[Path, ...]
    """what the command names, a folder or a file each: none of them may be there"""
    media: tuple[Medium, ...]
    texts: Mapping[Path, str] = field(default_factory=dict)
    """captions, tables and configs"""
    tensors: Mapping[Path, Sequence[TensorEntry]] = field(default_factory=dict)
    """what a trainer caches of its data before it trains"""

    def __str__(self) -> str:
        """What there is, for the answer."""
        shapes = dict.fromkeys(
            f"{medium.frames}x{medium.height}x{medium.width}"
            if medium.frames > 1
            else f"{medium.height}x{medium.width}"
            for medium in self.media
        )
        cached = ", with caches of zeros" if self.tensors else ""
        return f"{len(self.media)} grey samples of {' and '.join(shapes)}{cached}"


def check_absent(data: HollowData) -> None:
    """Raises a VplanError where something lies at one of its places."""
    for place in data.places:
        if os.path.lexists(place):
            fix = "leave --hollow data out; nothing is written into a folder or over a file that is there"
            raise VplanError(f"--hollow data: {quoted(str(place))} is there", fix)


def write_data(data: HollowData, python: str, folder: Path, environment: Mapping[str, str]) -> None:
    """Writes all files. ``python``: the command's own; ``folder``: the run's own, for what its process is asked.

    Raises a VplanError where that Python has no library that writes clips or pictures.
    """
    for path in (*(medium.path for medium in data.media), *data.texts, *data.tensors):
        path.parent.mkdir(parents=True, exist_ok=True)
    for path, text in data.texts.items():
        path.write_text(text, encoding="utf-8")
    for path, tensors in data.tensors.items():
        write_safetensors(path, tensors)
    question = folder / "media.json"
    rows = [[str(medium.path), *medium[1:]] for medium in data.media]
    question.write_text(json.dumps({"rate": FRAMES_PER_SECOND, "media": rows}), encoding="utf-8")
    own = {name: value for name, value in environment.items() if name not in ("VPLAN_GPU_FOLDER", "PYTHONPATH")}
    command = [python, str(MEDIA_WORKER), str(question)]
    try:
        done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=MEDIA_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise VplanError("writing the hollow data took over 5 minutes", "close other programs", 4) from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        fix = f"install pillow, and for clips av, imageio[ffmpeg] or opencv-python, into {python}"
        raise VplanError(f"cannot write the hollow data: {said}", fix)
