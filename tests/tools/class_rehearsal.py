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
from planner.spec.job import Machine
from planner.spec.plan import Plan
from planner.tape.codec import tape_json
from planner.tape.packed_json import write_packed
from planner.tape.variants import OptimizerVariant, Precision, StepVariant
from tests.benchmarks.held_out import Case
from trainers.recording import tapes

CARD = "h200-141gb"
"""Has room for a step of almost every class with a few blocks that is not checkpointed."""
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
    """A step of LoRA and one of full training of a profile that is kept, neither checkpointed where the card has room.
    Raises a VplanError where a plan cannot be estimated or run, a RuntimeError where its run fails."""
    for method in ("lora", "full"):
        precision = Precision("half", "half" if method == "lora" else "", False)
        plain, checkpointed = (StepVariant(method, precision, mode, True) for mode in ("none", "full"))
        step = _rehearsed(profile, plain, runner)
        if step is None and profile.traits.checkpoints:
            step = _rehearsed(profile, checkpointed, runner)
        if step is None:
            raise RuntimeError(f"{plain.name} has no room on {CARD}")
        yield step


def _rehearsed(profile: ModelProfile, variant: StepVariant, runner: RehearsalRunner) -> StepOnVirtualGpu | None:
    """A variant's step; None where it is estimated to have no room."""
    case = Case.of(profile, variant)
    job, strategy = case.job, case.strategy.replace(validation_mode="off")
    card = card_lookup.parse_gpus(CARD)[1]
    machine = Machine(gpu=card.name, torch=torch_release(runner.interpreter))
    for needed in (variant, OptimizerVariant.of(profile, job, strategy)):
        path = user_data.tapes() / profile.name / f"{needed.name}.json.gz"
        if not path.exists():
            write_packed(tape_json(tapes.record(profile, needed)), path)
    configuration = Configuration.of(job, strategy, machine)
    predicted = estimate(configuration, load_facts(configuration, profile, card))
    if predicted.verdict == "no":
        return None
    row = runner.run(Plan.under(configuration), steps=1, time_limit=TIME_LIMIT)
    if row.measured.outcome != "ok":
        words = " ".join(str(row.details.get("message", "")).split())
        raise RuntimeError(f"{variant.name} on the virtual GPU: {row.measured.outcome} {words[:200]}")
    phases = phases_of(row.details) & PHASES
    taken = peaks_of(row.details, ("step", *phases))["allocated_bytes"]
    expected = max(peak.allocated_bytes for name, peak in predicted.phases.items() if name in phases)
    return StepOnVirtualGpu(variant.name, expected, taken)
