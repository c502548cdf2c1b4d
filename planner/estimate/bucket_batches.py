"""A batch size for each of a job's shapes: as many samples as fit without a step longer than the slowest shape's.

Small shapes then do as much work per step as the largest, and ranks with different shapes wait less for each other. As
in AdaptiveLoad (arXiv 2605.17923), memory and seconds limit a batch rather than tokens; the seconds come from the
estimate of a step instead of AdaptiveLoad's formula of the sequence length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from planner.errors import NotEstimatedError
from planner.spec.job import Bucket, Job
from planner.spec.plan import Estimate

Price = Callable[[Job], Estimate]
"""Estimates a job under the plan's strategy; raises a NotEstimatedError if no recording covers it."""

MOST = 256
"""Most samples in a micro-batch."""

SAME_SECONDS = 1.02
"""Tolerance: a step up to this factor longer than the slowest shape's counts as equally long."""

VERDICTS = ("fits", "tight", "no")


class PricedShape(NamedTuple):
    """A shape with its batch size: seconds of its step, and device memory of training it alone."""

    shape: Bucket
    step_seconds: float
    step_seconds_high: float
    device_bytes: int

    def to_json(self) -> dict[str, Any]:
        """As in `--json`."""
        return {
            "frames": self.shape.frames,
            "height": self.shape.height,
            "width": self.shape.width,
            "batch_size": self.shape.batch_size,
            "step_seconds": self.step_seconds,
            "step_seconds_high": self.step_seconds_high,
            "device_bytes": self.device_bytes,
        }


class EvenedPlan(NamedTuple):
    """A plan with a batch size for each shape, and the seconds and memory of each."""

    plan: Estimate
    shapes: tuple[PricedShape, ...]
    before: tuple[PricedShape, ...]
    """the same at the job's own batch size"""


def with_batch_sizes(plan: Estimate, price: Price, most: Mapping[Bucket, int]) -> EvenedPlan:
    """The plan with batch sizes for its shapes; unchanged if it does not fit, or no shape allows a larger batch.
    ``most``: the number of distinct samples of each shape, by the shape without a batch size."""
    job = plan.job
    before = tuple(_priced(job, shape, price) for shape in job.shapes)
    if plan.verdict == "no":
        return EvenedPlan(plan, before, before)
    longest = SAME_SECONDS * max(entry.step_seconds for entry in before)
    shapes = [
        _largest(job, entry, price, longest, plan.verdict, most[entry.shape.replace(batch_size=None)])
        for entry in before
    ]
    found = price(_with(job, shapes))
    while VERDICTS.index(found.verdict) > VERDICTS.index(plan.verdict):  # together they fragment memory more
        at = max(range(len(shapes)), key=lambda place: (_batch(shapes[place]) > 1, shapes[place].device_bytes))
        if _batch(shapes[at]) == 1:
            return EvenedPlan(plan, before, before)
        shapes[at] = _priced(job, shapes[at].shape.replace(batch_size=_batch(shapes[at]) - 1), price)
        found = price(_with(job, shapes))
    return EvenedPlan(found.replace(assumptions=plan.assumptions), tuple(shapes), before)


def _batch(entry: PricedShape) -> int:
    return entry.shape.batch_size or 1


def _with(job: Job, shapes: Sequence[PricedShape]) -> Job:
    return job.replace(buckets=tuple(entry.shape for entry in shapes))


def _priced(job: Job, shape: Bucket, price: Price) -> PricedShape:
    found = price(job.replace(buckets=(shape,)))
    assert found.step_seconds_high is not None
    return PricedShape(shape, found.step_seconds, found.step_seconds_high, found.peak.device_bytes)


def _largest(job: Job, entry: PricedShape, price: Price, longest: float, verdict: str, most: int) -> PricedShape:
    """The shape with the largest batch whose step takes at most ``longest`` seconds and whose verdict alone is no worse
    than ``verdict``. Both only get worse with the batch, so this is a binary search."""
    best = entry
    low, high = _batch(entry), min(MOST, most)
    while low < high:
        middle = (low + high + 1) // 2
        shape = entry.shape.replace(batch_size=middle)
        try:
            found = price(job.replace(buckets=(shape,)))
        except NotEstimatedError:  # a batch that no recording covers
            high = middle - 1
            continue
        assert found.step_seconds_high is not None
        if found.step_seconds <= longest and VERDICTS.index(found.verdict) <= VERDICTS.index(verdict):
            low, best = middle, PricedShape(shape, found.step_seconds, found.step_seconds_high, found.peak.device_bytes)
        else:
            high = middle - 1
    return best
