"""A quick estimate of a strategy: allocated peak, seconds and host RAM without the allocator's replay.

The replay (`planner.estimate.estimate`) says what is reserved. A search makes hundreds of quick estimates first, and
they are exact but for fragmentation: what is allocated is a lower bound of what is reserved.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple

from planner.allocator.implementation import held
from planner.catalog.shapes import grid, grids
from planner.errors import NotEstimatedError
from planner.estimate import host_ram
from planner.estimate.estimate import outside_bytes
from planner.estimate.roofline import step_seconds
from planner.estimate.shared_ram import copies_of_swapped_blocks
from planner.estimate.stages import replay_encoding
from planner.estimate.traffic import traffic
from planner.estimate.work import StepWork, attention_of, step_work
from planner.layout.phases import decoding_alone, encodings
from planner.layout.run import Facts, Run
from planner.layout.single_gpu import SWAP_RING_BUFFERS
from planner.layout.unpriced import refuse_unpriced, refuse_untaken
from planner.search import lower_bounds
from planner.search.lower_bounds import keeps_all
from planner.search.run_cache import RunCache, TapeSizes
from planner.spec.configuration import Configuration
from planner.spec.job import SPLIT, Bucket, Job
from planner.spec.rules import ResolvedStrategy
from planner.tape.program import Stage

FactsGetter = Callable[[Configuration], Facts]
"""Gives what is known about a question, or raises a VplanError when there is no recording for it."""


PastOutcome = Literal["ran", "ran out"] | None
"""Of runs of one plan, where some were measured: it had memory enough, or ran out."""


RUNS_KEPT = 8
"""Laid out for host RAM, with all their buffers: a search asks about one strategy's swapped blocks in a row."""


class QuickEstimate(NamedTuple):
    """What a strategy needs at the worst of the job's shapes, from its tape without a replay: bytes and seconds."""

    job: Job
    strategy: ResolvedStrategy
    allocated_bytes: int
    device_bytes: int
    """A lower bound: as if nothing were lost to fragmentation."""

    host_ram_bytes: int
    step_seconds: float
    in_optimizer: bool
    """Whether the peak is where the optimizer's own step decides it."""

    states_bytes: int
    """What the optimizer's states take of it."""

    outcome: PastOutcome = None
    """What this very plan did where it was tried."""


