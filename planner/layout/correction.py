"""How measurements change an estimate. Rows of the same model on the same class of card correct it (`nearby`); a row of
this very plan replaces it (`measured`). Pure: records in, records out.

The module is part of layout because `planner.layout.run.Facts` carries a correction. `planner.evidence`, above this
package, reads the ledger and fits corrections (`fit`); `planner.estimate`, also above, applies them.

A correction has two causes, which are separated because they carry over to other plans in different ways: what torch's
allocator reserves is off by a share, and what lies on the device beside it (CUDA context, kernels) is off by a number
of bytes. Each is the median of what was seen. For the share, the expectation from recordings alone (the middle of their
margin) counts as one more run. The range around a corrected estimate comes from the errors that remain (`error_bound`),
with the recordings' own margin as the prior belief; it always contains everything that was seen.

Encoding has a correction of its own, because it runs other models on an allocator of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from planner.catalog.plan_id import row_id
from planner.layout import margin
from planner.spec.configuration import Configuration
from planner.spec.plan import RAN, RAN_OUT, Breakdown, Estimate, Measured, Peak, PhasePeak, Plan
from planner.units import MIB, gib

PRIOR_RATIO = 1 + (margin.RECORDED[1] - margin.RECORDED[0]) / 2
"""Measured over predicted, where nothing was measured: what recordings do not know of only adds."""

HALF_WIDTH = sum(margin.RECORDED) / 2

NORMAL_90 = 1.6448536
"""Standard deviations to each side that hold 90 % of a normal distribution."""

SEGMENT_BYTES = 2 * MIB
"""The least that the allocator asks the driver for: what ran out needed so much more than it could have."""

SEPARATE_PHASES = frozenset({"encode"})
"""Phases with other models, in an allocator of their own where they are cached: training says nothing of them."""


class MeasuredRun(NamedTuple):
    """One measured run with the estimate from recordings alone, both over the phases that were measured."""

    measured: Measured
    predicted: PhasePeak
    predicted_seconds: float
    budget_bytes: int
    """what the run could have of the device"""
    own_card: bool = True
    """whether it ran on such a card: else, capped, it stands in for one, and only its allocator's bytes carry over"""

    @property
    def ran(self) -> bool:
        """Whether the run had enough memory and both reserved and device bytes were measured."""
        seen = self.measured
        return seen.outcome in RAN and bool(seen.reserved_bytes) and bool(seen.device_bytes)

    @property
    def share(self) -> float:
        """Measured reserved bytes over predicted reserved bytes."""
        return (self.measured.reserved_bytes or 0) / self.predicted.reserved_bytes

    @property
    def beside_bytes(self) -> int:
        """Measured minus predicted bytes of what is on the device outside torch's allocator (context, libraries)."""
        measured = (self.measured.device_bytes or 0) - (self.measured.reserved_bytes or 0)
        return measured - (self.predicted.device_bytes - self.predicted.reserved_bytes)


