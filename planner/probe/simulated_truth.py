"""The true properties of a simulated machine: memory factors, a roofline for step time, and a model of host RAM.

None of this comes from the estimate, which is judged by it (`planner.probe.simulated`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from planner.catalog.card_profiles import GpuProfile
from planner.estimate.shared_ram import copies_of_swapped_blocks
from planner.layout.checkpoints.block_inputs import block_inputs
from planner.layout.run import Run, main_piece
from planner.spec.job import SPLIT
from planner.tape.format import CATEGORIES, KINDS, OperatorWork, Tape
from planner.tape.program import Block
from planner.tape.templates import kept_template
from planner.units import GIB, MIB

MEMORY = 0.08
"""Largest relative deviation of a category's buffer sizes from the recorded ones."""
SPEED = 0.15
"""Largest relative deviation of the speed of a class of operators."""
REACHED = {"matmul": 0.75, "attention": 0.55, "convolution": 0.6, "pointwise": 0.8}
"""Share of the data sheet's rate (memory bandwidth for pointwise) around which a machine's own is drawn."""
LAUNCH_SECONDS = 40e-6
HOST_STEP_SECONDS = 0.3e-9
"""CPU time of the optimizer step, per parameter."""
NOT_HIDDEN = 0.05
"""Share of the shorter of kernel and transfer time that does not overlap with the other."""
PROCESS_BYTES = 3 * GIB
LINK_BETWEEN_GPUS = 0.6
"""Share of the rate of NVLink, or of the host link if that is faster, at which a GPU sends."""


@dataclass(frozen=True)
class Hidden:
    """The true behaviour of a simulated machine, unknown to estimates: sizes and rates drawn from a seed."""

    context_bytes: int
    slack_bytes: int
    """memory of the card that cannot be allocated"""
    memory: Mapping[str, float]
    """category -> true buffer size / recorded size"""
    reached: Mapping[str, float]
    """class of operator -> share of the data sheet's rate; `link`, `host`, `launch`: factor on their usual speed"""

    @classmethod
    def drawn(cls, gpu: GpuProfile, seed: int) -> Hidden:
        """Draws a machine around a card's figures; the same seed gives the same machine."""
        chance = random.Random(f"machine {seed}")
        categories = (*CATEGORIES, "residents", "buckets", "ema")
        memory = {name: chance.uniform(1 - MEMORY, 1 + MEMORY) for name in categories}
        rates = {**REACHED, "link": 1.0, "host": 1.0, "launch": 1.0}
        reached = {name: rate * chance.uniform(1 - SPEED, 1 + SPEED) for name, rate in rates.items()}
        context = int(gpu.context_bytes * chance.uniform(0.7, 1.5))
        return cls(context, chance.randrange(256 * MIB), memory, reached)


def true_seconds(runs: list[Run], hidden: Hidden) -> float:
    """Seconds per step without noise; with several shapes, of the slowest."""
    return max(_seconds(run, hidden) for run in runs)


# ---- host RAM


def host_bytes(run: Run, hidden: Hidden) -> int:
    """Host RAM of a node in bytes: offloaded tensors, those of swapped blocks once where ranks share them, and the
    processes themselves."""
    copies = copies_of_swapped_blocks(run.configuration, run.trainer)
    swapped, each = copies * _swapped_bytes(run), run.machine.gpus * (PROCESS_BYTES + _waiting_bytes(run))
    return int((swapped + each) * hidden.memory["residents"])


def _waiting_bytes(run: Run) -> int:
    strategy, shards = run.strategy, run.configuration.shards
    nbytes = _checkpoint_bytes(run)
    if strategy.offload_optimizer != "none":
        nbytes += 16 * run.trained_parameters // (shards if strategy.sharding in SPLIT else 1)
    if strategy.offload_params != "none":
        nbytes += 2 * sum(run.elements.values()) // shards
    return nbytes


def _swapped_bytes(run: Run) -> int:
    if not run.strategy.swap_blocks:
        return 0
    return sum(map(run.total_bytes, run.swapped_blocks.values()))


def _checkpoint_bytes(run: Run) -> int:
    if run.strategy.gradient_checkpointing != "offload":
        return 0
    return sum(map(run.total_bytes, block_inputs(run).values()))


# ---- seconds


def _seconds(run: Run, hidden: Hidden) -> float:
    """Seconds per step by a roofline with a rate per class of operators; transfers overlap, except for `NOT_HIDDEN`."""
    strategy, gpu = run.strategy, run.facts.gpu
    kernels, launches = 0.0, 0.0
    for (kind, half), (flops, nbytes) in _passes(run).items():
        if kind == "kernels":
            launches += flops * LAUNCH_SECONDS / hidden.reached["launch"]
            continue
        bandwidth = gpu.bandwidth_gbs * 1e9 * hidden.reached["pointwise"]
        compute = _rate(gpu, half) * hidden.reached.get(kind, 1.0)
        kernels += max(nbytes / bandwidth, 0.0 if kind == "pointwise" else flops / compute)
    busy = max(kernels, launches) * strategy.gradient_accumulation / strategy.context_parallel
    moved = _transfer_seconds(run, hidden)
    return max(busy, moved) + NOT_HIDDEN * min(busy, moved) + _optimizer_seconds(run, hidden)