class Screen:
    """Makes quick estimates, and keeps what they share: tapes laid out at full depth, sizes at a shape, work."""

    def __init__(self, facts: FactsGetter, trainer: str = "vplan", run_cache: RunCache | None = None) -> None:
        """``run_cache``: of another one, whose facts have the same recordings."""
        self._find = facts
        self.trainer = trainer
        self.run_cache = run_cache or RunCache()
        self._facts: dict[Configuration, Facts | NotEstimatedError] = {}
        self._floors: dict[tuple[object, ...], lower_bounds.Walked] = {}
        self._quick_estimates: dict[Configuration, QuickEstimate] = {}
        self._on_hosts: dict[tuple[object, ...], Run] = {}

    def facts(self, configuration: Configuration, recorded: Configuration | None = None) -> Facts:
        """What is known about a configuration, looked up once; a NotEstimatedError where nothing is, or not enough.

        ``recorded``: the configuration whose recordings are taken, where that is another.
        """
        if configuration not in self._facts:
            try:
                refuse_unpriced(configuration)
                self._facts[configuration] = facts = self._find(recorded or configuration)
                refuse_untaken(configuration, facts)
            except NotEstimatedError as error:
                self._facts[configuration] = error
        answer = self._facts[configuration]
        if isinstance(answer, NotEstimatedError):
            raise answer
        return answer

    def floor_seconds(self, configuration: Configuration) -> float:
        """Seconds of a step's passes with the least that has to be moved: never more than a quick estimate's, and known
        sooner."""
        facts = self.facts(configuration)
        checkpointed = self.run_cache.checkpointed(configuration, facts)
        runs = [
            Run(configuration, facts, where, checkpointed=checkpointed)
            for where in grids(facts.model, configuration.job)
        ]
        works = [
            StepWork(passes, forward=forward, attention=attention_of(run))
            for run in runs
            for passes, forward in (self.run_cache.passes(run),)
        ]
        moved = lower_bounds.least_traffic(configuration, facts.model)
        return max(step_seconds(configuration, work, facts.gpu, moved).total for work in works)

    def floor_bytes(self, configuration: Configuration, and_one_input: bool = True) -> int:
        """A lower bound of the device bytes of a strategy, with as many swapped blocks or fewer: at most its quick
        estimate, and faster to compute. ``and_one_input``: with what each checkpoint keeps; False: but for one or two.
        """
        facts = self.facts(configuration)
        job, strategy = configuration.job, configuration.strategy
        parameters = lower_bounds.parameter_bytes(configuration, facts.model)
        least, less = [parameters], 0 if and_one_input else 2 / facts.model.blocks
        splits = strategy.sharding in SPLIT and lower_bounds.keeps_activations(job, strategy)
        for walked in self._walks(configuration, bare=splits) if splits or keeps_all(job, strategy) else ():
            whole = 0 if splits else walked.device_bytes(strategy, strategy.swap_blocks)
            peak = parameters + walked.passes_peak(strategy) if splits else whole
            least.append(peak - int(less * walked.inputs))
        nbytes = max(least)
        return facts.measurements.correction.peak(nbytes, nbytes, facts.gpu.context_bytes).device_bytes

    def floor_by_swap(self, configuration: Configuration) -> Callable[[int], int]:
        """Number of swapped blocks -> a lower bound of the device bytes of the configuration with so many of them or
        fewer: all else is worked out once. 0 where nothing is known of blocks that are swapped."""
        facts, strategy, walks = self.facts(configuration), configuration.strategy, self._walked(configuration)
        correction, outside = facts.measurements.correction, facts.gpu.context_bytes

        def floor(swapped: int) -> int:
            nbytes = max((walked.device_bytes(strategy, swapped) for walked in walks), default=0)
            return correction.peak(nbytes, nbytes, outside).device_bytes

        return floor

    def first_of_kinds(self, configuration: Configuration) -> list[int]:
        """Of the blocks that can be checkpointed, in the order they run, one behind the first of each kind that has
        more."""
        return self.run_cache.first_of_kinds(self.facts(configuration))

    def parameter_bytes(self, configuration: Configuration) -> int:
        """A lower bound of device bytes from weights, gradients and optimizer states alone; needs no tape."""
        facts = self.facts(configuration)
        nbytes = lower_bounds.parameter_bytes(configuration, facts.model)
        return facts.measurements.correction.peak(nbytes, nbytes, facts.gpu.context_bytes).device_bytes

    def largest_block_bytes(self, configuration: Configuration) -> int | None:
        """The most that one swapped block more takes off the device; None where that is not known."""
        if not (walked := self._walked(configuration)):
            return None
        copies = 2 if configuration.strategy.inactive_expert == "gpu" else 1
        nbytes = copies * max(max(step.frozen_blocks, default=0) for step in walked)
        return self.facts(configuration).measurements.correction.peak(nbytes, nbytes, 0).reserved_bytes

    def swapped_bytes(self, configuration: Configuration) -> int:
        """Device bytes that the swapped blocks of the running expert would take beyond the ring of buffers that they
        come through."""
        facts = self.facts(configuration)
        run = self.run_cache.untransformed(configuration, facts, grid(facts.model, configuration.job))
        blocks = [run.total_bytes(buffers) for buffers in run.swapped_blocks.values()]
        return sum(blocks) - min(SWAP_RING_BUFFERS, len(blocks)) * max(blocks, default=0)

    def floor_ram_bytes(self, configuration: Configuration) -> int:
        """A lower bound of host RAM in bytes per node: at most `host_ram_bytes`, and faster to compute."""
        return self.floor_ram_by_swap(configuration)(configuration.strategy.swap_blocks)

    def floor_ram_by_swap(self, configuration: Configuration) -> Callable[[int], int]:
        """Number of swapped blocks -> `floor_ram_bytes` of the configuration with so many of them: all else is worked
        out once."""
        model = self.facts(configuration).model
        parameters = int(model.traits.trained_share * model.parameters)
        offloaded = host_ram.floor_bytes(configuration, parameters)
        offloads = configuration.strategy.gradient_checkpointing == "offload"
        processes = configuration.machine.gpus if offloads else 0
        copies = copies_of_swapped_blocks(configuration, self.trainer)
        steps = functools.cache(lambda: self._walked(configuration))

        def floor(swapped: int) -> int:
            if not swapped and not offloads:
                return offloaded
            return offloaded + max((walked.host_bytes(processes, swapped, copies) for walked in steps()), default=0)

        return floor

    def _walked(self, configuration: Configuration) -> list[lower_bounds.Walked]:
        """The recorded step at the job's shapes; nothing where it says too little of what will be there."""
        if not lower_bounds.is_walked(configuration.job, configuration.strategy):
            return []
        return self._walks(configuration)

    def _walks(self, configuration: Configuration, bare: bool = False) -> list[lower_bounds.Walked]:
        """The recorded step at the job's shapes, whatever becomes of it; ``bare``: as if weights and gradients took
        nothing."""
        if self.trainer != "vplan":  # they store some weights otherwise
            return []
        facts, steps = self.facts(configuration), []
        count = configuration.strategy.checkpointed_blocks if facts.checkpointed else None
        for where in grids(facts.model, configuration.job):
            key = (id(facts.step), id(facts.checkpointed), count, bare, *where.values())
            if key not in self._floors:
                if count is None:
                    self._floors[key] = lower_bounds.walked(facts.step, where, facts.model.hidden_size, bare)
                else:
                    self._floors[key] = self.run_cache.walked_in_part(configuration, facts, where, bare)
            steps.append(self._floors[key])
        return steps

    def quick_estimate(self, configuration: Configuration) -> QuickEstimate:
        """What a resolved strategy needs at the worst of the job's shapes, without a replay; cached."""
        if configuration not in self._quick_estimates:
            shapes = [self._quick_estimate_at(configuration, shape) for shape in configuration.job.shapes]
            worst = max(shapes, key=lambda at_shape: at_shape.allocated_bytes)
            self._quick_estimates[configuration] = QuickEstimate(
                configuration.job,
                configuration.strategy,
                worst.allocated_bytes,
                worst.device_bytes,
                max(at_shape.host_ram_bytes for at_shape in shapes),
                max(at_shape.step_seconds for at_shape in shapes),
                worst.in_optimizer,
                worst.states_bytes,
                self.outcome(configuration),
            )
        return self._quick_estimates[configuration]

    def outcome(self, configuration: Configuration) -> PastOutcome:
        """How earlier runs of exactly this plan ended: "ran", "ran out", or None."""
        return self.facts(configuration).measurements.past_outcome(configuration, self.trainer)

    def host_ram_bytes(self, configuration: Configuration) -> int:
        """Host RAM in bytes per node at the worst of the job's shapes; faster than a quick estimate."""
        if configuration.strategy.context_parallel > 1:  # what waits there is divided by a layout of several GPUs
            return self.quick_estimate(configuration).host_ram_bytes
        runs = (
            self._on_host(configuration, where) for where in grids(self.facts(configuration).model, configuration.job)
        )
        return max(host_ram.ram_bytes(run, configuration.machine) for run in runs)

    def _on_host(self, configuration: Configuration, where: dict[str, int]) -> Run:
        """A run as far as host RAM is asked about: of our own trainer before any transformation. The terms of others
        pin, round or copy what waits there, and do so alike for any number of swapped blocks."""
        facts, strategy = self.facts(configuration), configuration.strategy
        if self.trainer == "vplan":
            return self.run_cache.untransformed(configuration, facts, where)
        alike, one = configuration, replace(configuration, strategy=strategy.replace(swap_blocks=1))
        stays = strategy.validation_mode != "offload"  # else what is not swapped waits there too while a VAE decodes
        if strategy.swap_blocks or (stays and (one, *where.values()) in self._on_hosts):
            alike = one
        key = (alike, *where.values())
        if key not in self._on_hosts:
            if len(self._on_hosts) == RUNS_KEPT:
                self._on_hosts.clear()
            self._on_hosts[key] = self.run_cache.lay_out_for_host(alike, facts, where, self.trainer)
        run = copy.copy(self._on_hosts[key])
        run.configuration = configuration
        return run

    def exceeds_encoding(self, configuration: Configuration, exceeds: Callable[[int], bool]) -> bool:
        """Whether what is cached before training, at the worst of the job's shapes and at the most, or the VAE alone
        as it decodes a sample of validation, takes so many device bytes that ``exceeds`` holds. What holds of some
        bytes holds of more."""
        facts, expandable = self.facts(configuration), configuration.strategy.expandable_segments
        runs = (Run(configuration, facts, where) for where in grids(facts.model, configuration.job))
        cached = [encoding for run in runs for encoding in (*encodings(run), *decoding_alone(run))]

        def device_bytes(reserved: int) -> int:
            return facts.measurements.correction.peak(
                reserved, reserved, facts.gpu.context_bytes, "encode"
            ).device_bytes

        # What is allocated is known without a replay, and no more than is reserved.
        least = max((encoding.only.peak_bytes + encoding.split_bytes for encoding in cached), default=0)
        if exceeds(device_bytes(least)):
            return True
        replays = (
            replay_encoding(encoding, expandable).reserved_peak_bytes + encoding.split_bytes for encoding in cached
        )
        return exceeds(device_bytes(max(replays, default=0)))

    def allocated_bytes(self, configuration: Configuration) -> int:
        """The peak that a quick estimate begins with, at the job's own shape: what tensors hold once loading has begun,
        without what is cached before."""
        facts = self.facts(configuration)
        where = grid(facts.model, configuration.job)
        run = self.run_cache.lay_out_for_peaks(configuration, facts, where, self.trainer)
        return allocated_peak(run, self.run_cache.sizes(configuration, facts, where))[0]

    def _quick_estimate_at(self, configuration: Configuration, shape: Bucket) -> QuickEstimate:
        facts = self.facts(configuration)
        where = grid(facts.model, configuration.job, shape)
        run = self.run_cache.lay_out_for_peaks(configuration, facts, where, self.trainer)
        allocated, in_optimizer = allocated_peak(run, self.run_cache.sizes(configuration, facts, where))
        correction, outside = facts.measurements.correction, outside_bytes(run)
        device = correction.peak(allocated, allocated, outside).device_bytes
        encoding = max((entry.only.peak_bytes for entry in encodings(run)), default=0)
        if encoding > allocated:
            allocated, in_optimizer = encoding, False
        device = max(device, correction.peak(encoding, encoding, outside, "encode").device_bytes)
        work = step_work(run, self.run_cache.passes(run))
        seconds = step_seconds(configuration, work, facts.gpu, traffic(run)).total * run.calls
        ram = host_ram.ram_bytes(run, configuration.machine)
        states = run.total_bytes(run.named("optimizer").values())
        states *= run.trained_experts
        return QuickEstimate(
            configuration.job, configuration.strategy, allocated, device, ram, seconds, in_optimizer, states
        )