class Correction(NamedTuple):
    """How measurements change an estimate: factors, added bytes and error sides. The default changes nothing."""

    reserved: float = 1.0
    """measured over predicted, of what the allocator reserves"""
    outside_bytes: int = 0
    """to add to what is beside it"""
    sides: tuple[float, float] = margin.RECORDED
    """(below, above) as shares of the corrected device peak"""
    seconds: tuple[float, float] | None = None
    """(usual, longest) of a step, as shares of the predicted low end"""
    share_kept: float = 1.0
    """of what only recordings know, see the top of this file"""
    runs: int = 0
    """that finished"""
    notes: tuple[str, ...] = ()
    """the correction in words"""
    encoding: Correction | None = None
    """of the phases in `SEPARATE_PHASES`; None where nobody measured them: only what is beside torch's is corrected"""

    @property
    def words(self) -> tuple[str, ...]:
        """Every correction that was applied, in words."""
        return (*self.notes, *(self.encoding.notes if self.encoding else ()))

    def basis(self, phase: str = "train") -> Literal["recorded", "nearby"]:
        """The basis of an estimate whose peak is in this phase: "nearby" when measurements corrected that phase, else
        "recorded"."""
        of = self.encoding if phase in SEPARATE_PHASES else self
        return "nearby" if of and of.notes else "recorded"

    def sides_of(self, phase: str) -> tuple[float, float]:
        """(low, high): by what shares the truth may lie below and above a peak in this phase."""
        of = self.encoding if phase in SEPARATE_PHASES else self
        return of.sides if of else margin.RECORDED

    def share(self, phase: str) -> float:
        """Measured over predicted, of what the allocator reserves in this phase."""
        of = self.encoding if phase in SEPARATE_PHASES else self
        return of.reserved if of else 1.0

    def peak(self, allocated_bytes: int, reserved_bytes: int, outside_bytes: int, phase: str = "train") -> PhasePeak:
        """The corrected counters of a phase, bytes. Given are those of the recordings, and the bytes on the device
        outside torch's allocator."""
        share = self.share(phase)
        beside = self.encoding.outside if phase in SEPARATE_PHASES and self.encoding else self.outside
        reserved = round(reserved_bytes * share)
        return PhasePeak(
            allocated_bytes=min(reserved, round(allocated_bytes * share)),
            reserved_bytes=reserved,
            device_bytes=reserved + beside(outside_bytes),
        )

    def outside(self, outside_bytes: int) -> int:
        """The corrected bytes on the device outside torch's allocator, at least 0."""
        return max(0, outside_bytes + self.outside_bytes)

    def step_seconds(self, low: float, high: float) -> tuple[float, float]:
        """(usual, longest) seconds of a step, corrected; given are both ends as predicted."""
        if self.seconds is None:
            return low, high
        usual, longest = self.seconds
        return low * usual, low * longest + self.share_kept * (high - low) * usual


def error_bound(errors: Sequence[float]) -> float:
    """The share of the prediction within which a further run's error lies nine times out of ten, after runs with these
    errors.

    Assuming normal errors of unknown spread, with the recordings' margin counted as one run, this is Student's t with
    as many degrees of freedom as there are runs, including that one (Gelman et al. 2013, Bayesian Data Analysis,
    sections 2.6 and 3.2).
    """
    values = len(errors) + 1
    variance = ((HALF_WIDTH / NORMAL_90) ** 2 + math.fsum(error**2 for error in errors)) / values
    return _student(values) * math.sqrt(variance * (1 + 1 / values))


def _student(freedom: int) -> float:
    """The bound that contains 90 % of Student's t symmetrically, within 0.3 % from 3 degrees of freedom on (Abramowitz
    and Stegun 1964, 26.7.5)."""
    z = NORMAL_90
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def fit(runs: Sequence[MeasuredRun], where: str, what: str = "the model") -> Correction:
    """The correction that fits some runs of one model on one class of card, named ``where``; ``what`` was run."""
    import statistics  # slow to import, and without measurements nobody asks

    finished = [run for run in runs if run.ran]
    ran_out = [run for run in runs if run.measured.outcome == "oom"]
    kept = len(finished) ** -0.5 if finished else 1.0
    reserved = statistics.median([PRIOR_RATIO, *(run.share for run in finished)]) if finished else 1.0
    own = [run.beside_bytes for run in finished if run.own_card]
    outside = round(statistics.median(own)) if own else 0
    correction = Correction(reserved=reserved, outside_bytes=outside)
    errors = [_residual(run, correction) for run in finished]
    lowest, highest = min([0.0, *errors]), max([0.0, *errors])
    below, above = margin.RECORDED
    if finished:  # what was seen is within, and no more than the recordings' own margin is added to it
        below, above = (max(off, min(error_bound(errors), off + HALF_WIDTH)) for off in (-lowest, highest))
    # One that ran out needed more than it could have: that is all it says.
    needed = ((run.budget_bytes + SEGMENT_BYTES) / _expected(run, correction).device_bytes for run in ran_out)
    short = max(needed, default=0.0) - 1
    if not finished and short <= above:
        return Correction()
    timed = ((run.measured.step_seconds or 0, run.predicted_seconds) for run in finished if _is_timed(run))
    paces = [seconds / predicted for seconds, predicted in timed]
    spread = f"they spread from {100 * lowest:+.1f} to {100 * highest:+.1f} %"
    words = f"{NOTE_PREFIXES[0]}{len(finished)} measurements of {what} on {where}: "
    words += f"allocator {100 * (reserved - 1):+.1f} %, beside it {gib(outside):+.2f} GiB; {spread}"
    ooms = f"{len(ran_out)} of {what} that ran out of memory on {where} widened the upper end" if short > above else ""
    return Correction(
        reserved=reserved,
        outside_bytes=outside,
        sides=(min(below, 1.0), max(above, short)),
        seconds=(statistics.median(paces), max(paces)) if paces else None,
        share_kept=kept,
        runs=len(finished),
        notes=tuple(filter(None, (words if finished else "", ooms))),
    )


