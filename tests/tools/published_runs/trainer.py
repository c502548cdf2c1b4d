"""What has to be known of a trainer to run its published rows again."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from planner.evidence.published import Row


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
    prepare: Callable[[Path], None]
    """makes the data in a folder"""
    commit: Callable[[Row], str]
    hollow: Callable[[Row], str]
    command: Callable[[Row, Folders], list[str]]
    """raises a VplanError for a row that it does not cover"""
    headings: Mapping[str, str]
    """moment -> the line of the log behind which its counters stand"""
    printed: Mapping[str, str]
    """moment -> the end of the id of the row that was printed then"""
    peak: str
    """the counter of those rows"""
    counter: str
    """pattern of a counter of the log: groups `name` and `gib`"""
    last: str
    """the moment after which the run may end"""

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
