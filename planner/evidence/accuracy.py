"""How close estimates are to measurements: the error of each row, and statistics over all of them (docs/accuracy.md).

The estimator is a parameter: this module compares but does not predict.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, get_args

from planner.catalog import card_lookup, lookup
from planner.errors import VplanError, did_you_mean, quoted
from planner.evidence.published import Counter, Interval, Row
from planner.layout import margin
from planner.layout.correction import SEPARATE_PHASES
from planner.spec.combinations.contradictions import refuse_contradictions
from planner.spec.configuration import Configuration
from planner.spec.job import Strategy
from planner.spec.plan import RAN, RAN_OUT, Estimate, PhaseName, PhasePeak, Verdict
from planner.units import gib

PEAKS: tuple[Counter, ...] = ("allocated", "reserved", "device", "unknown")
"""Counters of a run's peak; `unknown` if the publisher does not say which of the three it is."""

AFTER_STEP: Counter = "allocated_after_step"
"""Not a peak but what stays allocated after a step. Its errors are never averaged with those of peaks."""

WITH_VALIDATION: Counter = "reserved_with_validation"
"""The peak of training and the following validation. Its errors are kept separate from those of training alone."""

APART: tuple[Counter, ...] = (AFTER_STEP, WITH_VALIDATION)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The part of an estimate that a measurement can check."""

    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    verdict: Verdict
    basis: str
    low: float = 1.0
    high: float = 1.0
    """the estimate's range relative to the prediction: low_bytes and high_bytes divided by device_bytes"""
    budget_bytes: int = 0
    step_seconds: float | None = None
    phases: Mapping[PhaseName, PhasePeak] = field(default_factory=dict)

    def during(self, phases: Collection[str], *, judged: bool = False) -> Prediction:
        """The prediction over only these phases: the maximum of each peak, and with ``judged`` the verdict for it. The
        prediction itself if it has none of these phases."""
        seen = [peak for phase, peak in self.phases.items() if phase in phases]
        if not seen:
            return self
        device = max(peak.device_bytes for peak in seen)
        return replace(
            self,
            allocated_bytes=max(peak.allocated_bytes for peak in seen),
            reserved_bytes=max(peak.reserved_bytes for peak in seen),
            device_bytes=device,
            verdict=margin.verdict(device, self.budget_bytes) if judged else self.verdict,
        )

    def peaks_in(self, phases: Collection[str]) -> bool:
        """Whether the phase with the highest device bytes is one of these."""
        top = max(self.phases, key=lambda phase: self.phases[phase].device_bytes, default=None)
        return top in phases

    @classmethod
    def of(cls, estimate: Estimate) -> Prediction:
        """The numbers and verdict of an estimate, as a prediction."""
        return cls(
            allocated_bytes=estimate.peak.allocated_bytes,
            reserved_bytes=estimate.peak.reserved_bytes,
            device_bytes=estimate.peak.device_bytes,
            verdict=estimate.verdict,
            basis=estimate.basis,
            low=estimate.low_bytes / estimate.peak.device_bytes,
            high=estimate.high_bytes / estimate.peak.device_bytes,
            budget_bytes=estimate.budget_bytes,
            step_seconds=estimate.step_seconds,
            phases=estimate.phases,
        )


Predict = Callable[[Configuration, str], Prediction]
"""The prediction for a run of the named trainer."""

AfterStep = Callable[[Configuration, str], int]
"""Bytes that stay allocated after a step of the named trainer."""


def estimated_after_step(configuration: Configuration, trainer: str) -> int:
    """The estimator's `AfterStep`, imported only when there is something to compare."""
    from planner.estimate.estimate import after_step_bytes
    from planner.layout.recordings import load_facts

    return after_step_bytes(configuration, load_facts(configuration), trainer)