def _rate(gpu: GpuProfile, half: int) -> float:
    """FLOP/s by the data sheet; ``half``: in 16 bits."""
    return 1e12 * ((gpu.bf16_tflops or gpu.fp32_tflops) if half else gpu.fp32_tflops)


def _passes(run: Run) -> dict[tuple[str, int], tuple[float, float]]:
    """(class, whether in 16 bits) -> (FLOPs, bytes) of one forward and backward pass at the run's shape."""
    facts, blocks = run.facts, run.checkpointed
    totals: dict[tuple[str, int], tuple[float, float]] = {}
    _count(totals, facts.step, main_piece(facts.step), run.grid, lambda block: block not in blocks)
    if blocks:
        assert facts.checkpointed is not None
        _count(totals, facts.checkpointed, "step", run.grid, lambda block: block in blocks)
    return totals


def _count(
    totals: dict[tuple[str, int], tuple[float, float]],
    tape: Tape,
    piece: str,
    where: Mapping[str, int],
    chosen: Callable[[Block | None], bool],
) -> None:
    """Adds a tape's recorded work to ``totals``, for the chosen blocks; ``chosen(None)``: for what is in no block."""
    atoms = tape.values(where)
    worth: dict[int, list[tuple[tuple[str, int], float, float]]] = {}
    for section in tape.pieces[piece]:
        blocks = None if section.run is None else tape.runs[section.run]
        depth = blocks.count if blocks and section.step else 1
        for turn in range(depth):
            index = turn if section.step else section.block
            if not chosen((blocks.module_list, blocks.start + index % blocks.count) if blocks else None):
                continue
            template = section.templates[kept_template(section, turn, depth) if section.step else 0]
            if id(template) not in worth:
                worth[id(template)] = [_valued(entry, atoms) for entry in template.work]
            for key, flops, nbytes in worth[id(template)]:
                before = totals.get(key, (0.0, 0.0))
                totals[key] = before[0] + flops, before[1] + nbytes


def _valued(entry: OperatorWork, atoms: list[int]) -> tuple[tuple[str, int], float, float]:
    kind, half, flops, nbytes, exponents = entry
    factor = 1.0
    for atom, power in zip(atoms, exponents, strict=True):
        factor *= atom**power
    return (KINDS[kind], half), flops * factor, nbytes * factor


def _transfer_seconds(run: Run, hidden: Hidden) -> float:
    """Seconds of transfers over the host link and between GPUs, which overlap with the kernels."""
    strategy, machine, gpu = run.strategy, run.machine, run.facts.gpu
    host = gpu.link_gbs * 1e9 * hidden.reached["link"]
    between = LINK_BETWEEN_GPUS * max(gpu.nvlink_gbs, gpu.link_gbs) * 1e9 * hidden.reached["link"]
    turns = strategy.gradient_accumulation
    moved = turns * (2 * _swapped_bytes(run) + _checkpoint_bytes(run))
    sent = 0.0
    others = (machine.world - 1) / machine.world
    if strategy.offload_params != "none":
        moved += 4 * turns * sum(run.elements.values()) // machine.world
    if strategy.sharding in ("zero-3", "fsdp"):
        sent = 6 * turns * sum(run.elements.values()) * others
    elif machine.world > 1:
        sent = 2 * run.total_bytes(run.named("gradient").values()) * others
    if run.samples_only and strategy.group_offload != "none":
        moved += run.total_bytes(run.named("weight").values())
    return moved / host + sent / between


def _optimizer_seconds(run: Run, hidden: Hidden) -> float:
    """Seconds of the optimizer step: on the GPU bound by memory traffic, on the CPU by copies and computation."""
    gpu, strategy = run.facts.gpu, run.strategy
    share = run.configuration.shards if strategy.sharding in SPLIT else 1
    gradients = run.total_bytes(run.named("gradient").values())
    if strategy.offload_optimizer != "none":
        copied = 2 * gradients / share / (gpu.link_gbs * 1e9 * hidden.reached["link"])
        return copied + run.trained_parameters / share * HOST_STEP_SECONDS / hidden.reached["host"]
    states = run.total_bytes(run.named("optimizer").values())
    return (3 * gradients + 2 * states) / share / (gpu.bandwidth_gbs * 1e9 * hidden.reached["pointwise"])
