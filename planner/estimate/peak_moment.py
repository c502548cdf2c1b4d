"""The moment of a run's memory peak in words, and what is in GPU memory then."""

from __future__ import annotations

from collections import Counter

from planner.allocator.implementation import alive, held
from planner.estimate.stages import ReplayedStage
from planner.layout.correction import Correction
from planner.spec.job import Strategy
from planner.spec.plan import Breakdown, PhasePeak
from planner.tape.program import Moment

BREAKDOWN = {
    "weight": "weights",
    "gradient": "gradients",
    "optimizer": "optimizer",
    "batch": "activations",
    "activation": "activations",
    "temporary": "temporary",
    "workspace": "workspace",
    "residents": "residents",
    "buckets": "buckets",
    "ema": "ema",
}
"""A buffer's category -> its part of the breakdown."""


PHASE_MOMENTS = {
    "load": "loading the weights",
    "encode": "encoding prompts and clips",
    "denoise": "denoising a validation sample",
    "decode": "decoding a validation sample",
    "save": "saving a checkpoint",
}
"""Phases with one name for any moment in them."""


OPTIMIZER_MOMENT = "optimizer step"
"""The moment of the optimizer phase, and of an optimizer step within the first step."""


SAMPLING_MOMENTS = {"denoise": "denoising", "decode": "decoding the samples"}
"""The same for a job that only samples."""


def peak_stage(played: list[ReplayedStage]) -> ReplayedStage:
    """The stage with the highest allocated peak, the later of equals.

    Reserved bytes do not tell, because they stay reserved in later stages.
    """
    return max(reversed(played), key=lambda entry: entry.replayed.allocated_peak_bytes)


def describe_moment(played: ReplayedStage, strategy: Strategy) -> str:
    """The moment of a stage's allocated peak in words, such as "recompute and backward of block 17"."""
    index = played.replayed.allocated_peak_at
    moment: Moment = played.stage.moment(max(index, 0))
    what = moment.passes
    every = moment.block >= 0 and strategy.gradient_checkpointing in ("full", "offload", "fp8")
    if what == "backward" and (every or (moment.module_list, moment.block) in played.run.checkpointed):
        what = "recompute and backward"
    if played.phase == "optimizer" or played.stage.name.startswith("optimizer"):
        return OPTIMIZER_MOMENT
    if played.stage is played.run.phases.unload:  # its peak is at its start, with everything still loaded
        return PHASE_MOMENTS["load"]
    if played.run.samples_only and played.phase in SAMPLING_MOMENTS:
        return SAMPLING_MOMENTS[played.phase]
    if played.phase in PHASE_MOMENTS:
        return PHASE_MOMENTS[played.phase]
    return f"{what} of {moment.module_list}.{moment.block}" if moment.block >= 0 else f"{what} outside the blocks"


def breakdown_at(top: ReplayedStage, peak: PhasePeak, correction: Correction) -> Breakdown:
    """Device bytes by category at the allocated peak; reserved bytes beyond them count as fragmentation."""
    category = list(top.run.program.category)
    there: dict[str, list[int]] = {}
    for buffer in alive(top.ops[: top.replayed.allocated_peak_at + 1], top.before):
        there.setdefault(category[buffer], []).append(buffer)
    parts: Counter[str] = Counter()
    for kind, buffers in there.items():
        parts[BREAKDOWN[kind]] += held(buffers, top.run.sizes)[0]
    share = correction.share(top.phase)
    counted = {name: int(nbytes * share) for name, nbytes in parts.items()}
    lost = peak.reserved_bytes - sum(counted.values())
    return Breakdown(**counted, fragmentation=lost, context=peak.device_bytes - peak.reserved_bytes)
