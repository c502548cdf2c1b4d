"""planner/tape/partial_checkpointing.py against direct recordings: the first blocks checkpointed, the others not, at an
ordinary shape."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from planner.allocator.caching import CachingAllocator
from planner.catalog import lookup
from planner.catalog.shapes import grid, job_for
from planner.errors import VplanError
from planner.layout.recordings import tape
from planner.tape.format import Tape
from planner.tape.partial_checkpointing import BothSteps
from planner.tape.program import Program
from planner.tape.variants.inventory import step_variants
from trainers.recording.recordings import record_step

BLOCKS = 6


def shallow(found: Tape) -> Tape:
    return replace(found, runs=tuple(replace(run, count=BLOCKS) for run in found.runs))


CASES = [
    ("wan2.1-t2v-1.3b", "step-lora-half-fp32-autocast-none-one", 2),
    ("wan2.1-t2v-1.3b", "step-full-half-none-many", 5),
    ("wan2.1-t2v-1.3b", "step-lora-fp8-fp32-autocast-none-one", 3),
    ("cogvideox-2b", "step-lora-half-fp32-autocast-none-many", 3),
]


@pytest.mark.parametrize(("model", "name", "count"), CASES)
def test_put_together_is_as_recorded(model: str, name: str, count: int) -> None:
    profile = lookup.model(model)
    variant = next(variant for variant in step_variants(profile) if variant.name == name)
    job, strategy = variant.records(profile)
    asked = {"frames": 25, "height": 320, "width": 480, "lora_rank": 24, "batch_size": 3 if "many" in name else 1}
    job = job.replace(**asked)
    shape = grid(profile, job)

    plain, full = (shallow(tape(model, known)) for known in (name, name.replace("none", "full")))
    program = Program()
    load = program.unfold(plain, "load")
    both = BothSteps(program, model, program.unfold(plain, "step"), program.unfold_beside(full, "step"))
    step, blocks = both.first(count)
    assert sorted(index for _, index in blocks) == list(range(count))
    sizes = program.bytes_of(shape)

    strategy = strategy.replace(gradient_checkpointing="partial", checkpointed_blocks=count)
    trace = record_step(profile, job, strategy, shape, {**profile.config, "num_layers": BLOCKS})
    names = [found for found, _ in trace.pieces]
    starts = [start for _, start in trace.pieces]
    events = {found: trace.events[a:b] for found, (a, b) in zip(names, itertools.pairwise(starts), strict=False)}

    composed, direct = (CachingAllocator(expandable_segments=True) for _ in range(2))
    for stage in (load, step):
        ours = composed.run(stage.ops, sizes)
        theirs = direct.run(events[stage.name], [alloc.nbytes for alloc in trace.allocations])
        assert ours.allocated_peak_bytes == pytest.approx(theirs.allocated_peak_bytes, rel=1e-3)
    assert composed.allocated_bytes == direct.allocated_bytes


def test_all_blocks_are_the_checkpointed_recording_and_more_are_refused() -> None:
    plain, full = (tape("wan2.1-t2v-1.3b", f"step-lora-half-fp32-autocast-{mode}-one") for mode in ("none", "full"))
    shape = grid(lookup.model("wan2.1-t2v-1.3b"), job_for(lookup.model("wan2.1-t2v-1.3b"), {}))
    program, alone = Program(), Program()
    program.unfold(plain, "load"), alone.unfold(full, "load")
    stages = program.unfold(plain, "step"), program.unfold_beside(full, "step")
    both = BothSteps(program, plain.model, *stages)
    step, _ = both.first(30)
    other = alone.unfold(full, "step")
    sizes, theirs = program.bytes_of(shape), alone.bytes_of(shape)
    level = [sizes[event] if event >= 0 else -sizes[~event] for event in step.ops]
    assert level == [theirs[event] if event >= 0 else -theirs[~event] for event in other.ops]
    with pytest.raises(VplanError, match="has 30 blocks"):
        both.first(31)
