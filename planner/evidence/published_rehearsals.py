"""Rehearsals of published runs: the trainer's own code at its commit, on a virtual GPU."""

# No `from __future__ import annotations` here: pydantic would compile every field's annotation again at each start.
import functools
import tomllib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pydantic import ConfigDict

import profiles
from planner.evidence.accuracy import Comparison, distances
from planner.evidence.jsonl import rows_by_id
from planner.schema import Positive, Record

FOLDER = profiles.REHEARSALS / "published"
"""Has one file per trainer, written by ``tests/tools/rehearse_published.py``."""


REASONS = FOLDER / "not-rehearsed.toml"


class Reason(Record):
    """The reason why some published numbers are not rehearsed."""

    why: str
    rows: list[str]


class _Rehearsed(Record):
    """One rehearsed run. A row's other fields (commit, command, versions, all counters) are for human readers."""

    model_config = ConfigDict(extra="ignore")

    rehearsed_gib: dict[str, Positive]
    """id of the published row -> its counter in the rehearsal"""


@functools.cache
def rehearsed_peaks() -> Mapping[str, float]:
    """Id of a published row -> GiB of its counter in the rehearsal of its run."""
    found: dict[str, float] = {}
    for path in sorted(FOLDER.glob("*.jsonl")):
        for name, row in rows_by_id(path).items():
            found |= _Rehearsed.read(row, f"{path.name}: {name}").rehearsed_gib
    return MappingProxyType(found)


def reasons() -> Sequence[Reason]:
    """The reasons why published numbers are not rehearsed."""
    tables = tomllib.loads(REASONS.read_text(encoding="utf-8"))["reason"]
    return [Reason.read(each, REASONS.name) for each in tables]


def summary(compared: Sequence[Comparison]) -> dict[str, Any]:
    """How many of the published numbers were rehearsed, why the others were not, and how far the prediction and the
    printed number are from the rehearsal, in per cent of it."""
    rehearsed = [(entry, entry.rehearsed_gib) for entry in compared if entry.rehearsed_gib is not None]
    predicted = [(entry.predicted.of_rehearsal / gib - 1) * 100 for entry, gib in rehearsed if entry.predicted]
    printed = [(entry.measured.low_gib / gib - 1) * 100 for entry, gib in rehearsed if entry.measured is not None]
    published = {entry.row.id for entry in compared if entry.row.origin == "published" and entry.measured is not None}
    left = [(each.why, sorted(published.intersection(each.rows))) for each in reasons()] if published else []
    return {
        "n": len(rehearsed),
        "of": len(published),
        "not_rehearsed": [{"why": why, "rows": rows} for why, rows in left if rows],
        "predicted": distances(predicted),
        "printed": distances(printed),
        "rehearsed_gib": {entry.row.id: gib for entry, gib in rehearsed},
    }