class PredictedRange(NamedTuple):
    """A predicted number in GiB: three equal values, except for the counter `unknown`."""

    low: float
    best: float
    high: float

    @property
    def of_rehearsal(self) -> float:
        """The value to compare with a rehearsal, which for the counter `unknown` has the device's bytes."""
        return self.high


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One predicted number with its measurement; without ``measured``, a verdict with the outcome of the run."""

    row: Row
    counter: Counter
    measured: Interval | None
    judges: bool
    """whether it counts in the summary of verdicts, which one number of each run does"""
    predicted: PredictedRange | None = None
    allowed: tuple[float, float] = (1.0, 1.0)
    """the bounds of the estimate's range, relative to the prediction"""
    verdict: Verdict | None = None
    predicted_seconds: float | None = None
    """of a step, in the usual case"""
    basis: str | None = None
    family: str | None = None
    unsupported: str | None = None
    """why nothing is predicted"""
    rehearsed_gib: float | None = None
    """the same number in a rehearsal of a published run, if there is one"""

    @property
    def predicted_gib(self) -> float | None:
        """The predicted number; for a range, its value nearest to the measured interval."""
        if self.predicted is None:
            return None
        low, best, high = self.predicted
        return _clamp(_within(best, self.measured) if self.measured else best, low, high)

    @property
    def error_pct(self) -> float | None:
        """The signed distance to the interval in per cent of its nearer bound; 0 inside, negative if too low."""
        predicted = self.predicted_gib
        if self.measured is None or predicted is None:
            return None
        bound = _within(predicted, self.measured)
        return (predicted - bound) / bound * 100

    @property
    def promised_gib(self) -> tuple[float, float]:
        """The estimate's range, applied to this counter as to the device bytes. Needs a prediction."""
        assert self.predicted is not None
        return self.predicted.low * self.allowed[0], self.predicted.high * self.allowed[1]

    @property
    def inside(self) -> bool | None:
        """Whether the measured interval overlaps the estimate's range; None if either is missing."""
        if self.measured is None or self.predicted is None:
            return None
        low, high = self.promised_gib
        return low <= self.measured.high_gib and self.measured.low_gib <= high

    @property
    def missed(self) -> str | None:
        """`under`: predicted to fit but ran out; `false_refusal`: predicted not to fit but ran; None if right."""
        ran_out = self.row.outcome in RAN_OUT
        if ran_out and self.verdict == "fits":
            return "under"
        return "false_refusal" if not ran_out and self.verdict == "no" else None

    def to_json(self) -> dict[str, Any]:
        """The comparison as a row of `vplan accuracy --json`."""
        low, high = self.promised_gib if self.predicted else (None, None)
        return {
            "id": self.row.id,
            "counter": self.counter,
            "predicted_gib": self.predicted_gib,
            "predicted_low_gib": low,
            "predicted_high_gib": high,
            "low_gib": self.measured.low_gib if self.measured else None,
            "high_gib": self.measured.high_gib if self.measured else None,
            "error_pct": self.error_pct,
            "outcome": self.row.outcome,
            "verdict": self.verdict,
            "implementation": self.row.implementation,
            "basis": self.basis,
            "unsupported": self.unsupported,
        }


def _clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def _within(value: float, interval: Interval) -> float:
    """The value of the interval that is nearest to `value`."""
    return _clamp(value, interval.low_gib, interval.high_gib)


# ---- comparing


def only(rows: Sequence[Row], text: str) -> list[Row]:
    """The rows whose id or model contains the text, ignoring case. Raises a VplanError if there are none."""
    matches = [row for row in rows if text.lower() in row.id.lower() or text.lower() in row.job.model.lower()]
    if not matches:
        names = {row.job.model for row in rows} | {row.id for row in rows}
        fix = did_you_mean(text, sorted(names), "pass a part of a row's id or of its model's name")
        raise VplanError(f"no row has {quoted(text)} in its id or model", fix)
    return matches


def compare(rows: Iterable[Row], predict: Predict, after_step: AfterStep) -> list[Comparison]:
    """Compares every measured number of every row with its prediction. If there is no prediction, the comparison has
    the reason."""
    return [compared for row in rows for compared in _compare(row, predict, after_step)]


