"""How far this machine's measurements are from the estimates, and how certain that is, by the probes of one search.

Memory is modelled by one unknown ratio, measured over estimated bytes. Its prior is the margin of the estimate. A probe
that ran observes the ratio with noise RESIDUAL; one that ran out of memory gives a lower bound. The posterior is
computed on a grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.layout import margin
from planner.layout.correction import NORMAL_90
from planner.search.space import switched
from planner.spec.job import Strategy
from planner.spec.plan import Estimate, Measured

RESIDUAL = 0.015
"""Standard deviation of the ratio between strategies of one job. An assumption: they share CUDA context, kernels and
model, and differ only in what they keep. For comparison, the margin of a recording has one of about 2.4 %."""

HEADROOM = 0.01
"""Fraction by which a run may exceed its probe: a measured plan is called proved only with this much to spare."""

RATIOS = np.linspace(0.5, 3.0, 2501)

SURPRISE = 1e-6
"""Floor of the prior, so that measurements can move the posterior far outside the margin."""


@dataclass(frozen=True)
class FinishedProbe:
    """One finished probe, with the estimate that was made before it."""

    estimate: Estimate
    measured: Measured

    @property
    def strategy(self) -> Strategy:
        """The strategy that was probed."""
        return self.estimate.strategy

    @property
    def proved(self) -> bool:
        """Whether the probe ran to its end and stayed within the budget less the headroom."""
        return self.measured.outcome == "ok" and self.excess_bytes <= 0

    @property
    def excess_bytes(self) -> int:
        """Bytes of GPU memory the plan is short of, as far as is known; negative if it has some to spare."""
        budget, device = self.estimate.budget_bytes, self.measured.device_bytes
        if device is None:
            return budget if self.measured.outcome == "oom" else 0
        short = int(device * (1 + HEADROOM)) - budget
        return max(short, 1) if self.measured.outcome == "oom" else short


class ErrorModel:
    """The posterior of measured over estimated bytes for plans that were not measured, given the finished probes."""

    def __init__(self, probes: Sequence[FinishedProbe]) -> None:
        self.ran = [each for each in probes if each.measured.outcome == "ok" and each.measured.step_seconds]
        below, above = margin.RECORDED
        centre, width = 1 + (above - below) / 2, (above + below) / 2 / NORMAL_90
        logs = np.log(_normal((RATIOS - centre) / width) + SURPRISE)
        for each in probes:
            logs = logs + self._likelihood(each)
        weights = np.exp(logs - logs.max())
        self.weights: NDArray[np.float64] = weights / weights.sum()
        self.host_ratio = max((_host_ratio(each) for each in probes), default=1.0)
        ran_out = [each.estimate.peak.device_bytes for each in probes if each.measured.outcome == "oom"]
        self.too_much = min(ran_out, default=2**60)
        self._limits: dict[tuple[float, int], int] = {}

    def chance(self, device_bytes: int, budget_bytes: int) -> float:
        """The probability, from 0 to 1, that a plan with an estimate of `device_bytes` runs within the budget less the
        headroom."""
        room = budget_bytes / (1 + HEADROOM) / max(device_bytes, 1)
        return float((self.weights * _below((room - RATIOS) / RESIDUAL)).sum())

    def limit(self, chance: float, budget_bytes: int) -> int:
        """The largest estimate, in device bytes, with which a plan fits with at least this probability; always below
        the estimate of any plan that ran out of memory."""
        key = chance, budget_bytes
        if key not in self._limits:
            low, high = 0, 2 * budget_bytes
            while high - low > budget_bytes >> 14:
                middle = (low + high) // 2
                low, high = (middle, high) if self.chance(middle, budget_bytes) >= chance else (low, middle)
            self._limits[key] = min(low, int(self.too_much * 0.999))
        return self._limits[key]

    def seconds(self, strategy: Strategy, estimated: float) -> float:
        """Seconds per step, corrected by the error of the most similar plan that ran."""
        if not self.ran:
            return estimated
        nearest = min(self.ran, key=lambda each: len(switched(each.strategy, strategy)))
        return estimated * _speed(nearest)

    def soonest(self, estimated: float) -> float:
        """Seconds per step in the best case: with the largest speed-up over the estimate seen so far."""
        return estimated * min(map(_speed, self.ran), default=1.0)

    def _likelihood(self, each: FinishedProbe) -> NDArray[np.float64]:
        """The log-likelihood of one measurement at each of RATIOS."""
        estimated, device = each.estimate.peak.device_bytes, each.measured.device_bytes
        if each.measured.outcome == "oom":
            return np.log(1 - _below((each.estimate.budget_bytes / estimated - RATIOS) / RESIDUAL) + SURPRISE)
        if each.measured.outcome != "ok" or device is None:
            return np.zeros_like(RATIOS)
        ratio = min(max(device / estimated, float(RATIOS[0])), float(RATIOS[-1]))
        return -np.square((ratio - RATIOS) / RESIDUAL) / 2


def _speed(each: FinishedProbe) -> float:
    assert each.measured.step_seconds is not None
    return each.measured.step_seconds / each.estimate.step_seconds


def _host_ratio(each: FinishedProbe) -> float:
    """A lower bound on host RAM needed over estimated."""
    estimated, ram = each.estimate.host_ram_bytes, each.estimate.machine.host_ram
    if each.measured.outcome == "host-oom" and ram:
        return (1 + margin.RECORDED[1]) * ram / estimated
    return 1.0


def _normal(deviations: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.exp(-(deviations**2) / 2)


def _below(deviations: NDArray[np.float64]) -> NDArray[np.float64]:
    """The standard normal CDF to within 0.02 %: a logistic of a cubic (Page 1977, Applied Statistics 26)."""
    cubic = 0.7988 * deviations * (1 + 0.04417 * deviations**2)
    return 1 / (1 + np.exp(np.clip(-2 * cubic, -500, 500)))
