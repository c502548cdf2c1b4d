"""A run laid out for the replay: load, a first step, a later step, with the strategy's buffers put in.

Every strategy that changes what is where is one function on the Run, one named buffer or lifetime, one source. What
changes the stream of operators itself (checkpointing, method, precision, optimizer) is recorded, not transformed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from planner.facts import GpuProfile, ModelProfile
from planner.job import Job, Machine, Strategy
from planner.tape import Moment, Program, Stage, Tape
from planner.variants import Precision

SERVICE = Moment("", "", "", -1)
"""The moment of what a strategy adds outside the model's code."""


@dataclass(frozen=True)
class Facts:
    """What is known about a question: the model, the card, and the recordings that answer for it."""

    model: ModelProfile
    gpu: GpuProfile
    step: Tape
    optimizer: Tape


@dataclass(frozen=True)
class SavedInputs:
    """What the checkpoints of all blocks keep: buffers that only one block needs, and buffers that all of them take."""

    own: dict[tuple[str, int], list[int]]
    shared: list[int]


@dataclass
class Run:
    """The stages of a run in order, over one Program, with what the transformations need to know."""

    job: Job
    strategy: Strategy
    machine: Machine
    facts: Facts
    program: Program = field(default_factory=Program)
    load: Stage = field(default_factory=lambda: Stage("load", []))
    step: Stage = field(default_factory=lambda: Stage("step", []))
    optimizer_first: Stage = field(default_factory=lambda: Stage("optimizer_first", []))
    optimizer: Stage = field(default_factory=lambda: Stage("optimizer", []))
    sizes: list[int] = field(default_factory=list)
    """Per buffer: bytes at the run's shape."""

    empty_cache_after_load: bool = False

    accumulate: Stage | None = None
    """A further forward and backward before the optimizer steps, its gradients added to those that are there."""

    def add(self, stage: Stage, nbytes: int, category: str, name: str, *, at: int | None = None) -> int:
        """Allocates a new buffer in a stage, before its ``at``-th stretch (at the end when None).

        Returns its number.
        """
        buffer = self.program.buffer(nbytes, category, name)
        self.sizes.append(nbytes)
        position = len(stage.stretches) if at is None else at
        stage.stretches.insert(position, (SERVICE._replace(passes=name), [buffer]))
        return buffer

    def free(self, stage: Stage, buffers: Iterable[int], *, at: int | None = None) -> None:
        """Frees buffers in a stage, before its ``at``-th stretch (at the end when None)."""
        position = len(stage.stretches) if at is None else at
        stage.stretches.insert(position, (SERVICE, [~buffer for buffer in buffers]))

    def drop(self, stage: Stage, buffers: Iterable[int]) -> None:
        """Removes every event of the buffers from a stage."""
        dropped = set(buffers)
        stage.stretches = [
            (moment, [event for event in events if (event if event >= 0 else ~event) not in dropped])
            for moment, events in stage.stretches
        ]

    def named(self, category: str) -> dict[str, int]:
        """Name -> buffer of a category's named buffers."""
        return {name: buffer for (kind, name), buffer in self.program.named.items() if kind == category}

    @functools.cached_property
    def saved(self) -> SavedInputs:
        """The checkpoints' inputs: made in forward, kept, and freed in the backward of a block. Of the recorded step,
        so it must be read before a transformation moves them."""
        made: dict[int, int] = {}
        own: dict[tuple[str, int], list[int]] = {}
        shared: list[int] = []
        order = [(m.module_list, m.block) for m, _ in self.step.stretches if m.passes == "forward" and m.block >= 0]
        for position, (moment, events) in enumerate(self.step.stretches):
            block = (moment.module_list, moment.block)
            for event in events:
                if event >= 0:
                    made.pop(event, None)
                    if moment.passes == "forward":
                        made[event] = position
                elif (position_made := made.pop(~event, None)) is not None and moment.passes == "backward" and order:
                    prologue = self.step.stretches[position_made][0].block < 0
                    if moment.block >= 0:
                        (shared if block == order[0] and prologue else own.setdefault(block, [])).append(~event)
        # The first block's own input comes from the prologue too: it has the size of the others' inputs.
        for buffer in own.get(order[1], []) if len(order) > 1 else []:
            match = next((other for other in shared if self.sizes[other] == self.sizes[buffer]), None)
            if match is not None:
                shared.remove(match)
                own.setdefault(order[0], []).append(match)
        return SavedInputs(own, shared)

    @property
    def trained_parameters(self) -> int:
        """How many parameters are trained."""
        size = 4 if Precision.of(self.job, self.strategy).trained == "fp32" else 2
        return sum(self.sizes[buffer] for buffer in self.named("gradient").values()) // size

    @property
    def optimizer_scale(self) -> float:
        """Bytes of trained parameters of the full model per byte recorded: how an optimizer step's work grows."""
        sizes = [(name, self.sizes[buffer]) for name, buffer in self.named("gradient").items()]
        recorded = sum(nbytes * self.facts.step.recorded_share(name) for name, nbytes in sizes)
        return sum(nbytes for _, nbytes in sizes) / recorded

    @functools.cached_property
    def frozen_block_weights(self) -> dict[tuple[str, int], list[int]]:
        """Buffers of each block's weights that are not trained, in the order the blocks are loaded."""
        blocks: dict[tuple[str, int], list[int]] = {}
        trained = self.named("gradient")
        for name, buffer in self.named("weight").items():
            block = self.facts.step.block_of(name)
            if block is not None and name not in trained:
                blocks.setdefault(block, []).append(buffer)
        return blocks


Term = Callable[[Run], None]
"""A transformation: changes a Run in place."""
