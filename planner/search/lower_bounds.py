"""What a strategy needs at the least, read off its tape without laying it out: enough to rule most strategies out.

A tape is walked as it is laid out, stretch by stretch, but what a template does to what is allocated is summed up once:
the blocks in the middle of a model are all alike. That is exact for what was recorded; of what a strategy adds to it
only swap, offloaded checkpoints and the optimizer's states are counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from planner.catalog import lookup
from planner.catalog.profiles import ModelProfile
from planner.estimate.links import all_reduced
from planner.estimate.roofline import Traffic
from planner.layout.attention_kernel import copies_of_masks_of_numbers, padded_masks
from planner.layout.encoders_vae.component_pass import BYTES_PER_PARAMETER
from planner.layout.single_gpu import SWAP_RING_BUFFERS
from planner.search.tape_walk import TapeWalk, order_of
from planner.spec.configuration import Configuration
from planner.spec.job import SPLIT, Job, Strategy
from planner.tape.format import Tape
from planner.tape.levels import whole_blocks
from planner.tape.program import Program
from planner.tape.variants.recorded_methods import on_recorded_layers

HALF, FULL = 2, 4
"""Bytes of a number in 16 bits and in fp32."""

LEAST = {**BYTES_PER_PARAMETER, "nf4": 0.5, "int4": 0.5}
"""Bytes per parameter, without the constants of 4-bit formats, which may be quantised too."""


def parameter_bytes(configuration: Configuration, model: ModelProfile) -> int:
    """Bytes of a model's weights, and of gradients and optimizer states where they are on the GPU whole: what a rank
    has of them at any moment of a later step, at the least."""
    job, strategy, parameters = configuration.job, configuration.strategy, model.parameters
    if job.method == "sample":
        return 0
    if strategy.sharding in SPLIT:
        return _share_bytes(configuration, model)
    weights = int(LEAST[strategy.weights(job.method)] * parameters)
    held = 0 if strategy.swap_blocks or strategy.offload_params != "none" else weights
    if job.method == "full" and not job.trainable:
        trained = 0
        if strategy.offload_gradients == "none" and strategy.optimizer_step != "backward":
            trained += weights
        if strategy.offload_optimizer == "none":
            trained += {"adamw": 2 * weights, "adamw-8bit": 2 * parameters}.get(strategy.optimizer, 0)
        held += int(model.traits.trained_share * trained)
    return held


def _share_bytes(configuration: Configuration, model: ModelProfile) -> int:
    """The same of an engine that splits: whole weights in ZeRO's first stages, else a share; shares of the states."""
    job, strategy, shards = configuration.job, configuration.strategy, configuration.shards
    parameters = model.parameters
    weights = int(LEAST[strategy.weights(job.method)] * parameters)
    held = 0
    if strategy.offload_params == "none" and not strategy.swap_blocks:
        held += weights if strategy.sharding in ("zero-1", "zero-2") else weights // shards
    trains_all = job.method == "full" and not job.trainable
    if trains_all and strategy.offload_optimizer == "none" and strategy.optimizer == "adamw":
        masters = strategy.master_weights == "fp32"
        held += int(model.traits.trained_share * (3 * FULL * parameters if masters else 2 * weights)) // shards
    return held


