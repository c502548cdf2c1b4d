"""What the observer (`trainers/observer`) wrote of each process, read from the run's folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

PATTERN = "observed-*.json"
PACKAGE_FOLDERS = ("/site-packages/", "/dist-packages/")
_LIBRARIES = (*PACKAGE_FOLDERS, "/lib/python3", "<frozen ", "<string>")
"""In paths of code that is not the user's."""


class Frame(NamedTuple):
    """A place in Python code."""

    file: str
    line: int
    function: str
    source: str

    @property
    def is_library(self) -> bool:
        """Whether an installed package has this code."""
        return any(part in self.file for part in _LIBRARIES)

    @property
    def place(self) -> str:
        """As people name it, `train.py:12`: from the current folder, or from the folder of installed packages."""
        path = self.file
        for folder in PACKAGE_FOLDERS:
            path = path.rpartition(folder)[2]
        if os.path.isabs(path) and not (near := os.path.relpath(path)).startswith(os.pardir):
            path = near
        return f"{path}:{self.line}"

    def to_json(self) -> dict[str, Any]:
        """The place as JSON."""
        return self._asdict()


class OutOfMemory(NamedTuple):
    """An allocation that failed."""

    device: int
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    phase: str
    step: int
    """the optimizer step that was going on, from 1"""
    moment: str | None
    """what was going on, such as "forward of blocks.12"; None outside of modules and backward passes"""
    frames: tuple[Frame, ...]
    """outermost first"""


class RefusedFeature(NamedTuple):
    """What the program wanted to do and cannot be rehearsed."""

    what: str
    fix: str
    frames: tuple[Frame, ...]


class Observed(NamedTuple):
    """One process."""

    pid: int
    rank: int | None
    local_rank: int | None
    world_size: int | None
    torch: str
    phase: str
    phases: Mapping[str, Mapping[int, Mapping[str, int]]]
    """phase to device to `allocated` and `reserved`, bytes"""
    steps: int
    retries: int
    """times that torch gave its cache back because memory was short"""
    ooms: int
    oom: OutOfMemory | None
    refused: RefusedFeature | None
    reads: Mapping[str, int]
    """`file:line method` to how often a tensor's values were read there"""
    hollow_bytes: int
    """the most that copies of hollow weights, and an optimizer's states, in host RAM would have taken, which were not
    made"""
    end: str
    """"steps": the last wanted step is done; "exit"; "refused"; empty while it runs, and after a signal"""


def read_observed(folder: Path) -> list[Observed]:
    """All processes that used a card so far, by rank and then by process id."""
    observed = []
    for path in folder.glob(PATTERN):
        try:
            observed.append(_read(json.loads(path.read_text(encoding="utf-8"))))
        except FileNotFoundError:  # replaced just now
            continue
    return sorted(observed, key=lambda process: (process.rank or 0, process.pid))


def _read(data: dict[str, Any]) -> Observed:
    oom, refused = data["oom"], data["refused"]
    phases = {
        phase: {int(device): peaks for device, peaks in devices.items()} for phase, devices in data["phases"].items()
    }
    known = {name: data[name] for name in Observed._fields if name not in ("oom", "refused", "phases")}
    return Observed(
        **known,
        phases=phases,
        oom=OutOfMemory(**{**oom, "frames": _frames(oom["frames"])}) if oom else None,
        refused=RefusedFeature(refused["what"], refused["fix"], _frames(refused["frames"])) if refused else None,
    )


def _frames(frames: list[dict[str, Any]]) -> tuple[Frame, ...]:
    return tuple(Frame(**frame) for frame in frames)


def program_frame(frames: tuple[Frame, ...]) -> Frame | None:
    """The innermost place in the user's own code; where all of it is installed, the innermost of all."""
    own = [frame for frame in frames if not frame.is_library]
    inner = own or frames
    return inner[-1] if inner else None
