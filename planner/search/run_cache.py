"""What the runs of one search share: recordings laid out at full depth, their sizes at a shape, and their work.

Hundreds of strategies start from a dozen recordings, so each is unfolded once and copied for every strategy.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner.allocator.implementation import held
from planner.errors import NotRecordedError
from planner.estimate.work import Passes, passes_work
from planner.layout.pipeline import transforms
from planner.layout.recorded_run import Unfolded, add_optimizer, recorded_step, step_key, unfolded, unfolded_key
from planner.layout.run import Facts, Run
from planner.spec.configuration import Configuration


class RunCache:
    """Recorded runs by their recordings, their sizes and work by shape besides."""

    def __init__(self) -> None:
        self._unfolded: dict[tuple[object, ...], Unfolded | NotRecordedError] = {}
        self._steps: dict[tuple[object, ...], Run] = {}
        self._runs: dict[tuple[object, ...], Run] = {}
        self._sizes: dict[tuple[object, ...], TapeSizes] = {}
        self._held: dict[tuple[object, ...], dict[int, tuple[int, int]]] = {}
        """recordings and shape -> what `TapeSizes.stretches` has of them, whatever the kernel and the optimizer"""
        self._work: dict[tuple[object, ...], Passes] = {}

    def lay_out(self, configuration: Configuration, facts: Facts, grid: dict[str, int], trainer: str) -> Run:
        """`planner.layout.pipeline.lay_out`, starting from a copy of tapes that were unfolded before."""
        run = self.untransformed(configuration, facts, grid).untransformed_copy()
        run.trainer = trainer
        for transform in transforms(trainer):
            transform(run)
        return run

    def untransformed(self, configuration: Configuration, facts: Facts, grid: dict[str, int]) -> Run:
        """The run at a shape, before any transformation. Not to be changed."""
        sizes = self.sizes(configuration, facts, grid)
        base = sizes.run
        return replace(base, base=base, configuration=configuration, facts=facts, sizes=sizes.nbytes, grid=grid)

    def sizes(self, configuration: Configuration, facts: Facts, grid: dict[str, int]) -> TapeSizes:
        """What every buffer and stretch of a recorded run takes at a shape."""
        key = step_key(configuration, facts)
        shape = (*key, id(facts.optimizer), *grid.values())
        if shape not in self._sizes:
            known = self._held.setdefault((*unfolded_key(facts), *grid.values()), {})
            self._sizes[shape] = TapeSizes.of(self._run(key, configuration, facts), grid, known)
        return self._sizes[shape]

    def passes(self, run: Run) -> Passes:
        """The work of a run's forward and backward."""
        key = (id(run.facts.step), run.checkpointed, *run.grid.values())
        if key not in self._work:
            self._work[key] = passes_work(run)
        return self._work[key]

    def _run(self, step_of: tuple[object, ...], configuration: Configuration, facts: Facts) -> Run:
        key = *step_of, id(facts.optimizer)
        if key not in self._runs:
            step = self._step(step_of, configuration, facts)
            own = replace(step.configuration, strategy=configuration.strategy)
            program, copy = step.program.copy(), step.step.copy()
            run = replace(step, base=step, configuration=own, facts=facts, program=program, step=copy)
            add_optimizer(run)
            self._runs[key] = run
        return self._runs[key]

    def _step(self, key: tuple[object, ...], configuration: Configuration, facts: Facts) -> Run:
        if key not in self._steps:
            self._steps[key] = recorded_step(configuration, facts, self._recordings(facts))
        return self._steps[key]

    def _recordings(self, facts: Facts) -> Unfolded:
        key = unfolded_key(facts)
        if key not in self._unfolded:
            try:
                self._unfolded[key] = unfolded(facts)
            except NotRecordedError as error:  # two recordings that cannot be put together, of which many ask
                self._unfolded[key] = error
        found = self._unfolded[key]
        if isinstance(found, NotRecordedError):
            raise found
        return found


@dataclass
class TapeSizes:
    """The sizes of all buffers of a recorded run at one shape."""

    run: Run
    nbytes: list[int]
    """by buffer"""

    held: dict[int, tuple[int, int]]
    """what is known of `stretches`, and of other runs with the same buffers at the same shape"""

    @classmethod
    def of(cls, run: Run, grid: Mapping[str, int], held: dict[int, tuple[int, int]]) -> TapeSizes:
        """The sizes at the shape of a grid. ``held``: as of others."""
        return cls(run, run.program.bytes_of(grid), held)

    @functools.cached_property
    def stretches(self) -> dict[int, tuple[int, int]]:
        """id of a stretch's list of events -> (change, peak) in allocated bytes.

        Computed on first use, because asking for host RAM alone, at many shapes, does not need it.
        """
        run = self.run
        for stage in (run.load, run.step, run.optimizer_first, run.optimizer):
            for _, events in stage.stretches:
                if events and id(events) not in self.held:
                    self.held[id(events)] = held(events, self.nbytes)
        return self.held
