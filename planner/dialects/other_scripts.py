"""Scripts that trainers have beside those that are read, from `profiles/other_scripts.toml`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from pathlib import PurePosixPath

import profiles
from planner.catalog.profile_files import read_record
from planner.schema import Record, Text


class OtherScripts(Record):
    """The scripts of one trainer that are not read."""

    name: Text
    """the trainer's dialect"""
    commit: Text
    scripts: tuple[Text, ...]
    """paths in its repository"""


class OtherScriptsFile(Record):
    """The file."""

    trainer: tuple[OtherScripts, ...]


def whose(typed: str) -> list[str]:
    """The trainers one of whose scripts a path names by its end, those with the longest end alone. `train.py` without
    its folder is the name of many, and of nobody's."""
    parts = PurePosixPath(typed.replace("\\", "/")).parts
    alike = {
        entry.name: max(_same_end(parts, PurePosixPath(one).parts) for one in entry.scripts) for entry in scripts()
    }
    longest = max(alike.values())
    if longest < (2 if parts[-1:] == ("train.py",) else 1):
        return []
    return [trainer for trainer, count in alike.items() if count == longest]


def _same_end(parts: Sequence[str], others: Sequence[str]) -> int:
    """How many parts two paths have in common, counted from their ends."""
    pairs = zip(reversed(parts), reversed(others), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@functools.cache
def scripts() -> tuple[OtherScripts, ...]:
    """Those of all trainers, as the file has them."""
    return read_record(profiles.OTHER_SCRIPTS, OtherScriptsFile).trainer