def _is_timed(run: MeasuredRun) -> bool:
    return run.own_card and bool(run.measured.step_seconds) and run.predicted_seconds > 0


def _expected(run: MeasuredRun, correction: Correction) -> PhasePeak:
    """What the corrected estimate predicts for a run that was measured."""
    predicted = run.predicted
    outside = predicted.device_bytes - predicted.reserved_bytes
    return correction.peak(predicted.allocated_bytes, predicted.reserved_bytes, outside)


def _residual(run: MeasuredRun, correction: Correction) -> float:
    """The share by which a run is still off after the correction."""
    if not run.own_card:
        return run.share / correction.reserved - 1
    return (run.measured.device_bytes or 0) / _expected(run, correction).device_bytes - 1


class Proof(NamedTuple):
    """A run of one particular plan, in the environment in question."""

    measured: Measured
    phases: frozenset[str]
    """that it went through"""
    own_card: bool = True
    """else it ran, capped, on a card of another architecture"""


class ModelMeasurements(NamedTuple):
    """What measurements say about one model on one card: the correction of estimates, and which plans were proved by
    runs."""

    correction: Correction = Correction()
    proofs: Mapping[str, tuple[Proof, ...]] = MappingProxyType({})
    """by `row_id`"""

    def with_proofs(self, estimate: Estimate, trainer: str = "vplan") -> Estimate:
        """The estimate as changed by measured runs of exactly this plan; the same estimate when there are none."""
        if not self.proofs:
            return estimate
        finished, ran_out = self._split(estimate.configuration, trainer)
        if finished:
            estimate = _as_measured(estimate, finished)
            if ran_out and estimate.basis == "measured":
                words = "it ran, and it ran out of memory: both are told of this very plan"
                estimate = estimate.replace(verdict="tight", limit=None, assumptions=(*estimate.assumptions, words))
        elif ran_out:
            estimate = _ran_out(estimate, ran_out)
        return estimate

    def past_outcome(self, configuration: Configuration, trainer: str = "vplan") -> Literal["ran", "ran out"] | None:
        """Whether runs of exactly this plan finished ("ran") or ran out of memory ("ran out"); None when there are
        none, or some of each."""
        finished, ran_out = self._split(configuration, trainer)
        if bool(finished) == bool(ran_out):
            return None
        return "ran" if finished else "ran out"

    def _split(self, configuration: Configuration, trainer: str) -> tuple[list[Proof], list[Proof]]:
        """The runs that had memory enough, on such a card, and those that ran out."""
        if not self.proofs or trainer != "vplan":
            return [], []
        proofs = self.proofs.get(row_id(Plan.under(configuration)), ())
        ran = [
            proof
            for proof in proofs
            if proof.own_card and proof.measured.outcome in RAN and proof.measured.device_bytes
        ]
        return ran, [proof for proof in proofs if proof.measured.outcome in RAN_OUT]


NO_MEASUREMENTS = ModelMeasurements()

NOTE_PREFIXES = ("corrected by ", "measured: ")
"""How the assumptions begin that say what measurements did to an estimate."""


