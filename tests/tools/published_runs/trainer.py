"""What has to be known of a trainer to run its published rows again."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from planner.evidence.published import Row

RUN = "run"
"""The moment of counters that are not the trainer's but the rehearsal's: the peaks of the whole run."""

TRAINING = "training"
"""The same from the first forward that has a backward on: without loading and caching."""


@dataclass(frozen=True)
class Folders:
    """Where a trainer's files lie on this machine."""

    source: Path
    """its code, at one commit"""
    python: Path
    """the folder of its own Python, a virtual environment"""
    data: Path
    """what it trains on"""
    output: Path
    """for what it writes"""


WRITE_CLIP = """
import sys, cv2, numpy
path, frames, height, width = sys.argv[1], *map(int, sys.argv[2:])
writer = cv2.VideoWriter(path, cv2.VideoWriter_fourcc(*"mp4v"), 25, (width, height))
for _ in range(frames):
    writer.write(numpy.full((height, width, 3), 128, numpy.uint8))
writer.release()
"""
"""For the trainer's own Python, where it has OpenCV."""


def write_clip(folders: Folders, path: Path, frames: int, height: int, width: int) -> None:
    """A grey clip of 25 frames a second."""
    sizes = map(str, (frames, height, width))
    subprocess.run([str(folders.python / "bin" / "python"), "-c", WRITE_CLIP, str(path), *sizes], check=True)


@dataclass(frozen=True)
class PublishedTrainer:
    """One trainer, as it was when its table was printed."""

    name: str
    repository: str
    packages: tuple[str, ...]
    """for pip, with their own dependencies"""
    packages_alone: tuple[str, ...]
    """for pip, without: what would bring along NVIDIA's libraries"""
    versions: tuple[str, ...]
    """packages whose versions a row notes"""
    prepare: Callable[[Folders], None]
    """makes the data"""
    commit: Callable[[Row], str]
    hollow: Callable[[Row], tuple[str, ...]]
    """weights to stand in for, as `vplan rehearse --hollow` takes them"""
    command: Callable[[Row, Folders], list[str]]
    """raises a VplanError for a row that it does not cover"""
    published: Callable[[Row], Mapping[str, tuple[str, str]]]
    """id of each row that the run printed -> its moment and counter"""
    interpreter: str = ""
    """its Python, as `python3.12`; empty: ours"""
    packages_built: tuple[str, ...] = ()
    """for pip, without, of which only source is published and whose build imports torch: torch's CUDA wheel cannot be
    imported without NVIDIA's libraries, so they are built with the torch of our own Python"""
    environment: Mapping[str, str] = field(default_factory=dict)
    """variables that its build and its runs need here; `{data}` stands for that folder"""
    code: str = ""
    """folder of its source that Python has to find it in"""
    last: str = RUN
    """the moment after which the run may end"""
    headings: Mapping[str, str] = field(default_factory=dict)
    """moment -> the line of the log behind which its counters stand; none where the trainer prints none"""
    counter: str = ""
    """pattern of a counter of the log: groups `name` and `gib`"""
    sampler: tuple[str, str] = ("", "")
    """file of its packages, and pattern, where the number of denoising steps of its validation stands"""
    steps: int = 0
    """optimizer steps behind which the run is ended; 0: behind the counters of `last`"""

    def set_denoising_steps(self, folders: Folders, steps: int) -> None:
        """Writes the number of denoising steps of its validation into its packages: a pipeline's default, which its
        command cannot set."""
        name, pattern = self.sampler
        (file,) = folders.python.glob(f"lib/python3*/site-packages/{name}")
        text, found = re.subn(pattern, lambda hit: f"{hit[1]}{steps}", file.read_text(encoding="utf-8"))
        assert found == 1, f"{name}: {found} places"
        file.write_text(text, encoding="utf-8")

    def peaks(self, log: str) -> dict[str, dict[str, float]]:
        """GiB by moment and counter, as far as the trainer has printed them."""
        found = {}
        for moment, heading in self.headings.items():
            _, separator, behind = log.partition(heading)
            if separator:
                found[moment] = {hit["name"]: float(hit["gib"]) for hit in self._counters(behind)}
        return found

    def _counters(self, text: str) -> list[re.Match[str]]:
        """The first of each name: those of the next heading come later."""
        first: dict[str, re.Match[str]] = {}
        for hit in re.finditer(self.counter, text):
            first.setdefault(hit["name"], hit)
        return list(first.values())
