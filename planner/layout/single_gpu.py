"""Strategies on one GPU, and DDP, as transformations of a Run.

Each one function, one named buffer or lifetime, one source.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable

from planner.errors import VplanError
from planner.layout.checkpoint_inputs import block_inputs, recomputation
from planner.layout.run import STRATEGY_MOMENT, Run
from planner.spec.job import SPLIT
from planner.tape.program import Block, Moment, Stage
from planner.tape.variants import Precision
from planner.units import MIB, power_of_two


def checkpoint_offload(run: Run) -> None:
    """A checkpointed block's input goes to host RAM once the block has run, and comes back when the block behind it
    is recomputed, beside that one's own; it goes when its own block has been (trainers/memory/offload.py)."""
    if run.strategy.gradient_checkpointing != "offload":
        return
    if run.step.stretches == run.recording.step.stretches:
        run.step.stretches = run.shared_at_shape(_with_inputs_offloaded).copy()
    else:
        run.step.stretches = _with_inputs_offloaded(run)


Recomputations = tuple[tuple[int, int] | None, ...]
"""What `recomputation` says of one of each of `_likes`, by their numbers."""


def _with_inputs_offloaded(run: Run) -> list[tuple[Moment, list[int]]]:
    """The step with each checkpoint's input in host RAM while it is not needed. Shapes differ in where recomputations
    begin and end, and hardly any do."""
    if run.step.stretches != run.recording.step.stretches:
        likes, forward = _likes(run), _forward_events(run)
        return _woven(run, likes, forward, _recomputations(run, likes, forward))
    return run.shared(_woven_recording, _recomputations(run, run.shared(_likes), run.shared(_forward_events)))


def _recomputations(run: Run, likes: dict[int, int], forward: dict[Block, list[int]]) -> Recomputations:
    """By their numbers, `recomputation` of the stretches that are alike."""
    inputs = block_inputs(run)
    first: dict[int, int] = {}
    for at, number in likes.items():
        first.setdefault(number, at)
    found = []
    for at in first.values():
        moment, events = run.step.stretches[at]
        block = (moment.module_list, moment.block)
        found.append(recomputation(run, forward[block], _but(events, inputs[block])))
    return tuple(found)


def _but(events: list[int], freed: list[int]) -> list[int]:
    """Events without the frees of some buffers."""
    frees = {~buffer for buffer in freed}
    return events if frees.isdisjoint(events) else [event for event in events if event not in frees]


def _woven_recording(recording: Run, recomputations: Recomputations) -> list[tuple[Moment, list[int]]]:
    return _woven(recording, recording.shared(_likes), recording.shared(_forward_events), recomputations)


def _woven(
    run: Run, likes: dict[int, int], forward: Collection[Block], recomputations: Recomputations
) -> list[tuple[Moment, list[int]]]:
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
        frees = [~buffer for buffer in inputs[block]]
        if moment.passes == "forward":
            # It goes when the next block begins; the last one's when backward brings the first back.
            leaving = [] if block in left or block in last else frees
            left.add(block)
            woven.append((moment, [*events, *leaving]))
        else:
            events = _but(events, inputs[block])
            begins, ends = recomputations[likes[at]] or (0, len(events) if at == over[block] else None)
            woven.append((moment, [*events[:begins], *(frees if block in last and block not in brought else [])]))
            for fetched, name in ((block, "checkpoint"), (before.get(block), FETCHED_AHEAD)):
                if fetched is not None and fetched not in brought:
                    woven.append((STRATEGY_MOMENT._replace(passes=name), inputs[fetched]))
                    brought.add(fetched)
            if ends is None or block in freed:
                woven.append((moment, events[begins:]))
            else:
                woven.append((moment, [*events[begins:ends], *frees, *events[ends:]]))
                freed.add(block)
    return [(moment, events) for moment, events in woven if events]


def _forward_events(run: Run) -> dict[Block, list[int]]:
    """The forward of each block whose checkpoint keeps its input."""
    inputs = block_inputs(run)
    forward: dict[Block, list[int]] = {}
    for moment, events in run.step.stretches:
        if moment.passes == "forward" and (block := (moment.module_list, moment.block)) in inputs:
            forward.setdefault(block, []).extend(events)
    return forward


