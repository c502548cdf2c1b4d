"""A machine that is not there: plays a plan's recordings on hardware of which nobody has told the estimate the truth.

A search is proved on it, and shown where no GPU is. It shares with the estimate what was recorded and what a strategy
puts where (`planner.layout`), and nothing else: it has memory terms, a roofline and an account of host RAM of its own,
drawn from a seed. Its rows say nothing about any real card.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from planner import catalog, library
from planner.facts import GpuProfile
from planner.job import SPLIT, Job, Machine, Strategy
from planner.layout import lay_out
from planner.measurement import ProbeRow, row_id
from planner.phases import caching
from planner.plan import Environment, Measured, Outcome, PhaseName, Plan
from planner.program import Block, Stage, kept_template
from planner.replay import CachingAllocator, Replayed
from planner.rules import resolve
from planner.run import Facts, Run, main_piece
from planner.shapes import grid
from planner.tape import CATEGORIES, KINDS, Tape
from planner.units import GIB, MIB

Layout = Callable[[Job, Strategy, Machine, Facts, dict[str, int], str], Run]

MEMORY = 0.08
"""How far a category's buffers may be from what was recorded, as a share of it."""
SPEED = 0.15
"""The same of how fast a class of operators runs."""
NOISE = 0.01
"""Between two runs of one plan: of its seconds (one standard deviation), and of the memory it is given (at most)."""
CRASH = 0.02
"""Probes that end for no reason of their own."""

REACHED = {"matmul": 0.75, "attention": 0.55, "convolution": 0.6, "pointwise": 0.8}
"""Part of the data sheet's rate (of memory bandwidth for pointwise) around which a machine's own is drawn."""
LAUNCH_SECONDS = 40e-6
HOST_STEP_SECONDS = 0.3e-9
"""Per parameter that the CPU steps over."""
NOT_HIDDEN = 0.05
"""Part of the shorter of kernels and transfers that does not run beside the other."""
START_SECONDS = 20.0
"""Imports, building the model and the first step's extra work, before the steady steps."""
PROCESS_BYTES = 3 * GIB
STEADY = ("train", "optimizer")
LINK_BETWEEN_GPUS = 0.6
"""Part of NVLink's rate, or of the link to the host, that one GPU sends at."""


@dataclass(frozen=True)
class Hidden:
    """What is true of a machine."""

    context_bytes: int
    slack_bytes: int
    """what the card has and does not give"""
    memory: Mapping[str, float]
    """category -> its buffers' sizes over the recorded ones"""
    reached: Mapping[str, float]
    """class of operator -> part of the data sheet's rate; `link` and `host` of what those usually reach"""

    @classmethod
    def drawn(cls, gpu: GpuProfile, seed: int) -> Hidden:
        """The machine of a seed."""
        chance = random.Random(f"machine {seed}")
        categories = (*CATEGORIES, "residents", "buckets", "ema")
        memory = {name: chance.uniform(1 - MEMORY, 1 + MEMORY) for name in categories}
        rates = {**REACHED, "link": 1.0, "host": 1.0, "launch": 1.0}
        reached = {name: rate * chance.uniform(1 - SPEED, 1 + SPEED) for name, rate in rates.items()}
        context = int(gpu.context_bytes * chance.uniform(0.7, 1.5))
        return cls(context, chance.randrange(256 * MIB), memory, reached)


