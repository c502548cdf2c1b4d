"""The errors of estimates on our own measurements, half by half: one half may be learned from, the other only judges.

A grid's rows are split by a hash of their ids, so nobody chooses the halves. All numbers here are of estimates from
recordings alone, which know no row of either half. Estimates that learn from measurements use only the half that is not
held out (`planner.evidence.from_ledger`).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from planner.evidence.accuracy import Comparison, error_statistics
from planner.spec.plan import Verdict

COUNTERS = ("allocated", "reserved", "device")

HALVES = (("held_out", "held out"), ("other", "other half"))
BOTH = ("all", "both halves")
NUMBERS = {
    "allocated": "allocated",
    "reserved": "reserved",
    "reserved_expandable": "reserved, expandable segments",
    "device": "device",
    "step_seconds": "seconds of a step",
}
TAKEN = {
    "measured": "our own trainer, estimates from recordings alone",
    "simulated": "a simulated machine: a rehearsal that says nothing about accuracy",
}
NONE = (
    "no rows of our own trainer on a GPU, so its accuracy is not reported; "
    "`vplan calibrate --grid one-gpu -o rows.jsonl` measures them"
)
"""Shown if there are no rows from a GPU."""

FEWEST = 3
"""The least number of pairs for a rank correlation."""


def halves(compared: Sequence[Comparison]) -> dict[str, dict[str, Any]]:
    """Kind of row ("measured" on a GPU, "simulated") -> half ("held_out", "other", "all") -> statistics of its errors.

    Kinds without rows are left out.
    """
    by_half: dict[str, dict[str, Any]] = {}
    for origin in ("measured", "simulated"):
        own = [entry for entry in compared if entry.row.origin == origin and entry.unsupported is None]
        if own:
            parts = {"held_out": [entry for entry in own if entry.row.held_out]}
            parts |= {"other": [entry for entry in own if not entry.row.held_out], "all": own}
            by_half[origin] = {name: _half(entries) for name, entries in parts.items()}
    return by_half


def verdicts(name: str, half: dict[str, Any]) -> str:
    """One line about one half of the rows: how many verdicts were wrong either way, and how well the order of speed was
    predicted. ``name``: of the half."""
    verdict, order = half["verdict"], half["order"]
    words = f"{name}: of {verdict['n']} runs {verdict['under']} were said to fit but ran out, "
    words += f"{verdict['false_refusal']} were refused but ran"
    if order["jobs"]:
        words += f"; order of speed in {order['jobs']} jobs: Spearman {order['mean_spearman']:.2f} on average, "
        words += f"{order['min_spearman']:.2f} at least"
    return words


def _half(compared: Sequence[Comparison]) -> dict[str, Any]:
    judged = [entry for entry in compared if entry.judges]
    ran = [entry for entry in judged if entry.row.step_seconds]
    grown = [entry for entry in compared if entry.counter == "reserved" and entry.row.strategy.expandable_segments]
    fits: dict[Verdict, int] = {"fits": 0, "tight": 0, "no": 0}
    for entry in judged:
        if entry.verdict:
            fits[entry.verdict] += 1
    return {
        "rows": len(judged),
        **{counter: error_statistics(entry for entry in compared if entry.counter == counter) for counter in COUNTERS},
        "reserved_expandable": error_statistics(grown),
        "step_seconds": _seconds(ran),
        "order": _order(ran),
        "verdict": {
            "n": len(judged),
            **fits,
            "under": sum(entry.missed == "under" for entry in judged),
            "false_refusal": sum(entry.missed == "false_refusal" for entry in judged),
        },
    }


def _seconds(ran: Iterable[Comparison]) -> dict[str, Any]:
    """Statistics of the errors of step seconds, in per cent of the measured seconds."""
    errors = [error for entry in ran if (error := seconds_error_pct(entry)) is not None]
    sizes = [abs(error) for error in errors]
    return {
        "n": len(errors),
        "mean_pct": statistics.fmean(errors) if errors else None,
        "mean_abs_pct": statistics.fmean(sizes) if sizes else None,
        "median_abs_pct": statistics.median(sizes) if sizes else None,
        "max_abs_pct": max(sizes, default=None),
    }


def seconds_error_pct(entry: Comparison) -> float | None:
    """The error of predicted step seconds in per cent of the measured ones; negative if the prediction is too short.
    None if one of them is missing."""
    measured, predicted = entry.row.step_seconds, entry.predicted_seconds
    return 100 * (predicted - measured) / measured if measured and predicted else None


def _order(ran: Iterable[Comparison]) -> dict[str, Any]:
    """How well strategies of one job on one card are ordered by speed: the rank correlation within each job."""
    jobs: dict[str, list[tuple[float, float]]] = {}
    for entry in ran:
        if entry.row.step_seconds and entry.predicted_seconds:
            job = f"{entry.row.machine.gpu} {entry.row.job.model_dump_json()}"
            jobs.setdefault(job, []).append((entry.row.step_seconds, entry.predicted_seconds))
    correlations = [value for pairs in jobs.values() if (value := spearman(pairs)) is not None]
    return {
        "jobs": len(correlations),
        "mean_spearman": statistics.fmean(correlations) if correlations else None,
        "min_spearman": min(correlations, default=None),
    }


def spearman(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's rank correlation of pairs, -1 to 1: the Pearson correlation of their ranks, with the mean rank for
    equal values. None for fewer than `FEWEST` pairs, and if all values of one side are equal."""
    if len(pairs) < FEWEST:
        return None
    sides = [list(side) for side in zip(*pairs, strict=True)]
    if any(len(set(side)) == 1 for side in sides):
        return None
    return statistics.correlation(*map(_ranks, sides))


def _ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value; equal values have their mean rank. (`statistics.correlation` can do this from Python 3.12
    on.)"""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]
