"""What was measured, as a page shows it beside what is predicted. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from planner.catalog.plan_id import row_id
from planner.estimate import timeline as step_timeline
from planner.evidence.published import Counter, Interval, Row
from planner.hardware.memory_trace import Overlay, laid_over, trace_of
from planner.search.capacity_map import Capacity, Shape
from planner.spec.job import Job
from planner.spec.plan import Evidence, Plan
from planner.units import gib

NEAREST = 6
"""Measured rows of a model that are compared on a plan's page; `vplan accuracy` compares them all."""


@dataclass(frozen=True)
class Probe:
    """One probe: what it measured, or why it ended. Bytes and seconds; None where nothing was measured."""

    id: str
    time: str
    gpu: str
    outcome: str
    phase: str
    allocated_bytes: int | None
    reserved_bytes: int | None
    device_bytes: int | None
    step_seconds: float | None
    retries: int | None
    reason: str
    planned: bool
    """of this very plan"""


def measured(table: Capacity, rows: Iterable[Row], job: Job) -> dict[Shape, tuple[str, ...]]:
    """Shapes of the capacity map at which this model was measured with this method -> the rows' ids and outcomes."""
    shapes = {cell.shape for row in table.cells for cell in row}
    by_shape: dict[Shape, tuple[str, ...]] = {}
    for row in rows:
        length = row.job.frames if table.axis == "frames" else row.job.batch_size
        shape = (length, row.job.height, row.job.width)
        alike = row.job.model == job.model and row.job.method == job.method
        if alike and shape in shapes and (table.axis == "batch" or row.job.batch_size == job.batch_size):
            label = f"{row.id} on {row.machine.gpu}: {row.outcome}"
            by_shape[shape] = (*by_shape.get(shape, ()), label)
    return by_shape


def nearest(rows: Iterable[Row], job: Job) -> list[Row]:
    """The rows of the same model that are most like a job: the same method, then about as many pixels."""

    def distance(row: Row) -> tuple[bool, float]:
        return row.job.method != job.method, abs(math.log(_pixels(row.job) / _pixels(job)))

    return sorted((row for row in rows if row.job.model == job.model), key=distance)[:NEAREST]


def _pixels(job: Job) -> int:
    return job.batch_size * job.frames * job.height * job.width


def probes(plan: Plan, rows: Iterable[Mapping[str, Any]]) -> tuple[Probe, ...]:
    """The plan's evidence, then rows of a file of the same model, each with how it ended."""
    evidence = [_probe(entry.id, entry.measured.to_json(), entry.env.to_json(), "", True) for entry in plan.evidence]
    ids = {probe.id for probe in evidence}
    further = [
        _probe(str(row["id"]), row["measured"], row.get("env", {}), _reason(row), False)
        for row in rows
        if row.get("job", {}).get("model") == plan.job.model and row["id"] not in ids
    ]
    return (*evidence, *further)


def overlay(plan: Plan, rows: Iterable[Mapping[str, Any]], timeline: step_timeline.Timeline) -> Overlay | None:
    """The trace of this very plan's last probe that has one, over the step that was replayed."""
    name = row_id(plan)
    traces = [trace for row in rows if row["id"] == name and (trace := trace_of(row))]
    return laid_over(timeline, traces[-1], name) if traces else None


def _reason(row: Mapping[str, Any]) -> str:
    details = row.get("details", {})
    return str(details.get("message", "")) if isinstance(details, dict) else ""


def _probe(name: str, measured: Mapping[str, Any], env: Mapping[str, Any], reason: str, planned: bool) -> Probe:
    return Probe(
        id=name,
        time=str(env.get("time", "")),
        gpu=str(env.get("gpu", "")),
        outcome=str(measured.get("outcome", "")),
        phase=str(measured.get("phase") or ""),
        allocated_bytes=measured.get("allocated_bytes"),
        reserved_bytes=measured.get("reserved_bytes"),
        device_bytes=measured.get("device_bytes"),
        step_seconds=measured.get("step_seconds"),
        retries=measured.get("retries"),
        reason=reason,
        planned=planned,
    )


def evidence_row(plan: Plan, entry: Evidence) -> Row:
    """A plan's evidence as a row that `planner.evidence.accuracy` can compare."""
    measured = entry.measured
    counters: tuple[tuple[Counter, int | None], ...] = (
        ("device", measured.device_bytes),
        ("reserved", measured.reserved_bytes),
        ("allocated", measured.allocated_bytes),
    )
    intervals = [Interval(name, gib(size), gib(size)) for name, size in counters if size]
    return Row(
        id=entry.id,
        implementation="vplan",
        job=plan.job,
        strategy=plan.strategy,
        machine=plan.machine,
        outcome=measured.outcome,
        intervals=tuple(intervals) if measured.outcome == "ok" else (),
    )