def _as_measured(estimate: Estimate, ran: Sequence[Proof]) -> Estimate:
    """The estimate with the numbers of measured runs. If a phase that none of them reached needs more, the peak is that
    phase's, which nobody measured."""
    import statistics

    through = ran[0].phases.intersection(*(each.phases for each in ran)) & estimate.phases.keys()
    if not through:
        return estimate
    seen = [each.measured for each in ran]
    device = [each.device_bytes or 0 for each in seen]
    expected = max(peak.device_bytes for phase, peak in estimate.phases.items() if phase in through)
    unmeasured = max((peak.device_bytes for phase, peak in estimate.phases.items() if phase not in through), default=0)
    if unmeasured > max(expected, *device):
        return estimate
    top = PhasePeak(
        allocated_bytes=max(each.allocated_bytes or 0 for each in seen),
        reserved_bytes=max(each.reserved_bytes or 0 for each in seen),
        device_bytes=max(device),
    )
    seconds = [each.step_seconds for each in seen if each.step_seconds]
    ram = [each.host_bytes for each in seen if each.host_bytes]
    short = estimate.limit == "host" and not (ram and max(ram) <= (estimate.machine.host_ram or max(ram)))
    words = f"{NOTE_PREFIXES[1]}{len(ran)} probe{'s' * (len(ran) > 1)} of this exact plan in this environment"
    changes = {"step_seconds": statistics.median(seconds), "step_seconds_high": max(seconds)} if seconds else {}
    return with_peak(estimate, top).replace(
        low_bytes=min(device),
        high_bytes=max(device),
        basis="measured",
        verdict="no" if short else "fits",
        limit="host" if short else None,
        assumptions=(words, *(each for each in estimate.assumptions if not each.startswith(NOTE_PREFIXES))),
        **changes,
    )


def _ran_out(estimate: Estimate, out: Sequence[Proof]) -> Estimate:
    """The estimate with verdict no, because the plan ran out of memory when it was tried."""
    basis = "measured" if any(proof.own_card for proof in out) else "nearby"
    notes = (f"{NOTE_PREFIXES[1]}this exact plan ran out of memory", *estimate.assumptions)
    if all(proof.measured.outcome == "host-oom" for proof in out):
        return estimate.replace(basis=basis, verdict="no", limit="host", assumptions=notes)
    needed = estimate.budget_bytes + 1
    if estimate.peak.device_bytes < needed:
        more = needed - estimate.peak.device_bytes
        peak = estimate.peak
        top = PhasePeak(
            allocated_bytes=peak.allocated_bytes, reserved_bytes=peak.reserved_bytes + more, device_bytes=needed
        )
        estimate = with_peak(estimate, top)
    low = max(estimate.low_bytes, needed)
    high = max(estimate.high_bytes, low)
    return estimate.replace(basis=basis, verdict="no", limit="gpu", low_bytes=low, high_bytes=high, assumptions=notes)


def with_peak(estimate: Estimate, top: PhasePeak) -> Estimate:
    """The estimate with another peak; its phases and its breakdown are scaled in proportion."""
    outside = ("fragmentation", "context")
    parts = {name: value for name, value in estimate.breakdown.__dict__.items() if name not in outside}
    share = min(1.0, top.reserved_bytes / max(1, sum(parts.values())))
    parts = {name: int(value * share) for name, value in parts.items()}
    rest = {"fragmentation": top.reserved_bytes - sum(parts.values()), "context": top.device_bytes - top.reserved_bytes}
    factors = {name: getattr(top, name) / max(1, getattr(estimate.peak, name)) for name in PhasePeak.model_fields}
    phases = {phase: _scaled(peak, factors, top) for phase, peak in estimate.phases.items()}
    phases[estimate.peak.phase] = top
    peak = Peak(**top.__dict__, phase=estimate.peak.phase, moment=estimate.peak.moment)
    # Together, because each alone would contradict the other.
    return Estimate.read({**estimate.__dict__, "peak": peak, "phases": phases, "breakdown": Breakdown(**parts, **rest)})


def _scaled(peak: PhasePeak, factors: Mapping[str, float], top: PhasePeak) -> PhasePeak:
    """Another phase's counters scaled by the same factor, still in order and below the peak."""
    allocated, reserved, device = (
        min(round(getattr(peak, name) * factor), getattr(top, name)) for name, factor in factors.items()
    )
    reserved = min(max(reserved, allocated), top.reserved_bytes)
    return PhasePeak(allocated_bytes=allocated, reserved_bytes=reserved, device_bytes=max(device, reserved))
