"""What checkpoints keep of a recorded step: each block's input, and what is given to all blocks alike."""

from __future__ import annotations

from planner.layout.run import Run
from planner.tape.program import Block
from planner.units import power_of_two


def block_inputs(run: Run) -> dict[Block, list[int]]:
    """What the checkpoint of each block keeps: made in an earlier block's forward, freed in its own backward.

    The first block's input and what all blocks share (text, modulation) are made outside the blocks and left out: a few
    MiB a block, and one input. Where it is more, `offloaded_bytes` counts it.
    """
    return run.shared(_block_inputs)


def _block_inputs(run: Run) -> dict[Block, list[int]]:
    made: dict[int, Block] = {}
    kept: dict[Block, list[int]] = {}
    category = list(run.program.category)
    for moment, events in run.step.stretches:
        block = moment.module_list, moment.block
        # What stands behind a block, as Wan Animate's face adapter does, is at its place, and not in its checkpoint.
        inputs = [~event for event in events if event < 0 and made.pop(~event, block) != block]
        if moment.block < 0:
            continue
        if moment.passes == "forward":
            last = {event if event >= 0 else ~event: event >= 0 for event in events}
            made |= {buffer: block for buffer, stays in last.items() if stays and category[buffer] != "weight"}
        elif moment.passes == "backward" and inputs:
            kept.setdefault(block, []).extend(inputs)
    return kept


def offloaded_bytes(run: Run) -> int:
    """What the checkpoints of one micro-batch hold in host RAM, bytes: each block's input; 0 where they are not
    offloaded.

    A checkpoint keeps its tensor arguments, so torch's ``save_on_cpu`` copies for every block what all are given alike
    (torch/utils/checkpoint.py, _CheckpointFrame.save_inputs): counted where it is larger than what each hands on, as a
    modulation per token is (Wan 2.2 TI2V). Ours does not (``HostTerms.copies_shared_inputs``).
    """
    if run.strategy.gradient_checkpointing != "offload":
        return 0
    inputs = [buffer for kept in block_inputs(run).values() for buffer in kept]
    if not run.host.copies_shared_inputs:
        return run.total_bytes(inputs)
    largest = max(map(run.sizes.__getitem__, inputs), default=0)
    alike = [buffer for buffer in run.shared(_made_outside) if run.sizes[buffer] > largest]
    size = power_of_two if run.host.checkpoints_pin == "rounded" else int
    return sum(size(run.sizes[buffer]) for buffer in (*inputs, *run.facts.model.blocks * alike))


def _made_outside(run: Run) -> list[int]:
    """What forward makes outside the blocks and a block's backward frees."""
    outside: set[int] = set()
    freed_inside = []
    for moment, events in run.step.stretches:
        inside = moment.block >= 0
        for event in events:
            if event >= 0 and not inside and moment.passes == "forward":
                outside.add(event)
            elif event < 0 and ~event in outside:
                outside.remove(~event)
                if inside and moment.passes == "backward":
                    freed_inside.append(~event)
    return freed_inside
