"""A transformer in one file, as ComfyUI and models' authors publish them: converted to a diffusers folder, once."""

# No `from __future__ import annotations` here: pydantic would compile every field's annotation again at each start.
import hashlib
from pathlib import Path

from planner.errors import VplanError, quoted
from planner.launch import launch, weight_files
from planner.schema import Record
from planner.worker_process import vplan_command

CONVERTED = "transformer"
"""Folder of converted weights in a run's output, and of the request that makes them."""


class Conversion(Record):
    """What the process that converts a file needs; it reads it from its request file."""

    model: str
    """name of the plan's model"""
    file: str
    folder: str
    """where the model is written"""


def check(file: str) -> Path:
    """The file of ``--transformer``. Raises a VplanError where there is none, or it is of another kind or not
    whole."""
    path = Path(file).expanduser().absolute()
    if not path.is_file():
        raise VplanError(f"there is no file {quoted(file)}", "pass the transformer's file: --transformer FILE")
    if path.suffix != ".safetensors":
        raise VplanError(
            f"{quoted(file)} is no .safetensors file", "only safetensors are read: other files can run code"
        )
    weight_files.check_file(path)
    return path


def folder_of(file: Path, model: str, output: Path) -> Path:
    """The folder in a run's output for a file's weights in diffusers format; another one when the file has changed."""
    status = file.stat()
    identity = f"{file.resolve()} {status.st_size} {status.st_mtime_ns} {model}"
    return output / CONVERTED / hashlib.sha256(identity.encode()).hexdigest()[:16]


def folder_here(folder: str | None, output: Path) -> str | None:
    """The folder that the first computer of a run converted a file to, where this computer has the run's output."""
    return str(output / CONVERTED / Path(folder).name) if folder else None


def convert(file: Path, model: str, folder: Path) -> None:
    """Writes a file's weights into such a folder, in a process of its own; a VplanError where that is not possible."""
    request = launch.write_request(folder.parent, Conversion(model=model, file=str(file), folder=str(folder)))
    ended = launch.worker_outcome(vplan_command("worker", "convert", str(request)), request, "cpu", lambda: None)
    if ended.name != "ok":
        raise VplanError(ended.message, ended.fix, ended.exit_code)