def _likes(run: Run) -> dict[int, int]:
    """Place of a stretch of a block's backward -> a number, the same for all in which, whatever the shape, the same is
    allocated and freed, and was in that block's forward."""
    inputs, forward = block_inputs(run), _forward_events(run)
    sizes = list(run.program.buffers)
    made: dict[tuple[str, int], int] = {}
    table = [made.setdefault(pair, len(made)) for pair in zip(run.program.op, sizes, strict=True)]
    table += [~size for size in reversed(sizes)]  # so that a free, ~buffer, finds its own by counting from the end

    def what(events: Iterable[int]) -> tuple[int, ...]:
        return tuple(map(table.__getitem__, events))

    in_forward = {block: what(events) for block, events in forward.items()}
    numbers: dict[object, int] = {}
    found = {}
    for at, (moment, events) in enumerate(run.step.stretches):
        block = (moment.module_list, moment.block)
        if moment.passes == "backward" and block in inputs:
            frees = {~buffer for buffer in inputs[block]}
            key = in_forward[block], what(event for event in events if event not in frees)
            found[at] = numbers.setdefault(key, len(numbers))
    return found


NCCL_BYTES = 600 * MIB
"""One communicator: 544 to 688 MB on four A100 (NVIDIA/nccl#964), 512 MiB even for one rank (nccl#2363)."""

FETCHED_AHEAD = "checkpoint fetched ahead"


def fetched_when_needed(run: Run) -> None:
    """Takes the fetching ahead out again: each input comes when its own block's backward begins."""
    late: dict[int, None] = {}
    woven: list[tuple[Moment, list[int]]] = []
    for moment, events in run.step.stretches:
        if moment.passes == FETCHED_AHEAD:
            late |= dict.fromkeys(events)
            continue
        if moment.passes == "backward" and (coming := [buffer for buffer in late if ~buffer in events]):
            woven.append((STRATEGY_MOMENT._replace(passes="checkpoint"), coming))
            late = {buffer: None for buffer in late if buffer not in coming}
        woven.append((moment, events))
    assert not late, "what was to come ahead is freed in its block's backward"
    run.step.stretches = woven


SWAP_RING_BUFFERS = 2
"""Buffers that swapped blocks come through."""


def block_swap(run: Run) -> None:
    """Block swap: the last ``swap_blocks`` of the checkpointed blocks live in pinned host RAM and stream through a ring
    of ``SWAP_RING_BUFFERS`` buffers, each as large as the largest of them (musubi-tuner, ``--block_swap_h2d_only``;
    OneTrainer docs/RamOffloading.md)."""
    count = run.strategy.swap_blocks
    if not count:
        return
    blocks, swapped = run.swappable_weights, run.swapped_blocks
    if count > len(blocks):
        fault = f"swap_blocks {count}: the model has {len(blocks)} blocks with weights to swap"
        raise VplanError(fault, f"use at most {len(blocks)}" if blocks else "use --method lora")
    largest = max(map(run.total_bytes, swapped.values()))
    gone = set(itertools.chain.from_iterable(swapped.values()))
    run.drop(run.load, gone)
    if anew := gone & run.shared(_weights_made_anew):  # the ring holds them
        run.drop(run.step, anew)
    for _ in range(min(SWAP_RING_BUFFERS, count)):
        run.add(run.load, largest, "buckets", "swap ring")


def swapped_host_bytes(run: Run) -> int:
    """Host RAM, bytes, that swapped blocks wait in, registered with CUDA as they lie (trainers/memory/pinned.py). An
    engine that splits casts to 16 bits what a recording keeps in fp32."""
    if not run.strategy.swap_blocks:
        return 0
    split, rounded = run.strategy.sharding in SPLIT, run.host.swap_pins == "rounded"
    swapped = itertools.chain.from_iterable(run.swapped_blocks.values())
    if not split and not rounded:
        return run.total_bytes(swapped) + staged_bytes(run)
    cast = {run.parameters[name]: 2 * elements for name, elements in run.elements.items()} if split else {}
    sizes = (cast.get(buffer, run.sizes[buffer]) for buffer in swapped)
    return sum(map(power_of_two, sizes) if rounded else sizes) + staged_bytes(run)


