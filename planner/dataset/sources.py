"""The sources that `--data` names: a folder of clips, or a `dataset.toml` with several folders and their settings."""

# No `from __future__ import annotations` here: pydantic would compile every field's annotation again at each start.
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from planner.errors import VplanError, quoted
from planner.schema import Count, Flag, Positive, Record
from planner.untrusted import read_document

MAX_WORDS = 1000
"""Characters of a trigger, or of a caption for all files."""


def _words(text: str) -> str:
    if not text.strip() or not text.isprintable() or len(text) > MAX_WORDS:
        raise VplanError(f"{quoted(text)} is not a caption", f"write one line of at most {MAX_WORDS} characters")
    return text.strip()


def _captions(text: str) -> str:
    table = text.endswith((".csv", ".jsonl")) and Path(text).name == text
    if text not in ("auto", "txt") and not table:
        raise VplanError(f"{quoted(text)} is not known", "write auto, txt, or the name of a .csv or .jsonl file")
    return text


def _resolution(text: str) -> str:
    if re.fullmatch(r"[1-9]\d{0,4}x[1-9]\d{0,4}", text, re.ASCII) is None:
        raise VplanError(f"{quoted(text)} is not a size", "write height x width, as 480x832")
    return text


Words = Annotated[str, Field(strict=True), AfterValidator(_words)]
FrameRate = Annotated[float, Field(strict=True, ge=0, le=1000, allow_inf_nan=False)]


class DataSource(Record):
    """One folder of videos and images, and how its samples are made."""

    folder: Annotated[str, Field(strict=True, min_length=1)]
    """videos and images with their captions"""
    repeats: Count = 1
    """times that each sample is used per epoch; with frames = random, random clips of each video"""
    weight: Positive = 1.0
    """factor on the loss of its samples, e.g. for regularisation images"""
    captions: Annotated[str, Field(strict=True), AfterValidator(_captions)] = "auto"
    """where captions are: txt (beside each file), a .csv or .jsonl file in the folder, or auto: metadata.jsonl or
    metadata.csv, else txt"""
    caption_column: Annotated[str, Field(strict=True, min_length=1)] = "text"
    """column of the captions in a .csv or .jsonl file; file names are in file_name"""
    caption: Words | None = None
    """one caption for all files, instead of any in the folder"""
    trigger: Words | None = None
    """prepended to every caption, with a comma"""
    frames: Literal["first", "even", "random", "windows"] = "first"
    """which frames of a video: first: from its start; even: spread over all of it; random: from random places, the
    same in every run; windows: all of it, as consecutive clips"""
    fps: FrameRate | None = None
    """frames per second to sample at (default: the model's); 0: every frame of the file"""
    flip: Flag = False
    """adds a mirrored copy of each sample, left to right"""
    resolutions: tuple[Annotated[str, Field(strict=True), AfterValidator(_resolution)], ...] = ()
    """sizes among the plan's shapes, as height x width: each file is trained at all of them (default: at the shape that
    keeps most of it)"""

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """The resolutions as (height, width)."""
        return [(int(height), int(width)) for height, width in (text.split("x") for text in self.resolutions)]


class DatasetFile(Record):
    """A `dataset.toml`."""

    source: Annotated[tuple[DataSource, ...], Field(min_length=1, max_length=1000)]


def option_of(field: str) -> str:
    """The option that sets a field of `DataSource`. `--frames` is taken: it is the plan's length."""
    return "--frame-sampling" if field == "frames" else f"--{field.replace('_', '-')}"


def sources(data: Path, options: Mapping[str, Any]) -> tuple[DataSource, ...]:
    """The sources in a folder or a `dataset.toml`, with absolute folders.

    ``options``: settings given on the command line, by field. Raises a VplanError for what cannot be read, and for
    options together with a file, which has its own settings.
    """
    if data.is_dir():
        return (DataSource.read({**options, "folder": str(data.absolute())}, "--data"),)
    if data.suffix.lower() != ".toml":
        fix = "pass the folder with your clips, or a dataset.toml: --data DIR|FILE"
        fault = f"{quoted(str(data))} is a file" if data.exists() else f"there is no folder {quoted(str(data))}"
        raise VplanError(fault, fix)
    if options:
        raise VplanError(
            f"{option_of(min(options))} is for a folder, but --data is {quoted(data.name)}", "write it in that file"
        )
    listed = DatasetFile.read(read_document(data), data.name).source
    here = data.absolute().parent
    return tuple(source.replace(folder=_folder(source.folder, here, data.name)) for source in listed)


def _folder(text: str, here: Path, file: str) -> str:
    """The absolute path of a folder that a file names. Raises a VplanError if it does not exist."""
    try:
        path = here / Path(text).expanduser()
    except RuntimeError:  # ~NAME without such a user
        path = here / text
    if not path.is_dir():
        fix = "folders are relative to the file that names them"
        raise VplanError(f"{file}: there is no folder {quoted(str(path))}", fix)
    return str(path)
