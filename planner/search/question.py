"""What is asked of a search, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

from planner.catalog.profiles import GpuProfile, ModelProfile
from planner.layout.correction import NO_MEASUREMENTS, ModelMeasurements
from planner.layout.margin import Sides
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Estimate, Plan


@dataclass(frozen=True)
class Question:
    """What is asked of a search: the records, and which of their fields were typed and so stay."""

    job: Job
    strategy: Strategy
    machine: Machine
    model: ModelProfile
    gpu: GpuProfile
    fixed: frozenset[str] = frozenset()
    allow_lossy: bool = False
    learned: ModelMeasurements = NO_MEASUREMENTS
    """what measurements of this model on this card say"""

    @property
    def budget_bytes(self) -> int:
        """What the plan may take of the card."""
        return self.gpu.allocatable_bytes - self.machine.reserve

    @property
    def sides(self) -> Sides:
        """How far below and above an estimate the truth may lie, as shares."""
        return self.learned.correction.sides


@dataclass(frozen=True)
class Switch:
    """One step from the naive setting towards the plan, and what it changed: negative is saved."""

    field: str
    before: str | int
    after: str | int
    device_bytes: int
    step_seconds: float

    def to_json(self) -> dict[str, object]:
        """The object of DESIGN section 9."""
        return {
            "field": self.field,
            "from": self.before,
            "to": self.after,
            "device_bytes": self.device_bytes,
            "step_seconds": self.step_seconds,
        }


@dataclass(frozen=True)
class Suggestion:
    """The answer of a search. `plan` fits, or is tight, or is the tightest there is."""

    plan: Estimate
    alternatives: tuple[Estimate, ...]
    switches: tuple[Switch, ...]
    considered: int

    def to_plan(self, trainer: str = "vplan") -> Plan:
        """The plan's file: below it the ones to step down to when it runs out of memory after all."""
        lower = [found for found in self.alternatives if found.peak.device_bytes < self.plan.peak.device_bytes]
        return Plan.of(self.plan, tuple(sorted(lower, key=lambda found: found.step_seconds)), trainer)
