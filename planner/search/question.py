"""What is asked about one model on one card, and what a search answers."""

from __future__ import annotations

from typing import Any, NamedTuple

from planner.catalog.card_profiles import GpuProfile
from planner.catalog.profiles import ModelProfile
from planner.layout import margin
from planner.layout.correction import NO_MEASUREMENTS, ModelMeasurements
from planner.layout.margin import Sides
from planner.spec.combinations.contradictions import refuse_contradictions
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Estimate, Plan
from planner.spec.rules import ResolvedStrategy


class Question(NamedTuple):
    """One question, complete: the records, what was looked up for them, and which of their fields were typed."""

    job: Job
    strategy: Strategy
    """as typed: a search, or `configuration`, fills in what was left open"""
    machine: Machine
    model: ModelProfile
    gpu: GpuProfile
    fixed: frozenset[str] = frozenset()
    """fields of any record that were typed: a search never trades them"""
    allow_lossy: bool = False
    learned: ModelMeasurements = NO_MEASUREMENTS
    """what measurements of this model on this card say"""
    assumptions: tuple[str, ...] = ()
    """the defaults taken, in words, for the first line of the answer"""
    frames_max: bool = False
    """`--frames max`: the job's frames are only where to start"""
    last_resort: bool = False
    """whether values are searched too that are for where nothing else fits (`planner.spec.field_notes.Searched`)"""

    @property
    def budget_bytes(self) -> int:
        """The device bytes that a plan may take: what the card can allocate, less the reserve."""
        return self.gpu.allocatable_bytes - self.machine.reserve

    @property
    def sides(self) -> Sides:
        """(low, high): by what shares the truth may lie below and above an estimate."""
        return margin.on_card(self.learned.correction.sides, self.gpu)

    def configuration(self) -> Configuration:
        """The question with its strategy resolved, where nothing is searched. Raises a ContradictionError."""
        configuration = Configuration.of(self.job, self.strategy, self.machine)
        refuse_contradictions(configuration)
        return configuration

    def candidate(self, job: Job, strategy: ResolvedStrategy) -> Configuration:
        """A strategy that a search considers for a job, on the question's machine."""
        return Configuration(job, strategy, self.machine)


class Switch(NamedTuple):
    """One changed option on the way from the baseline to the plan, with the change in bytes and seconds; negative is
    saved."""

    field: str
    before: str | int
    after: str | int
    device_bytes: int
    step_seconds: float

    def to_json(self, timed: bool = True) -> dict[str, object]:
        """The switch as in `vplan suggest --json`. ``timed``: whether anything is known of the card's speed."""
        return {
            "field": self.field,
            "from": self.before,
            "to": self.after,
            "device_bytes": self.device_bytes,
            "step_seconds": self.step_seconds if timed else None,
        }


class Relaxed(NamedTuple):
    """A plan for the same job with one of the user's options relaxed, and which one."""

    field: str
    before: str | int
    after: str | int
    plan: Estimate

    def to_json(self) -> dict[str, object]:
        """The wish that changes, from what, to what, and whether the plan is lossy."""
        return {"field": self.field, "from": self.before, "to": self.after, "lossy": list(self.plan.lossy)}


class Unrecorded(NamedTuple):
    """One option beside a plan's own that was not searched."""

    field: str
    value: object
    record: str
    """how to record it"""


class Suggestion(NamedTuple):
    """The answer of a search. `plan` fits or is tight, or else is the plan that needs least memory."""

    plan: Estimate
    alternatives: tuple[Estimate, ...]
    switches: tuple[Switch, ...]
    considered: int
    """strategies at the shapes at which they were ranked or estimated"""
    relaxed: tuple[Relaxed, ...] = ()
    """where nothing fits: what would, with one wish less; where a lossy plan does: one GPU, if that does without"""
    least: Estimate | None = None
    """where no single wish is enough: of the smallest size and batch the longest clip that fits, or what needs least"""
    larger_card: Estimate | None = None
    """where no single wish is enough: the plan on the smallest class of card that it fits"""
    smaller_cards: tuple[Estimate, ...] = ()
    """the plan on the smaller cards of its class, where the verdict is another"""
    unrecorded: Unrecorded | None = None
    """where nothing fits: an option that may need less, and was not searched as nothing is recorded of it"""

    def to_plan(self, trainer: str = "vplan") -> Plan:
        """The plan's file: below it the ones to step down to when it runs out of memory after all."""
        lower = [other for other in self.alternatives if other.peak.device_bytes < self.plan.peak.device_bytes]
        return Plan.of(self.plan, tuple(sorted(lower, key=lambda other: other.step_seconds)), trainer)

    def _beyond(self) -> dict[str, Any]:
        """What is left where nothing fits: only there has the answer these keys."""
        found: dict[str, Any] = {}
        if self.least is not None:
            found["least"] = self.least.to_json()
        if self.unrecorded is not None:
            found["unrecorded"] = self.unrecorded._asdict()
        if self.larger_card is not None:
            found["larger_card"] = {"gpu": self.larger_card.machine.gpu, "verdict": self.larger_card.verdict}
        return found

    def to_json(self, seconds: float) -> dict[str, Any]:
        """The suggestion as `vplan suggest --json` prints it, with what to relax and the smaller cards. ``seconds``:
        how long the answer took."""
        return {
            "plan": self.plan.to_json(),
            "alternatives": [other.to_json() for other in self.alternatives],
            "switches": [switch.to_json(self.plan.timed) for switch in self.switches],
            "relax": [wish.to_json() for wish in self.relaxed],
            **self._beyond(),
            "smaller_cards": [{"gpu": other.machine.gpu, "verdict": other.verdict} for other in self.smaller_cards],
            "considered": self.considered,
            "seconds": round(seconds, 3),
        }
