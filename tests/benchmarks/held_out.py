"""How far tapes are from direct recordings: every model at full depth, at a shape no tape was made from.

    python -m tests.benchmarks.held_out [MODEL ...] [--checkpointing none|full] [--sample N | --variant TEXT]

Prints one line per tape: the allocated peak from the shipped tape and recorded directly, and the error. Without options
these are the tapes of the usual LoRA and full fine-tune: passes, and optimizer's step. ``--sample`` takes N tapes of
each model by lot instead, of all that are shipped; ``--variant`` those with a text in their name. Ends with exit code 1
when an error is over 0.1 %. It shows that tapes are true to the recorder, nothing about the recorder: that is what
`vplan accuracy` compares with measurements. Needs vplan[train]; a tape takes ten seconds to two minutes.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import profiles
from planner.allocator.caching import CachingAllocator
from planner.catalog import lookup
from planner.catalog.profiles import ModelProfile
from planner.catalog.shapes import grid, job_for
from planner.layout.recordings import tape
from planner.spec.job import Job, Strategy
from planner.tape.packs import is_stored
from planner.tape.program import Program
from planner.tape.variants.choice import optimizer_variant, step_variant
from planner.tape.variants.inventory import (
    optimizer_variants,
    sample_variants,
    sample_variants_on_request,
    step_variants,
    step_variants_on_request,
)
from planner.tape.variants.variant import OptimizerVariant, SampleVariant, StepVariant
from trainers.families import family
from trainers.recording.recorder import RawRecording
from trainers.recording.recordings import Dispatch, record_optimizer, record_sample, record_step
from trainers.recording.trainer_code import check_out

LIMIT_PCT = 0.1
GIB = 2**30
METHODS = ("lora", "full")
SEED = 3
Variant = StepVariant | SampleVariant | OptimizerVariant


@dataclass(frozen=True)
class Case:
    """One tape of a model, and what it is held to."""

    profile: ModelProfile
    variant: Variant
    job: Job
    strategy: Strategy

    @classmethod
    def of(cls, profile: ModelProfile, variant: Variant) -> Case:
        """A batch of three (or of what the tape holds) at half the model's usual length, its smallest size; rank 20."""
        job, strategy = variant.records(profile)
        height, width = min(profile.shape.resolutions)
        fixed = family(profile).fixed
        frames = max(profile.shape.default_frames // 2 // profile.shape.frame_step, 1) * profile.shape.frame_step + 1
        frames = profile.shape.default_frames if "F" in fixed else frames  # FramePack's sections have one length
        batch = fixed.get("B", 2 if profile.shape.batches else 3)
        if isinstance(variant, StepVariant) and variant.samples:
            batch = variant.samples
        if not isinstance(variant, OptimizerVariant) and variant.one_sample:
            batch = 1
        job = job.replace(
            frames=1 if profile.kind == "image" else frames,
            height=height,
            width=width,
            batch_size=batch,
            lora_rank=20,
        )
        return cls(profile, variant, job, strategy)

    @property
    def shape(self) -> dict[str, int]:
        return grid(self.profile, self.job)


def usual(profile: ModelProfile, checkpointing: str) -> Iterator[Variant]:
    """What people train with when they say no more than the method."""
    batch = family(profile).fixed.get("B", 2 if profile.shape.batches else 3)
    for method in METHODS:
        job = job_for(profile, {"method": method})
        strategy = Strategy(gradient_checkpointing=checkpointing)
        strategy = strategy.replace(weights_dtype=strategy.weights(method))
        yield step_variant(profile, job, strategy, batch)
        yield optimizer_variant(profile, job, strategy)


def shipped(profile: ModelProfile) -> list[Variant]:
    """Every tape of a model that came with vplan."""
    known = itertools.chain(
        step_variants(profile),
        step_variants_on_request(profile),
        sample_variants(profile),
        sample_variants_on_request(profile),
        optimizer_variants(profile),
    )
    folder = profiles.TAPES / profile.name
    return [variant for variant in known if is_stored(folder / f"{variant.name}.json.gz")]


class Played(NamedTuple):
    """Events on the GPU, piece by piece, and the bytes of each buffer."""

    pieces: list[list[int]]
    sizes: list[int]

    @property
    def peak(self) -> int:
        """Allocated, in bytes, with the pieces played one after the other."""
        allocator = CachingAllocator(expandable_segments=True)
        for events in self.pieces:
            allocator.run(events, self.sizes)
        return allocator.allocated_peak_bytes

    def levels(self, piece: int) -> list[int]:
        """Bytes at each allocation of a piece since its start, and at its end."""
        steps = [self.sizes[event] if event >= 0 else -self.sizes[~event] for event in self.pieces[piece]]
        reached = list(itertools.accumulate(steps))
        made = [level for event, level in zip(self.pieces[piece], reached, strict=True) if event >= 0]
        return [*made, *reached[-1:]]

    def same(self, other: Played) -> bool:
        """Whether another does the same from event to event: loading and passes, or an optimizer's steps."""
        told = range(len(self.pieces)) if len(self.pieces) == len(PASSES) else STEPS
        return all(self.levels(piece) == other.levels(piece) for piece in told)


PASSES, STEPS = (0, 1), (2, 4)
"""Pieces: loading and passes; of an optimizer's case loading, gradients, the first step, gradients, a later one."""


def from_tape(case: Case, counts: Sequence[int] | None = None) -> Played:
    """The passes or the optimizer's steps; ``counts``: of a model of so many blocks per run."""
    program = Program()
    own = tape(case.profile.name, case.variant.name)
    if not isinstance(case.variant, OptimizerVariant):
        piece = "step" if isinstance(case.variant, StepVariant) else "denoise"
        stages = [program.unfold(own, name, counts) for name in ("load", piece)]
        return Played([stage.ops for stage in stages], program.bytes_of(case.shape))
    # What it steps with is made elsewhere: any tape of a step with these trained parameters.
    strategy = case.strategy.replace(autocast="bf16", gradient_checkpointing="full")
    step = tape(case.profile.name, step_variant(case.profile, case.job, strategy, case.job.batch_size).name)
    load, _ = (program.unfold(step, name, counts) for name in ("load", "step"))
    first, later = (program.unfold(own, name, counts) for name in ("optimizer_first", "optimizer"))
    gradients = list(program.named["gradient"].values())
    return Played([load.ops, gradients, first.ops, gradients, later.ops], program.bytes_of(case.shape))


def directly(case: Case, config: dict[str, Any] | None = None) -> tuple[Played, list[int]]:
    """The same, recorded at the shape itself, and the blocks of each run. ``config``: of another depth than full."""
    known = (case.profile, case.job, case.strategy, case.shape, config)
    if isinstance(case.variant, OptimizerVariant):
        trace = record_optimizer(*known)
    elif isinstance(case.variant, StepVariant):
        trainer, _, version = case.variant.code.partition("@")
        trace = record_step(*known, Dispatch.of(case.variant), check_out(trainer) if trainer else None, version)
    else:
        trace = record_sample(*known, Dispatch.of(case.variant))
    return Played(pieces(trace), [alloc.nbytes for alloc in trace.allocations]), [run.count for run in trace.runs]


def pieces(trace: RawRecording) -> list[list[int]]:
    """The events of each piece on the GPU."""
    host = {number for number, alloc in enumerate(trace.allocations) if alloc.category == "host"}
    bounds = itertools.pairwise(start for _, start in trace.pieces)
    found = [trace.events[start:stop] for start, stop in bounds]
    return [[event for event in events if (event if event >= 0 else ~event) not in host] for events in found]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.held_out", description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--checkpointing", choices=("none", "full"), default="full")
    parser.add_argument("--sample", type=int, metavar="N", help="N tapes of each model by lot")
    parser.add_argument("--variant", metavar="TEXT", help="the tapes with a text in their name")
    asked = parser.parse_args()
    worst, count = 0.0, 0
    print(f"{'model':22} {'tape':46} {'shape':16} {'tape GiB':>9} {'direct GiB':>10} {'error %':>9} {'s':>6}")
    for name in asked.models or lookup.model_names():
        profile = lookup.model(name)
        variants = list(usual(profile, asked.checkpointing))
        if asked.sample is not None or asked.variant is not None:
            variants = [variant for variant in shipped(profile) if (asked.variant or "") in variant.name]
        if asked.sample is not None:
            lot = random.Random(f"{SEED} {profile.name}")
            variants = lot.sample(variants, min(asked.sample, len(variants)))
        for variant in variants:
            case = Case.of(profile, variant)
            start = time.perf_counter()
            ours, theirs = from_tape(case).peak, directly(case)[0].peak
            error = 100 * (ours - theirs) / theirs
            worst, count = max(worst, abs(error)), count + 1
            job = case.job
            shape = f"{job.batch_size}x{job.frames}x{job.height}x{job.width}"
            numbers = f"{ours / GIB:9.3f} {theirs / GIB:10.3f} {error:+9.4f} {time.perf_counter() - start:6.1f}"
            print(f"{profile.name:22} {variant.name:46} {shape:16} {numbers}", flush=True)
    print(f"{count} tapes, worst {worst:.4f} %, allowed {LIMIT_PCT} %")
    return int(worst > LIMIT_PCT)


if __name__ == "__main__":
    sys.exit(main())
