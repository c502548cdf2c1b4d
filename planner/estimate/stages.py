"""Replays a run's stages in order on one allocator, because what the allocator holds carries over.

`replay_stages` is the entry point; `replay_encoding` replays what is encoded before training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from planner.allocator.caching import Replayed
from planner.allocator.implementation import CachingAllocator
from planner.allocator.mps import MpsAllocator
from planner.catalog import apple_cards
from planner.estimate.common_numbers import common_numbers
from planner.garbage_collection import recording_cache, without_garbage_collection
from planner.layout.encoders_vae.component_pass import ComponentPass
from planner.layout.encoders_vae.encoding_memory import lay_out_encoding
from planner.layout.phases import Encoding, encoding_runs, encodings
from planner.layout.run import Run
from planner.spec.plan import PhaseName
from planner.tape.program import Stage


class ReplayedStage(NamedTuple):
    """One replayed stage: its phase, its peaks, and what stayed allocated after it."""

    run: Run
    phase: PhaseName
    stage: Stage
    ops: list[int]
    """all events of the stage, in order"""

    before: list[int]
    """buffers that were allocated when it began"""

    replayed: Replayed
    allocated_after_bytes: int


CAPPED_STEPS = 3
"""Steps per shape after the first in a replay with a capacity: each finds the cache as the previous one left it."""


def allocator_of(run: Run, capacity_bytes: int | None = None) -> CachingAllocator | MpsAllocator:
    """The allocator for the card of a run. ``capacity_bytes``: what it may reserve; on Apple's GPUs, the working set
    whose multiples are its watermarks."""
    gpu = run.facts.gpu
    if gpu.backend == "cuda":
        expandable = run.strategy.expandable_segments
        return CachingAllocator(expandable_segments=expandable, capacity_bytes=capacity_bytes)
    if capacity_bytes is None:
        return MpsAllocator()
    return MpsAllocator(
        working_set_bytes=capacity_bytes,
        max_buffer_bytes=apple_cards.max_buffer_bytes(gpu),
        other_bytes=gpu.context_bytes,
    )


def replay_stages(
    *runs: Run, cached: bool = True, spare: Sequence[int] = (), capacity_bytes: int | None = None
) -> list[ReplayedStage]:
    """Replays one run, or one run per bucket in turn, on one allocator: each shape must fit next to what the previous
    one left in the cache.

    The first run loads the model. Buffers that stay have the first run's numbers (`planner.estimate.common_numbers`).

    ``cached``: include what is encoded before training. ``spare``: bytes of free cached segments when the first step
    begins. ``capacity_bytes``: what torch's allocator may reserve. When that is short, the allocator empties its cache;
    the stage that still runs out is the last one returned.
    """
    first = runs[0]
    allocator = allocator_of(first, capacity_bytes)
    stages = _stages_in_order(runs, steps=1 if capacity_bytes is None else CAPPED_STEPS)
    played: list[ReplayedStage] = []
    ops_of_stage: dict[int, list[int]] = {}  # a step that is repeated is flattened once
    numbers = {id(run): common_numbers(first, run) for run in runs}
    with without_garbage_collection():
        for run in runs if cached else ():
            for encoding, alone in zip(encodings(run), encoding_runs(run), strict=True):
                assert alone.phases.encode is not None
                replayed = replay_encoding(encoding, first.strategy.expandable_segments, capacity_bytes)
                ops = alone.phases.encode.ops
                played.append(ReplayedStage(alone, "encode", alone.phases.encode, ops, [], replayed, 0))
        following = [phase for _, phase, _ in stages[1:]] + [""]
        for (run, phase, stage), after_it in zip(stages, following, strict=True):
            around = phase == "encode" and run.empty_cache.around_encode
            if around:
                allocator.empty_cache()
            if spare and stage is first.first_pass:
                made = range(len(run.sizes), len(run.sizes) + len(spare))
                allocator.run([*made, *(~number for number in made)], [*run.sizes, *spare])
                spare = ()
            if id(stage) not in ops_of_stage:
                ops_of_stage[id(stage)] = stage.ops
            ops = ops_of_stage[id(stage)]
            common = numbers[id(run)]
            before = common.own(allocator.live)
            replayed = allocator.run(common.events(ops), common.sizes, common.streams)
            played.append(ReplayedStage(run, phase, stage, ops, before, replayed, allocator.allocated_bytes))
            if replayed.oom_at is not None:
                break
            if around or run.empties_cache_after(phase, stage, validates=after_it == "denoise"):
                allocator.empty_cache()
    return played


def _stages_in_order(runs: Sequence[Run], steps: int) -> list[tuple[Run, PhaseName, Stage]]:
    """What is replayed: all of the first run, and of several the steps of each in turn, twice. ``steps``: of each
    shape after its first."""
    first = runs[0]
    stages = [(run, phase, stage) for run in runs for phase, stage in run.stages]
    again = _sampled_again if first.samples_only else _steady_step
    later = [(run, phase, stage) for run in runs for phase, stage in again(run)]
    if len(runs) > 1:
        stages = [entry for entry in stages if entry[0] is first] + later + later
    after = next((at for at, entry in enumerate(stages) if entry[1] == "optimizer"), len(stages) - 1) + 1
    stages[after:after] = later * (steps - 1)
    return stages


def reused_replay(run: Run, earlier: Sequence[ReplayedStage], cached: bool = True) -> list[ReplayedStage]:
    """The replay of an ``earlier`` run, if the same happens in every stage of this one; else empty."""
    if not earlier:
        return []
    here: list[tuple[Run, PhaseName, Stage]] = []
    for encoding in encoding_runs(run) if cached else ():
        assert encoding.phases.encode is not None
        here.append((encoding, "encode", encoding.phases.encode))
    here += [(run, phase, stage) for phase, stage in run.stages]
    if [(phase, stage) for _, phase, stage in here] != [(entry.phase, entry.stage) for entry in earlier]:
        return []
    if any(replayed_run.sizes != entry.run.sizes for (replayed_run, _, _), entry in zip(here, earlier, strict=True)):
        return []
    return [
        entry._replace(run=replayed_run, stage=stage)
        for (replayed_run, _, stage), entry in zip(here, earlier, strict=True)
    ]


def replay_encoding(encoding: Encoding, expandable: bool, capacity_bytes: int | None = None) -> Replayed:
    """Replays what is encoded before training on an allocator of its own. ``expandable``: with expandable segments."""
    return _replay_alone(encoding.components, encoding.workspace_bytes, encoding.workspaces, expandable, capacity_bytes)


@recording_cache(maxsize=1024)
def _replay_alone(
    components: tuple[ComponentPass, ...], workspace_bytes: int, workspaces: int, expandable: bool, capacity: int | None
) -> Replayed:
    """The cached replay of encoders alone: it does not depend on the training strategy and rarely on the card, so a
    search asks for it again and again."""
    layout = lay_out_encoding(components, workspace_bytes, workspaces)
    return CachingAllocator(expandable_segments=expandable, capacity_bytes=capacity).run(layout.stage.ops, layout.sizes)


def _steady_step(run: Run) -> list[tuple[PhaseName, Stage]]:
    """The stages of a step after the first. If the encoders stay on the GPU, each step begins with encoding."""
    following = [phase for phase, _ in run.stages[1:]] + [""]
    return [
        (phase, stage)
        for (phase, stage), after_it in zip(run.stages, following, strict=True)
        if phase in ("train", "optimizer") or (phase, after_it) == ("encode", "train")
    ]


def _sampled_again(run: Run) -> list[tuple[PhaseName, Stage]]:
    """The stages of a run whose model is already loaded."""
    stages = [entry for entry in run.stages if entry[1] is not run.load]
    return [("load", run.phases.reload), *stages] if run.phases.reload else stages