def _compare(row: Row, predict: Predict, after_step: AfterStep) -> list[Comparison]:
    """A comparison for each of the row's numbers, all from one prediction; without numbers, one for the verdict."""
    numbers: list[tuple[Counter, Interval | None]] = [(interval.counter, interval) for interval in row.intervals]
    numbers = numbers or [(row.counter, None)]
    try:
        configuration, family = _configuration_of(row)
        prediction = predict(configuration, row.trainer)
        skipped = SEPARATE_PHASES - row.phases if row.phases else frozenset()
        if prediction.peaks_in(skipped):  # the probe skipped that phase, so it cannot have run out of memory there
            prediction = prediction.during(prediction.phases.keys() - skipped, judged=True)
        prediction = prediction.during(_seen(row, configuration.strategy), judged=row.states_come_last)
        stays = after_step(configuration, row.trainer) if numbers[0][0] == AFTER_STEP else 0
    except VplanError as error:
        reason = error.message
        return [
            Comparison(row=row, counter=counter, measured=interval, judges=False, unsupported=reason)
            for counter, interval in numbers
        ]
    return [
        Comparison(
            row=row,
            counter=counter,
            measured=interval,
            judges=interval == numbers[0][1] and counter != WITH_VALIDATION,  # a verdict is about training
            predicted=_range(counter, prediction, stays),
            allowed=(prediction.low, prediction.high),
            verdict=prediction.verdict,
            predicted_seconds=prediction.step_seconds,
            basis=prediction.basis,
            family=family,
        )
        for counter, interval in numbers
    ]


def _seen(row: Row, strategy: Strategy) -> tuple[str, ...]:
    """The phases that a row's number covers. Published numbers cover training, and caching before it only if the same
    run did it."""
    if row.phases:
        return tuple(row.phases)
    if row.whole_run:
        return get_args(PhaseName)
    encodes = ("encode",) if "cached" not in (strategy.text_encoder, strategy.vae) else ()
    before = encodes if row.reset_after_load else ("load", *encodes)
    validation = ("denoise", "decode") if any(one.counter == WITH_VALIDATION for one in row.intervals) else ()
    # In a run that ended with the first optimizer step, no forward or backward ran with optimizer states.
    steps = ("first_step",) if row.states_come_last else ("first_step", "train", "optimizer")
    return (*before, *steps, *validation)


def _configuration_of(row: Row) -> tuple[Configuration, str]:
    """(the row's configuration with names looked up and open fields filled in, the model's family). Raises a VplanError
    for a row that cannot be estimated."""
    if row.unsupported:
        raise VplanError(row.unsupported)
    if row.outcome not in RAN | RAN_OUT:
        raise VplanError(f"outcome {row.outcome} says nothing about memory")
    model = lookup.model(row.job.model)
    count, card = card_lookup.parse_gpus(row.machine.gpu)
    lookup.check_job(model, row.job)
    lookup.check_blocks(model, row.strategy)
    machine = row.machine.replace(
        gpu=card.name,
        gpus=count if count > 1 else row.machine.gpus,
        unified=row.machine.unified or card.unified,
    )
    if machine.host_ram is None:
        machine = machine.replace(host_ram=card_lookup.installed_host_ram(card, machine.gpus))
    job = row.job.replace(model=model.name)
    configuration = Configuration.of(job, row.strategy, machine)
    refuse_contradictions(configuration)
    return configuration, model.family


def _range(counter: Counter, prediction: Prediction, after_step_bytes: int) -> PredictedRange:
    allocated, reserved, device = (
        gib(size) for size in (prediction.allocated_bytes, prediction.reserved_bytes, prediction.device_bytes)
    )
    if counter == "unknown":
        return PredictedRange(allocated, reserved, device)
    by_counter = {"allocated": allocated, "reserved": reserved, "device": device, AFTER_STEP: gib(after_step_bytes)}
    by_counter[WITH_VALIDATION] = reserved
    return PredictedRange(by_counter[counter], by_counter[counter], by_counter[counter])


# ---- summing up


def answer(compared: Sequence[Comparison]) -> dict[str, Any]:
    """The JSON answer of `vplan accuracy`: `rows` and `summary`."""
    return {"rows": [entry.to_json() for entry in compared], "summary": summary(compared)}


def summary(compared: Sequence[Comparison]) -> dict[str, Any]:
    """Errors by counter and by implementation (all peaks, and each of its counters), and verdicts against outcomes."""
    implementations = dict.fromkeys(entry.row.implementation for entry in compared)
    return {
        **{counter: error_statistics(entry for entry in compared if entry.counter == counter) for counter in PEAKS},
        **{counter: error_statistics(entry for entry in compared if entry.counter == counter) for counter in APART},
        "by_implementation": {
            name: _by_counter([entry for entry in compared if entry.row.implementation == name])
            for name in implementations
        },
        "verdict": _verdicts(compared),
        "coverage": coverage(entry for entry in compared if entry.counter in PEAKS),
        "coverage_with_validation": coverage(entry for entry in compared if entry.counter == WITH_VALIDATION),
        "measured_peaks": _measured_peaks(compared),
        "unsupported": sum(entry.unsupported is not None for entry in compared),
    }


