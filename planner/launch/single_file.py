"""Converts a single-file transformer, as ComfyUI and models' authors publish them, to a diffusers folder, once."""

# No `from __future__ import annotations` here: pydantic would compile every field's annotation again at each start.
import hashlib
from pathlib import Path

from planner.errors import VplanError, quoted
from planner.launch import launch, weight_files
from planner.schema import Record
from planner.worker_process import vplan_command

CONVERTED = "transformer"
"""Folder in a run's output for converted weights and the conversion request."""


class Conversion(Record):
    """The request to the process that converts a file."""

    model: str
    """name of the plan's model"""
    file: str
    folder: str
    """folder to write the converted model to"""


def check(file: str) -> Path:
    """The absolute path of the ``--transformer`` file. Raises a VplanError if it does not exist, is not safetensors or
    is incomplete."""
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
    """The folder in a run's output for a file's converted weights. Its name changes with the file."""
    status = file.stat()
    identity = f"{file.resolve()} {status.st_size} {status.st_mtime_ns} {model}"
    return output / CONVERTED / hashlib.sha256(identity.encode()).hexdigest()[:16]


def folder_here(folder: str | None, output: Path) -> str | None:
    """This computer's path of the folder that the first node converted a file to; None if ``folder`` is."""
    return str(output / CONVERTED / Path(folder).name) if folder else None


def convert(file: Path, model: str, folder: Path) -> None:
    """Converts a file into a folder (see `folder_of`) in a separate process. Raises a VplanError if that fails."""
    request = launch.write_request(folder.parent, Conversion(model=model, file=str(file), folder=str(folder)))
    ended = launch.worker_outcome(vplan_command("worker", "convert", str(request)), request, "cpu", lambda: None)
    if ended.name != "ok":
        raise VplanError(ended.message, ended.fix, ended.exit_code)