def least_traffic(configuration: Configuration, model: ModelProfile) -> Traffic:
    """What `planner.estimate.traffic` counts at the least of training a model: a trained parameter is 2 bytes or more
    wherever it goes."""
    job, strategy, world = configuration.job, configuration.strategy, configuration.machine.world
    if job.method == "sample" or job.trainable:
        return Traffic()
    accumulation = strategy.gradient_accumulation
    parameters = model.parameters
    trained = int(model.traits.trained_share * parameters) if job.method == "full" else 0
    ranks = configuration.shards if strategy.sharding in SPLIT else world
    split = configuration.shards if strategy.sharding in SPLIT else 1
    waiting = host_waiting = on_host = coming = across = 0
    match strategy.sharding:
        case "zero-1":
            beside, waiting = 0, 3 * HALF * trained
        case "zero-2":
            beside, waiting = 0, (2 * accumulation + 1) * HALF * trained
        case "zero-3":
            beside = accumulation * HALF * (trained + 2 * parameters)
        case "fsdp":
            beside = accumulation * (HALF * parameters + FULL * trained)
            across = all_reduced(FULL * trained // split, strategy.fsdp_replicas)
        case _:
            beside = 2 * HALF * trained
    if strategy.offload_optimizer != "none":
        host_waiting, on_host = 2 * HALF * trained // split, trained // split
    if strategy.offload_params != "none":
        coming = HALF * parameters // split
    return Traffic(
        host_forward_bytes=coming,
        host_backward_bytes=coming,
        gpu_bytes=beside * (ranks - 1) // ranks,
        replica_bytes=across,
        host_waiting_bytes=host_waiting,
        gpu_waiting_bytes=waiting * (ranks - 1) // ranks,
        host_parameters=on_host,
    )


def is_walked(job: Job, strategy: Strategy) -> bool:
    """Whether all of `Walked` holds for a strategy: of what only in part is checkpointed nothing is known of swap."""
    return keeps_all(job, strategy) and strategy.gradient_checkpointing != "partial"


def keeps_all(job: Job, strategy: Strategy) -> bool:
    """Whether a strategy keeps everything recorded on the GPU, whole, and for as long, but for what it swaps and what
    checkpoints keep."""
    return (
        keeps_activations(job, strategy)
        and strategy.sharding not in SPLIT
        and strategy.offload_params == "none"
        and strategy.offload_gradients == "none"
        and strategy.optimizer_step != "backward"
    )


def keeps_activations(job: Job, strategy: Strategy) -> bool:
    """Whether a strategy keeps at least that on the GPU, whole, and for as long, which is recorded and is neither a
    weight nor a gradient."""
    whole = job.method != "sample" and not job.trainable
    if whole and job.lora_targets:  # those of other layers have adapters that go
        whole = on_recorded_layers(lookup.model(job.model), job, strategy)
    whole = whole and not (strategy.gradient_checkpointing == "partial" and strategy.swap_blocks)
    return whole and strategy.context_parallel == 1 and strategy.compile == "none"


class Walked(NamedTuple):
    """Bytes that a recorded step allocates at a shape, at full depth, without the workspaces of attention kernels."""

    load_peak: int
    """the most while loading"""

    step_peak: int
    """the most of a step"""

    offloaded_peak: int
    """the most of a backward whose blocks' inputs wait in host RAM, but for the next one's; its own is not counted"""

    rounded_peak: int
    """the most of a backward whose blocks' inputs wait in 8 bits; its own is not counted"""

    inputs: int
    """what checkpoints keep of all blocks"""

    gradients: int
    frozen: tuple[int, ...]
    """weights that are not trained, by block in the order they run"""

    frozen_blocks: tuple[int, ...]
    """the same in the allocator's whole blocks"""

    def device_bytes(self, strategy: Strategy, swapped: int) -> int:
        """What a strategy that `keeps_all` has on the GPU at its peak, at the least, with ``swapped`` blocks or fewer:
        where one that is larger than the others joins them, the ring grows by more than itself."""
        peak = self.passes_peak(strategy) - self._most_swapped_out(swapped)
        if strategy.offload_optimizer == "none":
            # Two states of the format of what is trained, or of one byte per number of at most four.
            peak += {"adamw": 2 * self.gradients, "adamw-8bit": self.gradients // 2}.get(strategy.optimizer, 0)
        return peak if swapped else max(peak, self.load_peak)

    def passes_peak(self, strategy: Strategy) -> int:
        """The most of forward and backward."""
        kept_otherwise = {"offload": self.offloaded_peak, "fp8": self.rounded_peak}
        return kept_otherwise.get(strategy.gradient_checkpointing, self.step_peak)

    def _most_swapped_out(self, blocks: int) -> int:
        """What so many swapped blocks or fewer take off the GPU, their ring counted."""
        most = gone = largest = 0
        for count in range(1, blocks + 1):
            gone += self.frozen_blocks[-count]
            largest = max(largest, self.frozen[-count])
            most = max(most, gone - min(SWAP_RING_BUFFERS, count) * largest)
        return most

    def host_bytes(self, processes: int, swapped: int, copies: int) -> int:
        """Host RAM of a node, bytes, for so many swapped blocks in so many ``copies``, and for the checkpoints of so
        many ``processes`` that offload them."""
        return processes * self.inputs + (copies * sum(self.frozen[-swapped:]) if swapped else 0)


class Backward(NamedTuple):
    """Bytes of a stretch of one block's backward: its peak, and its inputs."""

    peak: int
    inputs: int


def walked(tape: Tape, grid: Mapping[str, int], width: int | None, bare: bool = False) -> Walked:
    """Walks through a recorded step at a shape and keeps the levels of allocated bytes that bounds are made of.
    ``grid``: values of the tape's atoms. ``width``: numbers of a token in what blocks hand on, where that is known.
    ``bare``: as if weights and gradients took nothing."""
    walk = TapeWalk(tape, grid, bare)
    load, step = order_of(tape, "load"), order_of(tape, "step")
    loading = walk.levels(load, 0)
    stepping = walk.levels(step, loading.end)
    loaded = {block: walk.allocated_by(load.templates[at]).weights for block, at in load.last_template.items()}
    gradients = sum(count * walk.allocated_by(step.templates[at]).gradients for at, count in step.counts.items())
    forward = [block for block in step.forward if block in loaded]
    backward = [
        [Backward(stepping.peaks[at], walk.change_by(step.template_of(at)).inputs) for at in places]
        for places in step.backward.values()
    ]
    frozen: dict[int, tuple[int, int]] = {}
    for weights in {id(loaded[block]): loaded[block] for block in forward}.values():
        sizes = [nbytes for run, leaf, nbytes in weights if (run, leaf) not in walk.trained]
        frozen[id(weights)] = sum(sizes), sum(map(whole_blocks, sizes))
    by_block = [frozen[id(loaded[block])] for block in forward]
    inputs = [sum(part.inputs for part in parts) for parts in backward]
    number = _number_bytes(inputs, grid, width)
    offloaded = rounded = 0
    for at, parts in enumerate(backward):
        peak = max(part.peak for part in parts) - inputs[at]  # its own goes once it is recomputed
        offloaded = max(offloaded, peak - sum(inputs[at + 2 :]))
        rounded = max(rounded, peak - sum(nbytes - nbytes // number for nbytes in inputs[at + 1 :]))
    return Walked(
        max(loading.peaks, default=0),
        max(stepping.peaks, default=0),
        offloaded,
        rounded,
        sum(inputs),
        gradients,
        tuple(nbytes for nbytes, _ in by_block),
        tuple(nbytes for _, nbytes in by_block),
    )


def _number_bytes(inputs: Sequence[int], grid: Mapping[str, int], width: int | None) -> int:
    """The most bytes of a number in what blocks hand on, 2 or 4: one has the clip's tokens, or more of them."""
    numbers = math.prod(grid[atom] for atom in "BFHW") * (width or 0)
    return HALF if max(inputs, default=0) < FULL * numbers else FULL


def least_sizes(program: Program, grid: Mapping[str, int], bare: bool) -> list[int]:
    """The bytes of every buffer that count in a walk: nothing for workspaces of attention's kernels, nor for a mask
    beside its padded copy or such a copy of a mask of numbers. ``bare``: nothing for weights and gradients either."""
    sizes = program.bytes_of(grid)
    for buffer in program.kernel:
        sizes[buffer] = 0
    operators = list(program.op)
    for mask, copy in padded_masks(operators):
        sizes[mask], sizes[copy] = 0, sizes[mask]
    for copy in copies_of_masks_of_numbers(operators):
        sizes[copy] = 0
    for kind in ("weight", "gradient") if bare else ():
        for buffer in program.named.get(kind, {}).values():
            sizes[buffer] = 0
    return sizes
