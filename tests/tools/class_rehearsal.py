"""A training step of a model that was recorded from its class, beside the same step on a virtual GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from planner.catalog import card_lookup, user_data
from planner.catalog.profiles import ModelProfile
from planner.estimate.estimate import estimate
from planner.evidence.measurement import peaks_of, phases_of
from planner.layout import attention_kernel
from planner.layout.recordings import load_facts
from planner.rehearsal.probe_runner import RehearsalRunner, torch_release
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine
from planner.spec.plan import Plan
from planner.tape.codec import tape_json
from planner.tape.packed_json import write_packed
from planner.tape.variants.choice import optimizer_variant
from planner.tape.variants.precision import Precision
from planner.tape.variants.torch_and_card import attention_paths
from planner.tape.variants.variant import StepVariant
from tests.benchmarks.held_out import Case
from trainers.recording import tapes

CARD = "h200-141gb"
"""Has room for a step of almost every class with a few blocks that is not checkpointed."""
TIME_LIMIT = 600.0
PHASES = frozenset({"train", "optimizer"})


HALVINGS = 5
"""How often frames and sides of the first shape are halved at the most, where steps have no room."""


class DtypesDiffer(RuntimeError):
    """A model multiplies numbers of two dtypes, which only autocast makes alike."""


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
    """A step of LoRA and one of full training of a profile that is kept, neither checkpointed where the card has room,
    and of smaller clips where it has none at all; under autocast where the model's dtypes do not fit together else.
    Raises a VplanError where a plan cannot be estimated or run, a RuntimeError where its run fails."""
    autocast = False
    for method in ("lora", "full"):
        try:
            yield _with_room(profile, method, autocast, runner)
        except DtypesDiffer:
            autocast = True
            yield _with_room(profile, method, autocast, runner)


def _with_room(profile: ModelProfile, method: str, autocast: bool, runner: RehearsalRunner) -> StepOnVirtualGpu:
    """The first step of a method that the card has room for. Raises as `rehearsed_steps`."""
    precision = Precision("half", "half" if method == "lora" else "", autocast)
    for halvings in range(HALVINGS):
        for mode in ("none", "full") if profile.traits.checkpoints else ("none",):
            step = _rehearsed(profile, StepVariant(method, precision, mode, True), runner, halvings)
            if step is not None:
                return step
    raise RuntimeError(f"{method} has no room on {CARD}")


def _smaller(job: Job, profile: ModelProfile, halvings: int) -> Job:
    """A job whose frames and sides are halved so many times, as far as the model takes it."""
    shape, share = profile.shape, 2**halvings
    sides = {
        name: max(1, side // share // shape.size_multiple) * shape.size_multiple
        for name, side in (("height", job.height), ("width", job.width))
    }
    return job.replace(frames=1 + (job.frames - 1) // share // shape.frame_step * shape.frame_step, **sides)


def _rehearsed(
    profile: ModelProfile, variant: StepVariant, runner: RehearsalRunner, halvings: int
) -> StepOnVirtualGpu | None:
    """A variant's step; None where it is estimated to have no room."""
    case = Case.of(profile, variant)
    job, strategy = _smaller(case.job, profile, halvings), case.strategy.replace(validation_mode="off")
    card = card_lookup.parse_gpus(CARD)[1]
    machine = Machine(gpu=card.name, torch=torch_release(runner.interpreter))
    cudnn = attention_kernel.takes_grouped_masks(strategy, machine, card)
    ours = variant._replace(cudnn=cudnn and cudnn in attention_paths(profile, variant.precision))
    for needed in (ours, optimizer_variant(profile, job, strategy)):
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
        if "must have the same dtype" in words and not variant.precision.autocast:
            raise DtypesDiffer(words[:200])
        raise RuntimeError(f"{variant.name} on the virtual GPU: {row.measured.outcome} {words[:200]}")
    phases = phases_of(row.details) & PHASES
    taken = peaks_of(row.details, ("step", *phases))["allocated_bytes"]
    expected = max(peak.allocated_bytes for name, peak in predicted.phases.items() if name in phases)
    return StepOnVirtualGpu(variant.name, expected, taken)