@dataclass
class SimulatedRunner:
    """Measures on the machine of a seed, in no time. What it says of a plan depends on the seed, the plan and how often
    it was asked before, so a search can be told again."""

    seed: int = 0
    facts: Callable[[Job, Strategy, Machine], Facts] = library.facts
    layout: Layout = lay_out
    crash: float = CRASH
    asked: dict[str, int] = field(default_factory=dict)
    """row id -> how often it was run"""
    played: dict[str, _Played] = field(default_factory=dict)
    """row id -> what was played, of plans that ran"""

    @property
    def name(self) -> str:
        """The word in its rows."""
        return "simulate"

    def run(self, plan: Plan, *, steps: int, time_limit: float, encode: bool = True) -> ProbeRow:
        """Plays the plan, with what is cached before it. Raises the VplanError of a plan that has no recording."""
        strategy = resolve(plan.job, plan.strategy, plan.machine)
        plan = Plan(job=plan.job, strategy=strategy, machine=plan.machine, trainer=plan.trainer)
        name = row_id(plan)
        self.asked[name] = self.asked.get(name, 0) + 1
        chance = random.Random(f"{self.seed} {name} {self.asked[name]}")
        gpu = catalog.parse_gpus(plan.machine.gpu)[1]
        played = self.played.get(name) or _Played(self.runs(plan), Hidden.drawn(gpu, self.seed))
        seconds = played.step_seconds * chance.gauss(1.0, NOISE)
        slack = int(chance.uniform(-NOISE / 2, NOISE / 2) * gpu.allocatable_bytes)
        measured, requested = played.measured(seconds, slack)
        if played.calm:
            self.played[name] = played
        if measured.outcome == "ok" and START_SECONDS + (steps + 2) * seconds > time_limit:
            measured = Measured(outcome="timeout", phase="train")
        if chance.random() < self.crash:
            measured, requested = Measured(outcome="crash", phase="first_step"), None
        return ProbeRow(
            id=name,
            job=plan.job,
            strategy=strategy,
            machine=plan.machine,
            measured=measured,
            env=environment(gpu, self.seed, f"vplan tune --runner simulate --seed {self.seed}"),
            runner=self.name,
            requested_bytes=requested,
        )

    def runs(self, plan: Plan) -> list[Run]:
        """The plan laid out, once for each shape of its job."""
        facts = self.facts(plan.job, plan.strategy, plan.machine)
        return [
            self.layout(plan.job, plan.strategy, plan.machine, facts, grid(facts.model, plan.job, shape), plan.trainer)
            for shape in plan.job.shapes
        ]


def true_seconds(runs: list[Run], hidden: Hidden) -> float:
    """Seconds of one step, the slowest of several shapes, without noise."""
    return max(_seconds(run, hidden) for run in runs)