def allocated_peak(run: Run, base: TapeSizes | None = None) -> tuple[int, bool]:
    """The most bytes that tensors hold at once in a whole run, and whether that is in the optimizer's step.

    ``base``: of the tapes it was laid out from, so as not to sum up again what is as it was. (Without expandable
    segments a block may keep up to 1 MiB more than was asked for, which is not counted here.)
    """
    known = base.stretches.copy() if base and not run.resized else {}
    stages = run.stages
    rises = {id(stage): _rise_and_peak(stage, run.sizes, known) for _, stage in stages}
    risen = 0
    peaks = {True: 0, False: 0}
    for _, stage in stages:
        rise, peak = rises[id(stage)]
        optimizer = stage.name.startswith("optimizer")
        peaks[optimizer] = max(peaks[optimizer], risen + peak)
        risen += rise
    return max(peaks.values()), peaks[True] > peaks[False]


def _rise_and_peak(stage: Stage, sizes: list[int], known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """What a stage adds to what is allocated, and the most it adds on the way.

    ``known``: the same as is returned, of lists of events by their ids; those of a first step come again in the later
    one.
    """
    risen = peak = 0
    for _, events in stage.stretches:
        if events:
            if id(events) not in known:
                known[id(events)] = held(events, sizes)
            rise, most = known[id(events)]
            peak = max(peak, risen + most)
            risen += rise
    return risen, peak
