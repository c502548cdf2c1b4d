"""Compares step times that others published with the estimates for the same runs.

One constant of `planner.estimate.roofline`, the CPU time of a launch, is fitted to one half of them (`FITTED`), and the
other half judges. A run that our settings cannot express is a row too, with the reason why it is left out.
"""

# No `from __future__ import annotations` here: pydantic would compile every field's annotation again at each start.
import hashlib
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from pydantic import ConfigDict

import profiles
from planner.errors import NotEstimatedError
from planner.evidence.accuracy import Predict
from planner.evidence.held_out import spearman
from planner.evidence.jsonl import rows_by_id
from planner.evidence.published import fill_defaults
from planner.schema import Positive, Record
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy

FAR_PCT = 25.0
"""The error in per cent above which a cell is listed with its known cause."""

CLOSE_PCT = 20.0

FITTED, JUDGING = "fitted", "judging"
"""The halves of the rows: the one that the CPU time of a launch was fitted to, and the other."""


class StepTime(Record):
    """One published step time. A row's other fields (source, printed memory) are for human readers."""

    model_config = ConfigDict(extra="ignore")

    id: str
    implementation: str
    step_seconds: Positive
    job: dict[str, Any]
    strategy: dict[str, Any]
    machine: dict[str, Any]
    left_out: str | None = None
    """why it cannot be compared"""
    note: str | None = None
    """known differences from the estimated run"""

    @property
    def half(self) -> str:
        """The half that it is in, by the hash of its id."""
        return JUDGING if int(hashlib.sha256(self.id.encode()).hexdigest(), 16) % 2 else FITTED

    @property
    def card(self) -> str:
        """The card's name in the catalog."""
        return str(self.machine["gpu"])

    def is_of(self, text: str) -> bool:
        """Whether its id or model contains a text."""
        return text.lower() in f"{self.id} {self.job.get('model')}".lower()


@dataclass(frozen=True, kw_only=True)
class TimedCell:
    """A published step time with the estimated one, or with the reason why there is none."""

    published: StepTime
    seconds: float | None = None
    left_out: str | None = None

    @property
    def error_pct(self) -> float | None:
        """The estimate's error in percent of the published time; negative where it is too short."""
        return None if self.seconds is None else (self.seconds / self.published.step_seconds - 1) * 100


def published_step_times() -> list[StepTime]:
    """The published step times that are bundled with vplan."""
    files = sorted((profiles.MEASUREMENTS / "step_times").glob("*.jsonl"))
    return [StepTime.read(row, f"{path.name}: {name}") for path in files for name, row in rows_by_id(path).items()]


def compare(cells: Iterable[StepTime], predict: Predict) -> list[TimedCell]:
    """The cells with their estimates, or with the reason why they cannot be estimated."""
    return [_compared(cell, predict) for cell in cells]


def _compared(cell: StepTime, predict: Predict) -> TimedCell:
    if cell.left_out:
        return TimedCell(published=cell, left_out=cell.left_out)
    job, strategy = dict(cell.job), dict(cell.strategy)
    fill_defaults(cell.implementation, job, strategy)
    parts = Job.read(job, cell.id), Strategy.read(strategy, cell.id), Machine.read(cell.machine, cell.id)
    try:
        configuration = Configuration.of(*parts)
        return TimedCell(published=cell, seconds=predict(configuration, cell.implementation).step_seconds)
    except NotEstimatedError as error:
        return TimedCell(published=cell, left_out=error.message)


def answer(cells: Sequence[TimedCell]) -> dict[str, Any]:
    """The JSON answer: every cell, and the errors of the estimates over all cells, by card and by half."""
    by_card = sorted(cells, key=lambda cell: cell.published.card)
    return {
        "cells": [
            {
                "id": cell.published.id,
                "gpu": cell.published.card,
                "step_seconds": cell.published.step_seconds,
                "predicted_seconds": cell.seconds,
                "error_pct": cell.error_pct,
                "left_out": cell.left_out,
                "note": cell.published.note,
            }
            for cell in cells
        ],
        "summary": summary(cells),
        "by_gpu": {card: summary(list(of)) for card, of in groupby(by_card, key=lambda cell: cell.published.card)},
        "halves": {
            half: summary([cell for cell in cells if cell.published.half == half]) for half in (FITTED, JUDGING)
        },
        "left_out": left_out(cells),
    }


def summary(cells: Sequence[TimedCell]) -> dict[str, Any]:
    """How far estimated seconds are off: ``n`` compared ``of`` published, absolute errors in percent, and how well the
    estimates order the cells (`spearman`)."""
    pairs = [(cell.published.step_seconds, cell.seconds) for cell in cells if cell.seconds is not None]
    errors = sorted(abs(told / taken - 1) * 100 for taken, told in pairs)
    return {
        "n": len(pairs),
        "of": len(cells),
        "median_abs_pct": statistics.median(errors) if errors else None,
        "p90_abs_pct": errors[-(-9 * len(errors) // 10) - 1] if errors else None,
        "max_abs_pct": errors[-1] if errors else None,
        "within_20_pct": 100 * sum(error <= CLOSE_PCT for error in errors) / len(errors) if errors else None,
        "rank_correlation": spearman(pairs),
    }


def far_off(cells: Iterable[TimedCell]) -> list[TimedCell]:
    """The cells whose estimates are off by more than `FAR_PCT`, the worst first."""
    off = [cell for cell in cells if abs(cell.error_pct or 0.0) > FAR_PCT]
    return sorted(off, key=lambda cell: -abs(cell.error_pct or 0.0))


def left_out(cells: Iterable[TimedCell]) -> dict[str, int]:
    """Reason why cells are left out -> number of cells, the most frequent first."""
    reasons = [cell.left_out for cell in cells if cell.left_out]
    return {reason: reasons.count(reason) for reason in sorted(set(reasons), key=lambda one: -reasons.count(one))}