def staged_bytes(run: Run) -> int:
    """Pinned buffers, bytes, that swapped blocks pass on their way: two as large as a block (musubi-tuner 30c658c
    modules/custom_offloading_utils.py ``staging_buffer_a``)."""
    if run.host.swap_pins != "staging" or not run.swapped_blocks:
        return 0
    largest = max(run.swapped_blocks.values(), key=run.total_bytes)
    return 2 * sum(power_of_two(run.sizes[buffer]) for buffer in largest)


def _weights_made_anew(run: Run) -> frozenset[int]:
    """Weights that a step casts away and makes again, as layerwise casting does."""
    weights = frozenset(run.named("weight").values())
    return weights.intersection(*[itertools.chain.from_iterable(events for _, events in run.step.stretches)])


def accumulation(run: Run) -> None:
    """Gradient accumulation: a further micro-batch runs beside the gradients of the first, and each of its own
    gradients is added to them and freed within its block (torch AccumulateGrad adds in place)."""
    if run.strategy.gradient_accumulation == 1:
        return
    step = onto_gradients(run)
    run.accumulate = Stage("step", [(run.step.stretches[0][0], [~buffer for buffer in run.leftovers]), *step.stretches])


def onto_gradients(run: Run) -> Stage:
    """The step when gradients exist already: each new one is added to the old one and freed within its block."""
    gradients = run.named("gradient").values()
    added = {buffer: run.new(run.sizes[buffer], "temporary", "new gradient") for buffer in gradients}
    stretches = []
    for moment, events in run.step.stretches:
        own = [added.get(event, event) for event in events]
        stretches.append((moment, own + [~added[event] for event in events if event in added]))
    return Stage("step", stretches)


def gradients_leave(run: Run) -> None:
    """Frees each gradient at the end of the block whose backward made it; so every micro-batch is like the first."""
    run.accumulate = None
    gradients = set(run.named("gradient").values())
    run.step.stretches = [
        (moment, [*events, *(~event for event in events if event in gradients)])
        for moment, events in run.step.stretches
    ]
    for stage in (run.optimizer_first, run.optimizer):
        run.drop(stage, gradients)


def offloaded_optimizer(run: Run) -> None:
    """Optimizer states and step in host RAM (torchao CPUOffloadOptimizer): nothing of the step is on the GPU; with
    ``offload_gradients`` each gradient leaves as soon as it is accumulated."""
    strategy = run.strategy
    if strategy.offload_optimizer == "none" or strategy.sharding.startswith("zero"):
        return
    for stage in (run.optimizer_first, run.optimizer):
        run.empty(stage)
    if strategy.offload_gradients != "none":
        gradients_leave(run)


def ddp(run: Run) -> None:
    """DistributedDataParallel's buckets: a second copy of all gradients, or, with ``gradient_as_bucket_view``, the
    gradients themselves, which then never go away (torch.nn.parallel.DistributedDataParallel)."""
    if run.strategy.sharding != "ddp":
        return
    nbytes = run.trained_experts * run.total_bytes(run.named("gradient").values())
    run.add(run.load, nbytes, "buckets", "ddp buckets")
    if run.strategy.grad_buckets == "view":
        gradients_leave(run)


def ema(run: Run) -> None:
    """A moving average of what is trained, loaded with the weights. It is updated one parameter at a time: the
    difference and its product with the decay (diffusers training_utils.EMAModel.step). On the CPU it is updated there.
    """
    if run.strategy.ema != "gpu":
        return
    run.add(run.load, ema_bytes(run), "ema", "ema")
    largest = max(run.sizes[buffer] for buffer in run.named("gradient").values())
    elements = largest // (4 if Precision.of(run.job, run.strategy).trained == "fp32" else 2)
    for stage in (run.optimizer_first, run.optimizer):
        made = [run.add(stage, EMA_BYTES * elements, "temporary", "ema update") for _ in range(2)]
        run.free(stage, made)


EMA_BYTES = 4
"""Per parameter. EMAModel clones what it is given; ours is fp32 whatever trains, because a decay of 0.9999 changes a
16-bit number by less than its last digit."""


def ema_bytes(run: Run) -> int:
    """The moving average on one rank: its share where FSDP2 splits the weights, else the whole."""
    share = run.configuration.shards if run.strategy.sharding == "fsdp" else 1
    return EMA_BYTES * -(-run.trained_parameters // share)
