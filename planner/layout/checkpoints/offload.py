"""Checkpoints in host RAM, as a transformation of a Run."""

from __future__ import annotations

from collections.abc import Collection

from planner.layout.checkpoints.block_inputs import block_inputs
from planner.layout.checkpoints.recomputation import (
    Recomputations,
    alike_stretches,
    at_stretch,
    forward_events,
    recomputations,
    without_frees,
)
from planner.layout.run import STRATEGY_MOMENT, Run
from planner.tape.program import Block, Moment, frees

FETCHED_AHEAD = "checkpoint fetched ahead"


def checkpoint_offload(run: Run) -> None:
    """A checkpointed block's input goes to host RAM once the block has run, and comes back when the block behind it
    is recomputed, beside that one's own; it goes when its own block has been (trainers/memory/offload.py)."""
    if run.strategy.gradient_checkpointing != "offload":
        return
    if run.step.stretches == run.recording.step.stretches:
        run.step.stretches = run.shared_at_shape(_with_inputs_offloaded).copy()
    else:
        run.step.stretches = _with_inputs_offloaded(run)


def _with_inputs_offloaded(run: Run) -> list[tuple[Moment, list[int]]]:
    """The step with each checkpoint's input in host RAM while it is not needed. Shapes differ in where recomputations
    begin and end, and hardly any do."""
    if run.step.stretches != run.recording.step.stretches:
        alike, forward = alike_stretches(run), forward_events(run)
        return _woven(run, alike, forward, recomputations(run, alike, forward))
    return run.shared(_woven_recording, recomputations(run, run.shared(alike_stretches), run.shared(forward_events)))


def _woven_recording(recording: Run, recomputations: Recomputations) -> list[tuple[Moment, list[int]]]:
    return _woven(recording, recording.shared(alike_stretches), recording.shared(forward_events), recomputations)


def _woven(
    run: Run, alike: dict[int, int], forward: Collection[Block], recomputations: Recomputations
) -> list[tuple[Moment, list[int]]]:
    """The step with the inputs leaving and coming back. ``alike``, ``recomputations``: as `alike_stretches` and
    `recomputations` say them; ``forward``: the blocks in the order of their forward."""
    inputs, blocks = block_inputs(run), [*forward]
    before = dict(zip(blocks[1:], blocks, strict=False))
    # The last block's backward may come in parts, around what stands between it and the head.
    backward = [(at, moment) for at, (moment, _) in enumerate(run.step.stretches) if moment.passes == "backward"]
    over = {(moment.module_list, moment.block): at for at, moment in backward}
    last = blocks[-1:]
    left: set[Block] = set()
    brought: set[Block] = set()
    freed: set[Block] = set()
    woven: list[tuple[Moment, list[int]]] = []
    for at, (moment, events) in enumerate(run.step.stretches):
        block = (moment.module_list, moment.block)
        if block not in inputs or moment.passes not in ("forward", "backward"):
            woven.append((moment, events))
            continue
        leaving = frees(inputs[block])
        if moment.passes == "forward":
            # It goes when the next block begins; the last one's when backward brings the first back.
            stays = block in left or block in last
            woven.append((moment, [*events, *([] if stays else leaving)]))
            left.add(block)
            continue
        events = without_frees(events, inputs[block])
        begins, ends = at_stretch(recomputations[alike[at]], len(events), at == over[block])
        leaves_late = block in last and block not in brought
        woven.append((moment, [*events[:begins], *(leaving if leaves_late else [])]))
        for fetched, name in ((block, "checkpoint"), (before.get(block), FETCHED_AHEAD)):
            if fetched is not None and fetched not in brought:
                woven.append((STRATEGY_MOMENT._replace(passes=name), inputs[fetched]))
                brought.add(fetched)
        if ends is None or block in freed:
            woven.append((moment, events[begins:]))
        else:
            woven.append((moment, [*events[begins:ends], *leaving, *events[ends:]]))
            freed.add(block)
    return [(moment, events) for moment, events in woven if events]


def fetched_when_needed(run: Run) -> None:
    """Takes the fetching ahead out again: each input comes when its own block's backward begins."""
    late: dict[int, None] = {}
    woven: list[tuple[Moment, list[int]]] = []
    for moment, events in run.step.stretches:
        if moment.passes == FETCHED_AHEAD:
            late |= dict.fromkeys(buffer for buffer in events if buffer >= 0)
            events = [event for event in events if event < 0]  # what an engine frees meanwhile
        if moment.passes == "backward" and (coming := [buffer for buffer in late if ~buffer in events]):
            woven.append((STRATEGY_MOMENT._replace(passes="checkpoint"), coming))
            late = {buffer: None for buffer in late if buffer not in coming}
        if events:
            woven.append((moment, events))
    assert not late, "what was to come ahead is freed in its block's backward"
    run.step.stretches = woven