class _Played:
    """A plan on a machine."""

    def __init__(self, runs: list[Run], hidden: Hidden) -> None:
        run = runs[0]
        self.runs = runs
        self.hidden = hidden
        self.step_seconds = true_seconds(runs, hidden)
        self.host_bytes = max(_host_bytes(each, hidden) for each in runs)
        self.outside_bytes = hidden.context_bytes + hidden.slack_bytes + run.outside_bytes + _communicators(run)
        self.room_bytes = run.facts.gpu.allocatable_bytes - run.machine.reserve
        self.host_ram = run.machine.host_ram
        self.calm: tuple[tuple[PhaseName, Replayed], ...] = ()
        """what the allocator did where it never ran short: the same wherever it has as much as it reserved then"""

    def measured(self, seconds: float, slack: int) -> tuple[Measured, int | None]:
        """What a probe would see, and the bytes asked for in vain; `slack` more is missing than usually."""
        host = self.host_bytes
        if self.host_ram is not None and host > self.host_ram:
            return Measured(outcome="host-oom", phase="load", host_bytes=self.host_ram), None
        outside = self.outside_bytes + slack
        room = self.room_bytes - outside
        allocated = reserved = retries = steady = 0
        phase: PhaseName = "load"
        outcome: Outcome = "ok"
        requested = None
        played: list[tuple[PhaseName, Replayed]] = []
        for name, replayed in self._known(room) or self._replayed(room):
            played.append((name, replayed))
            if replayed.allocated_peak_bytes > allocated:
                allocated, phase = replayed.allocated_peak_bytes, name
            reserved = max(reserved, replayed.reserved_peak_bytes)
            retries += replayed.retries
            steady += replayed.retries if name in STEADY else 0
            if replayed.oom_at is not None:
                outcome, phase, requested = "oom", name, replayed.requested_bytes
                break
        if outcome == "ok" and not retries:
            self.calm = tuple(played)
        if outcome == "ok" and steady:  # it had to empty its cache in steps that bring nothing new: at the edge
            outcome, phase = "oom", "train"
        seen = Measured(
            outcome=outcome,
            phase=phase,
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            device_bytes=reserved + outside,
            host_bytes=host,
            step_seconds=seconds if outcome == "ok" else None,
            retries=retries,
        )
        return seen, requested

    def _known(self, room: int) -> Sequence[tuple[PhaseName, Replayed]]:
        """What the allocator does with so much; nothing where that is to be played."""
        enough = all(replayed.reserved_peak_bytes <= room for _, replayed in self.calm)
        return self.calm if enough else ()

    def _replayed(self, room: int) -> Iterator[tuple[PhaseName, Replayed]]:
        """Every stage in order on one allocator; what is cached before, on allocators of its own."""
        first = self.runs[0]
        expandable = first.strategy.expandable_segments
        for run in self.runs:
            for encoding in caching(run):
                assert encoding.encode is not None
                alone = CachingAllocator(expandable_segments=expandable, capacity_bytes=room)
                yield "encode", alone.run(encoding.encode.ops, self._sizes(encoding))
        allocator = CachingAllocator(expandable_segments=expandable, capacity_bytes=room)
        for run in self.runs:
            sizes = self._sizes(run)
            for phase, stage in run.stages:
                if run is not first and phase not in ("train", "optimizer"):
                    continue
                around = phase == "encode" and run.empty_cache_around_encode
                if around:
                    allocator.empty_cache()
                yield phase, allocator.run(stage.ops, sizes)
                if around or _emptied_behind(run, phase, stage):
                    allocator.empty_cache()

    def _sizes(self, run: Run) -> list[int]:
        terms = self.hidden.memory
        return [int(size * terms[category]) for size, category in zip(run.sizes, run.program.category, strict=True)]


def _emptied_behind(run: Run, phase: PhaseName, stage: Stage) -> bool:
    """Whether the trainer empties the allocator's cache behind a stage."""
    before_validation = stage is run.optimizer and bool(run.validation) and run.empty_cache_before_validation
    loaded = phase == "load" and run.empty_cache_after_load
    return before_validation or loaded or any(stage is entry for entry in run.emptied_after)


def _communicators(run: Run) -> int:
    return 640 * MIB if run.machine.world > 1 and not run.samples else 0


# ---- host RAM


def _host_bytes(run: Run, hidden: Hidden) -> int:
    """RAM of a node: what waits there for its turn, and the processes."""
    return int(run.machine.gpus * (PROCESS_BYTES + _waiting_bytes(run)) * hidden.memory["residents"])


def _waiting_bytes(run: Run) -> int:
    strategy, world = run.strategy, run.machine.world
    nbytes = _swapped_bytes(run) + _checkpoint_bytes(run)
    if strategy.offload_optimizer != "none":
        nbytes += 16 * run.trained_parameters // (world if strategy.sharding in SPLIT else 1)
    if strategy.offload_params != "none":
        nbytes += 2 * sum(run.elements.values()) // world
    return nbytes


def _swapped_bytes(run: Run) -> int:
    if not run.strategy.swap_blocks:
        return 0
    return sum(run.sizes[buffer] for buffers in run.swapped_blocks.values() for buffer in buffers)


def _checkpoint_bytes(run: Run) -> int:
    if run.strategy.gradient_checkpointing != "offload":
        return 0
    return sum(run.sizes[buffer] for kept in run.block_inputs.values() for buffer in kept)


# ---- seconds


def _seconds(run: Run, hidden: Hidden) -> float:
    """A roofline: every class of operators at its own rate; copies beside it, not quite hidden."""
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
    """FLOP/s of the data sheet."""
    return 1e12 * ((gpu.bf16_tflops or gpu.fp32_tflops) if half else gpu.fp32_tflops)


