"""How far tapes are from direct recordings: every model at full depth, at a shape no tape was made from.

    python -m tests.benchmarks.held_out [MODEL ...] [--checkpointing none|full]

Prints one line per model and method: allocated peaks of the passes and of the optimizer's step, from the shipped tape
and recorded directly, and the error of each. Ends with exit code 1 when one is over 0.1 %. It shows that tapes are true
to the recorder, nothing about the recorder: that is what `vplan accuracy` compares with measurements. Needs
vplan[train]; a model takes half a minute to three minutes.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from planner import catalog
from planner.facts import ModelProfile
from planner.job import Job, Strategy
from planner.library import tape
from planner.replay import CachingAllocator
from planner.shapes import grid
from planner.tape import Program, Stage
from planner.variants import OptimizerVariant, StepVariant
from trainers.families import family
from trainers.record import Trace, record_optimizer, record_step

LIMIT_PCT = 0.1
GIB = 2**30
METHODS = ("lora", "full")


@dataclass(frozen=True)
class Case:
    """One model under one method, at the shape it is held to."""

    profile: ModelProfile
    job: Job
    strategy: Strategy

    @property
    def shape(self) -> dict[str, int]:
        return grid(self.profile, self.job)

    @property
    def step_variant(self) -> str:
        return StepVariant.of(self.profile, self.job, self.strategy, self.job.batch_size).name

    @property
    def optimizer_variant(self) -> str:
        return OptimizerVariant.of(self.profile, self.job, self.strategy).name


def case(name: str, method: str, checkpointing: str) -> Case:
    """A batch of three (or of what the tapes hold) at half the model's usual length and its smallest size; rank 20."""
    profile = catalog.model(name)
    height, width = min(profile.shape.resolutions)
    frames = max(profile.shape.default_frames // 2 // profile.shape.frame_step, 1) * profile.shape.frame_step + 1
    job = Job(
        model=name,
        method=method,
        frames=1 if profile.kind == "image" else frames,
        height=height,
        width=width,
        batch_size=2 if profile.shape.batches else family(profile).fixed.get("B", 3),
        lora_rank=20,
        lora_targets=profile.lora.targets,
    )
    strategy = Strategy(gradient_checkpointing=checkpointing)
    return Case(profile, job, strategy.replace(weights_dtype=strategy.weights(method)))


def from_tapes(case: Case) -> tuple[int, int]:
    """Allocated peaks of the passes and of the later optimizer step, bytes."""
    program = Program()
    step, optimizer = tape(case.job.model, case.step_variant), tape(case.job.model, case.optimizer_variant)
    load, passes = program.unfold(step, "load"), program.unfold(step, "step")
    first, later = program.unfold(optimizer, "optimizer_first"), program.unfold(optimizer, "optimizer")
    sizes = program.bytes_of(case.shape)
    gradients = list(program.named["gradient"].values())
    return peak([load, passes], sizes), peak([load, gradients, first, gradients, later], sizes)


def directly(case: Case) -> tuple[int, int]:
    """The same, recorded at full depth at the shape itself."""
    peaks = []
    for make in (record_step, record_optimizer):
        trace = make(case.profile, case.job, case.strategy, case.shape, None)
        peaks.append(peak(pieces(trace), [alloc.nbytes for alloc in trace.allocs]))
    return peaks[0], peaks[1]


def pieces(trace: Trace) -> list[list[int]]:
    """The events of each piece on the GPU."""
    host = {number for number, alloc in enumerate(trace.allocs) if alloc.category == "host"}
    bounds = itertools.pairwise(start for _, start in trace.pieces)
    found = [trace.events[start:stop] for start, stop in bounds]
    return [[event for event in events if (event if event >= 0 else ~event) not in host] for events in found]


def peak(stages: Sequence[Stage | list[int]], sizes: list[int]) -> int:
    """Allocated peak in bytes over stages played one after the other."""
    allocator = CachingAllocator(expandable_segments=True)
    for stage in stages:
        allocator.run(stage.ops if isinstance(stage, Stage) else stage, sizes)
    return allocator.allocated_peak_bytes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.held_out", description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--checkpointing", choices=("none", "full"), default="full")
    asked = parser.parse_args()
    worst = 0.0
    numbers = f"{'tape GiB':>10} {'direct GiB':>10} {'error %':>9} {'s':>6}"
    print(f"{'model':22} {'method':6} {'shape':18} {'of':9} {numbers}")
    for name, method in itertools.product(asked.models or catalog.model_names(), METHODS):
        held = case(catalog.model(name).name, method, asked.checkpointing)
        start = time.perf_counter()
        found = zip(("passes", "optimizer"), from_tapes(held), directly(held), strict=True)
        seconds = time.perf_counter() - start
        job = held.job
        shape = f"{job.batch_size}x{job.frames}x{job.height}x{job.width}"
        for of, ours, theirs in found:
            error = 100 * (ours - theirs) / theirs
            worst = max(worst, abs(error))
            numbers = f"{ours / GIB:10.3f} {theirs / GIB:10.3f} {error:+9.4f} {seconds:6.1f}"
            print(f"{job.model:22} {method:6} {shape:18} {of:9} {numbers}", flush=True)
    print(f"worst {worst:.4f} %, allowed {LIMIT_PCT} %")
    return int(worst > LIMIT_PCT)


if __name__ == "__main__":
    sys.exit(main())
