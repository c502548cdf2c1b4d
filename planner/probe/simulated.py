"""A simulated machine: replays a plan's recordings on hardware whose true properties the estimate does not know.

It is used to test searches, and to demonstrate them without a GPU. It shares with the estimate only the recordings and
where a strategy puts things (`planner.layout.pipeline`); its true properties (`planner.probe.simulated_truth`) are
drawn from a seed. Its rows say nothing about any real card.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from planner.allocator.caching import Replayed
from planner.allocator.implementation import CachingAllocator
from planner.catalog import card_lookup
from planner.catalog.card_profiles import GpuProfile
from planner.catalog.plan_id import row_id
from planner.catalog.shapes import grids
from planner.estimate.estimate import Layout
from planner.evidence.measurement import ProbeRow
from planner.hardware.memory_trace import POINTS, MemoryTrace, PhaseTrace
from planner.layout import recordings
from planner.layout.phases import encoding_runs
from planner.layout.pipeline import lay_out
from planner.layout.run import Facts, Run
from planner.layout.sharding.collectives import communicators
from planner.probe.simulated_truth import Hidden, host_bytes, true_seconds
from planner.spec.configuration import Configuration
from planner.spec.plan import Environment, Measured, Outcome, PhaseName, Plan
from planner.tape.program import Stage
from planner.units import MIB

NOISE = 0.01
"""Relative noise between runs of a plan: in its seconds (standard deviation), and in available memory (maximum)."""
CRASH = 0.02
"""Share of probes that crash at random."""

START_SECONDS = 20.0
"""Imports, building the model, and the first step's extra work, before the steady steps."""
STEADY = ("train", "optimizer")


@dataclass
class SimulatedRunner:
    """Measures plans instantly on the simulated machine of a seed. A result depends only on the seed, the plan and how
    often the plan was measured before, so that searches are reproducible."""

    seed: int = 0
    facts: Callable[[Configuration], Facts] = recordings.load_facts
    layout: Layout = lay_out
    crash: float = CRASH
    asked: dict[str, int] = field(default_factory=dict)
    """row id -> how often the plan was run"""
    played: dict[str, _Played] = field(default_factory=dict)
    """row id -> the replay, for plans that ran without retries"""

    @property
    def name(self) -> str:
        """`simulate`: the runner's name in its rows."""
        return "simulate"

    def run(self, plan: Plan, *, steps: int, time_limit: float, encode: bool = True) -> ProbeRow:
        """Replays the plan, including the encoding before it. Raises a VplanError for a plan without recordings."""
        plan = Plan.under(plan.configuration, plan.trainer)
        name = row_id(plan)
        self.asked[name] = self.asked.get(name, 0) + 1
        chance = random.Random(f"{self.seed} {name} {self.asked[name]}")
        gpu = card_lookup.parse_gpus(plan.machine.gpu)[1]
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
            strategy=plan.strategy,
            machine=plan.machine,
            measured=measured,
            env=environment(gpu, self.seed, f"vplan tune --runner simulate --seed {self.seed}"),
            runner=self.name,
            requested_bytes=requested,
            details={"trace": played.trace(measured).to_json()} if measured.outcome == "ok" else {},
        )

    def runs(self, plan: Plan) -> list[Run]:
        """The runs of a plan, one per shape of its job."""
        configuration = plan.configuration
        facts = self.facts(configuration)
        return [self.layout(configuration, facts, grid, plan.trainer) for grid in grids(facts.model, plan.job)]


