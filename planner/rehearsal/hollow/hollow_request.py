"""What `--hollow` says: a repository of the hub, a file, a folder whose weights are missing, or the data set."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from planner.catalog.diffusers_folder import CONFIG
from planner.errors import VplanError, did_you_mean, quoted
from planner.rehearsal.hollow.published_checkpoints import checkpoint_of_file, published_checkpoints
from planner.rehearsal.hollow.repositories import repositories

PIPELINE = "model_index.json"
DATA = "data"
"""The `--hollow` that makes the data set which the command names."""
ARCHIVES = (".pth", ".pt", ".bin", ".ckpt")
"""Endings of files that torch.save writes."""
WEIGHTS = (".safetensors", *ARCHIVES)


class HollowRequest(NamedTuple):
    """One `--hollow`."""

    text: str
    place: Path | None
    """where it goes; None: into a Hugging Face cache of the run's own"""
    name: str
    """a repository, a checkpoint, or the path of a folder or config.json that describes the model"""

    @property
    def is_file(self) -> bool:
        """Whether one file of weights is asked for, and not a folder."""
        return self.place is not None and self.place.suffix in WEIGHTS


def parse_request(text: str) -> HollowRequest:
    """`REPOSITORY`, `PATH=REPOSITORY`, `FILE=CHECKPOINT`, `FILE` by its usual name, or a `FOLDER` with config.json.

    Raises VplanError for a name that is not known, and for a file that is there.
    """
    path_text, separator, name = text.rpartition("=")
    if not separator:
        return _without_name(text)
    if not path_text:
        raise VplanError(f"--hollow {quoted(text)} has no path before the =", "write PATH=NAME")
    request = HollowRequest(text, _absolute(path_text), name)
    if os.path.lexists(path_text):
        raise VplanError(f"--hollow {quoted(path_text)}: it is there", _keep_fix(path_text))
    if name in published_checkpoints():
        if not request.is_file:
            raise VplanError(f"--hollow {quoted(text)}: a checkpoint is one file", f"end it in {' or '.join(WEIGHTS)}")
    elif name in repositories():
        if request.is_file:
            raise VplanError(f"--hollow {quoted(text)}: a repository is a folder", f"name a checkpoint: {_names()}")
    elif not _describes(Path(name)):
        raise _unknown(name)
    return request


def _without_name(text: str) -> HollowRequest:
    if _describes(Path(text)) and Path(text).is_dir():
        return HollowRequest(text, _absolute(text), text)
    if text in repositories():
        return HollowRequest(text, None, text)
    checkpoint = checkpoint_of_file(Path(text).name)
    if checkpoint is not None:
        return parse_request(f"{text}={checkpoint.name}")
    if text in published_checkpoints():
        raise VplanError(f"--hollow {text} does not say where", f"pass --hollow PATH={text}")
    raise _unknown(text)


def _describes(path: Path) -> bool:
    """Whether a path is a config.json, or a folder of a model or pipeline."""
    return (path.is_file() and path.suffix == ".json") or (path / PIPELINE).is_file() or (path / CONFIG).is_file()


def _absolute(text: str) -> Path:
    return Path(os.path.abspath(Path(text).expanduser()))


def _keep_fix(path: str) -> str:
    marked = path.endswith(".safetensors") and b'"vplan":"hollow' in _head(Path(path))
    if marked:
        return "it is left from a rehearsal that was killed, and has no weights: delete it"
    return "leave this --hollow out; nothing is written over a file"


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(200)


def _names() -> str:
    return ", ".join(sorted(published_checkpoints()))


def _unknown(name: str) -> VplanError:
    known = [*published_checkpoints(), *repositories()]
    otherwise = (
        f"known are {_names()}, {', '.join(sorted(repositories()))}; "
        "or pass a folder with the model's config.json files, without weights"
    )
    return VplanError(f"--hollow: nothing is known of {quoted(name)}", did_you_mean(name, known, otherwise))


def dtype_of(path: Path) -> str | None:
    """The precision that a file's name says."""
    match = re.search(r"bf16|fp16|fp32|fp8", path.name)
    return match[0] if match else None