def _verdicts(compared: Sequence[Comparison]) -> dict[str, int]:
    """The number of verdicts, and how many are wrong either way."""
    judged = [entry for entry in compared if entry.judges]
    return {
        "n": len(judged),
        "under": sum(entry.missed == "under" for entry in judged),
        "false_refusal": sum(entry.missed == "false_refusal" for entry in judged),
    }


def _measured_peaks(compared: Sequence[Comparison]) -> dict[str, Any]:
    """The rows that do not measure a peak, with the reasons, and the statistics by implementation without them."""
    left_out = {entry.row.id: entry.row.not_a_peak for entry in compared if entry.row.not_a_peak}
    without = sorted({entry.row.implementation for entry in compared if entry.row.not_a_peak})
    kept = [entry for entry in compared if not entry.row.not_a_peak]
    spreads = {name: _by_counter([entry for entry in kept if entry.row.implementation == name]) for name in without}
    return {"left_out": left_out, "by_implementation": spreads}


def coverage(compared: Iterable[Comparison]) -> dict[str, Any]:
    """For measured peaks: their number, the percentage inside the estimate's range, and the range's median width in per
    cent of the prediction."""
    peaks = [entry for entry in compared if entry.counter != AFTER_STEP and entry.inside is not None]
    widths = [100 * (entry.allowed[1] - entry.allowed[0]) for entry in peaks]
    return {
        "n": len(peaks),
        "inside_pct": 100 * statistics.fmean(bool(entry.inside) for entry in peaks) if peaks else None,
        "median_width_pct": statistics.median(widths) if widths else None,
    }


def _by_counter(compared: Sequence[Comparison]) -> dict[str, Any]:
    """The error statistics over all peaks, and of each counter that occurs."""
    counters = [counter for counter in (*PEAKS, *APART) if any(entry.counter == counter for entry in compared)]
    return {
        **error_statistics(entry for entry in compared if entry.counter in PEAKS),
        **{counter: error_statistics(entry for entry in compared if entry.counter == counter) for counter in counters},
    }


def error_statistics(compared: Iterable[Comparison]) -> dict[str, Any]:
    """The number of errors (`n`), and their mean, median and maximum magnitude in per cent; None if there are none."""
    return distances([entry.error_pct for entry in compared if entry.error_pct is not None])


def distances(signed_pct: Sequence[float]) -> dict[str, Any]:
    """`error_statistics` of signed errors in per cent."""
    errors = list(map(abs, signed_pct))
    return {
        "n": len(errors),
        "mean_abs_pct": statistics.fmean(errors) if errors else None,
        "median_abs_pct": statistics.median(errors) if errors else None,
        "max_abs_pct": max(errors, default=None),
    }


def by_family(compared: Sequence[Comparison]) -> dict[str, dict[str, Any]]:
    """The error statistics over the peaks of each model family, by its name."""
    families = sorted({entry.family for entry in compared if entry.family})
    return {
        family: error_statistics(entry for entry in compared if entry.family == family and entry.counter in PEAKS)
        for family in families
    }


def by_grid(compared: Sequence[Comparison]) -> dict[str, dict[str, Any]]:
    """The error statistics, coverage and verdicts of each grid's rows, by the grid's name."""
    grids = sorted({entry.row.grid for entry in compared if entry.row.grid})
    found = {}
    for name in grids:
        rows = [entry for entry in compared if entry.row.grid == name]
        found[name] = {**_by_counter(rows), "coverage": coverage(rows), "verdict": _verdicts(rows)}
    return found


def worst_first(compared: Sequence[Comparison]) -> list[Comparison]:
    """Comparisons in this order: wrong verdicts, then numbers by the size of their error, then right verdicts."""

    def badness(entry: Comparison) -> tuple[bool, float]:
        return entry.missed is None, -abs(entry.error_pct) if entry.error_pct is not None else 1.0

    return sorted((entry for entry in compared if entry.unsupported is None), key=badness)
