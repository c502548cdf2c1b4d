"""The files of `vplan demo`: a tiny model and three clips, written by `trainers/demo.py` in a separate process."""

# No `from __future__ import annotations` here: pydantic would compile every field's annotation again at each start.
import shlex
import tempfile
from pathlib import Path

from planner.errors import VplanError, quoted
from planner.launch import launch
from planner.schema import Record
from planner.worker_process import vplan_command

LIKE = "wan2.1-t2v-1.3b"
"""The bundled model of whose pipeline the demo has a tiny version."""

MODEL, CLIPS = "model", "clips"
"""Subfolders of the demo."""


class DemoRequest(Record):
    """The request to the process that writes the demo."""

    like: str
    """name of the bundled model"""
    model: str
    """folder to write"""
    clips: str
    """folder to write"""


def write(folder: Path) -> None:
    """Writes the demo into a new or empty folder. Raises a VplanError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            fix = f"name another, as in vplan demo {shlex.quote(f'{folder.name}-2')}"
            raise VplanError(f"{quoted(folder.name)} is not empty", fix)
    except OSError as error:
        raise VplanError(f"cannot make {quoted(str(folder))}: {error.strerror}", "name another folder") from None
    with tempfile.TemporaryDirectory(prefix="vplan-demo-") as place:
        wanted = DemoRequest(like=LIKE, model=str(folder / MODEL), clips=str(folder / CLIPS))
        request = launch.write_request(Path(place), wanted)
        ended = launch.worker_outcome(vplan_command("worker", "demo", str(request)), request, "cpu", lambda: None)
    if ended.name != "ok":
        raise VplanError(f"the demo was not written: {ended.message}", "see `vplan doctor`", ended.exit_code)