def _passes(run: Run) -> dict[tuple[str, int], tuple[float, float]]:
    """(class, whether in 16 bits) -> FLOPs and bytes of one forward and backward at the run's shape."""
    facts, blocks = run.facts, run.checkpointed
    found: dict[tuple[str, int], tuple[float, float]] = {}
    _count(found, facts.step, main_piece(facts.step), run.grid, lambda block: block not in blocks)
    if blocks:
        assert facts.checkpointed is not None
        _count(found, facts.checkpointed, "step", run.grid, lambda block: block in blocks)
    return found


def _count(
    found: dict[tuple[str, int], tuple[float, float]],
    tape: Tape,
    piece: str,
    where: Mapping[str, int],
    chosen: Callable[[Block | None], bool],
) -> None:
    """Adds the work of the chosen blocks, and of what is outside them (None), that a tape counted."""
    atoms = tape.values(where)
    worth: dict[int, list[tuple[tuple[str, int], float, float]]] = {}
    for item in tape.pieces[piece]:
        blocks = None if item["run"] is None else tape.runs[item["run"]]
        depth = blocks.count if blocks and item.get("step") else 1
        for turn in range(depth):
            index = turn if item.get("step") else item.get("block", -1)
            if not chosen((blocks.module_list, blocks.start + index % blocks.count) if blocks else None):
                continue
            template = item["templates"][kept_template(item, turn, depth) if item.get("step") else 0]
            if id(template) not in worth:
                worth[id(template)] = [_valued(entry, atoms) for entry in template["work"]]
            for key, flops, nbytes in worth[id(template)]:
                before = found.get(key, (0.0, 0.0))
                found[key] = before[0] + flops, before[1] + nbytes


def _valued(entry: list[int], atoms: list[int]) -> tuple[tuple[str, int], float, float]:
    kind, half, flops, nbytes, *exponents = entry
    factor = 1.0
    for atom, power in zip(atoms, exponents, strict=True):
        factor *= atom**power
    return (KINDS[kind], half), flops * factor, nbytes * factor


def _transfer_seconds(run: Run, hidden: Hidden) -> float:
    """Seconds that the links are busy beside the kernels."""
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
        sent = 2 * sum(run.sizes[buffer] for buffer in run.named("gradient").values()) * others
    if run.samples and strategy.group_offload != "none":
        moved += sum(run.sizes[buffer] for buffer in run.named("weight").values())
    return moved / host + sent / between


def _optimizer_seconds(run: Run, hidden: Hidden) -> float:
    """Seconds of the optimizer's step: on the GPU it reads and writes all it steps over, on the CPU it computes."""
    gpu, strategy = run.facts.gpu, run.strategy
    share = run.machine.world if strategy.sharding in SPLIT else 1
    gradients = sum(run.sizes[buffer] for buffer in run.named("gradient").values())
    if strategy.offload_optimizer != "none":
        copied = 2 * gradients / share / (gpu.link_gbs * 1e9 * hidden.reached["link"])
        return copied + run.trained_parameters / share * HOST_STEP_SECONDS / hidden.reached["host"]
    states = sum(run.sizes[buffer] for buffer in run.named("optimizer").values())
    return (3 * gradients + 2 * states) / share / (gpu.bandwidth_gbs * 1e9 * hidden.reached["pointwise"])


def environment(gpu: GpuProfile, seed: int, command: str) -> Environment:
    """Where a row comes from: no time of day, so that the same question has the same answer."""
    digest = hashlib.sha256(f"{gpu.name} {seed}".encode()).hexdigest()[:8]
    return Environment(
        gpu=f"simulated {gpu.title}",
        driver=f"simulated {digest}",
        torch="simulated",
        diffusers="simulated",
        attention_kernel="simulated",
        command=command,
        time="1970-01-01T00:00:00+00:00",
    )