class _Played:
    """A plan on a simulated machine."""

    def __init__(self, runs: list[Run], hidden: Hidden) -> None:
        run = runs[0]
        self.runs = runs
        self.hidden = hidden
        self.step_seconds = true_seconds(runs, hidden)
        self.host_bytes = max(host_bytes(each, hidden) for each in runs)
        nccl_bytes = 640 * MIB * communicators(run)
        self.outside_bytes = hidden.context_bytes + hidden.slack_bytes + run.device.outside_bytes + nccl_bytes
        self.room_bytes = run.facts.gpu.allocatable_bytes - run.machine.reserve
        self.host_ram = run.machine.host_ram
        self.calm: tuple[tuple[PhaseName, Replayed], ...] = ()
        """replays without retries, if there were any such; valid whenever as much is available as they reserved"""
        self.stretches: dict[str, list[Replayed]] = {}
        """phase of a steady step -> its segments in order"""

    def measured(self, seconds: float, slack: int) -> tuple[Measured, int | None]:
        """What a probe would measure, and the size of a failed allocation. `slack`: bytes less than usual (noise)."""
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
        if outcome == "ok" and steady:  # it had to empty its cache in steady steps: at the limit
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
        """The known replay if it is valid for this much memory; else empty."""
        enough = all(replayed.reserved_peak_bytes <= room for _, replayed in self.calm)
        return self.calm if enough else ()

    def _replayed(self, room: int) -> Iterator[tuple[PhaseName, Replayed]]:
        """Replays every stage in order on one allocator; encoding before training gets allocators of its own."""
        first = self.runs[0]
        expandable = first.strategy.expandable_segments
        for run in self.runs:
            for encoding in encoding_runs(run):
                assert encoding.phases.encode is not None
                alone = CachingAllocator(expandable_segments=expandable, capacity_bytes=room)
                yield "encode", alone.run(encoding.phases.encode.ops, self._sizes(encoding))
        allocator = CachingAllocator(expandable_segments=expandable, capacity_bytes=room)
        for run in self.runs:
            sizes = self._sizes(run)
            for phase, stage in run.stages:
                if run is not first and phase not in ("train", "optimizer"):
                    continue
                around = phase == "encode" and run.empty_cache.around_encode
                if around:
                    allocator.empty_cache()
                yield phase, self._in_stretches(phase, stage, allocator, sizes, run.streams)
                if around or run.empties_cache_after(phase, stage, validates=True):
                    allocator.empty_cache()

    def _in_stretches(
        self,
        phase: PhaseName,
        stage: Stage,
        allocator: CachingAllocator,
        sizes: Sequence[int],
        streams: Sequence[int] | None,
    ) -> Replayed:
        """Replays a stage. Phases of a steady step, which a probe traces, are split into segments with a peak each."""
        ops = stage.ops
        if phase not in STEADY or not ops:
            return allocator.run(ops, sizes, streams)
        length = -(-len(ops) // POINTS)
        played = self.stretches[phase] = []
        for first in range(0, len(ops), length):
            played.append(allocator.run(ops[first : first + length], sizes, streams))
            if played[-1].oom_at is not None:
                break
        return played[-1]._replace(
            allocated_peak_bytes=max(part.allocated_peak_bytes for part in played),
            reserved_peak_bytes=max(part.reserved_peak_bytes for part in played),
            retries=sum(part.retries for part in played),
        )

    def trace(self, seen: Measured) -> MemoryTrace:
        """The memory trace of a plan that ran, as NVML and the allocator would have reported it."""
        assert seen.device_bytes is not None and seen.reserved_bytes is not None and seen.step_seconds is not None
        outside = seen.device_bytes - seen.reserved_bytes
        phases = {}
        for phase, played in self.stretches.items():
            allocated = [part.allocated_peak_bytes // MIB for part in played]
            phases[phase] = PhaseTrace(
                seconds=seen.step_seconds if phase == "train" else 0.0,
                device_mib=tuple((part.reserved_peak_bytes + outside) // MIB for part in played),
                allocated_mib=(allocated[0], max(allocated), allocated[-1]),
            )
        return MemoryTrace(phases=phases)

    def _sizes(self, run: Run) -> list[int]:
        terms = self.hidden.memory
        return [int(size * terms[category]) for size, category in zip(run.sizes, run.program.category, strict=True)]


def environment(gpu: GpuProfile, seed: int, command: str) -> Environment:
    """The environment of a simulated row. Its time is fixed, so that rows are reproducible."""
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
