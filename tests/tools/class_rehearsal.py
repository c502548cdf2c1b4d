"""A training step of a model that was recorded from its class, beside the same step on a virtual GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from planner.catalog import card_lookup, user_data
from planner.catalog.profiles import ModelProfile
from planner.estimate.estimate import estimate
from planner.evidence.measurement import peaks_of, phases_of
from planner.layout.inputs import load_facts
from planner.rehearsal.probe_runner import RehearsalRunner, torch_release
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Plan
from planner.tape.codec import tape_json
from planner.tape.packed_json import write_packed
from planner.tape.variants import OptimizerVariant, Precision, StepVariant
from tests.benchmarks.held_out import Case
from trainers.recording import tapes

CARD = "h200-141gb"
"""Has room for a step of every class with a few blocks that is not checkpointed."""
TIME_LIMIT = 600.0
PHASES = frozenset({"train", "optimizer"})


class StepOnVirtualGpu(NamedTuple):
    """Allocated peaks of a step in bytes, by the tapes and on the virtual GPU."""

    variant: str
    predicted: int
    taken: int

    @property
    def error_pct(self) -> float:
        """By how much the tapes are over, in percent."""
        return 100 * (self.predicted - self.taken) / self.taken


def rehearsed_steps(profile: ModelProfile, runner: RehearsalRunner) -> Iterator[StepOnVirtualGpu]:
    """A step of LoRA and one of full training, neither checkpointed, of a profile that is kept. Raises a VplanError
    where a plan cannot be estimated or run, a RuntimeError where its run fails."""
    for method in ("lora", "full"):
        variant = StepVariant(method, Precision("half", "half" if method == "lora" else "", False), "none", True)
        case = Case.of(profile, variant)
        yield _rehearsed(profile, case.job, case.strategy.replace(validation_mode="off"), variant, runner)


def _rehearsed(
    profile: ModelProfile, job: Job, strategy: Strategy, variant: StepVariant, runner: RehearsalRunner
) -> StepOnVirtualGpu:
    card = card_lookup.parse_gpus(CARD)[1]
    machine = Machine(gpu=card.name, torch=torch_release(runner.interpreter))
    for needed in (variant, OptimizerVariant.of(profile, job, strategy)):
        path = user_data.tapes() / profile.name / f"{needed.name}.json.gz"
        if not path.exists():
            write_packed(tape_json(tapes.record(profile, needed)), path)
    configuration = Configuration.of(job, strategy, machine)
    predicted = estimate(configuration, load_facts(configuration, profile, card))
    row = runner.run(Plan.under(configuration), steps=1, time_limit=TIME_LIMIT)
    if row.measured.outcome != "ok":
        words = " ".join(str(row.details.get("message", "")).split())
        raise RuntimeError(f"{variant.name} on the virtual GPU: {row.measured.outcome} {words[:200]}")
    phases = phases_of(row.details) & PHASES
    taken = peaks_of(row.details, ("step", *phases))["allocated_bytes"]
    expected = max(peak.allocated_bytes for name, peak in predicted.phases.items() if name in phases)
    return StepOnVirtualGpu(variant.name, expected, taken)
