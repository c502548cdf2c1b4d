"""What the runs of one search share: recordings laid out at full depth, their sizes at a shape, and their work.

Hundreds of strategies start from a dozen recordings, so each is unfolded once and copied for every strategy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from planner.allocator.implementation import held
from planner.errors import NotRecordedError
from planner.estimate.work import Passes, passes_work
from planner.layout.pipeline import has_plain_validation, host_transforms, transforms
from planner.layout.recorded_run import Unfolded, add_optimizer, recorded_step, step_key, unfolded, unfolded_key
from planner.layout.run import Facts, Run, Transform
from planner.search.lower_bounds import Walked, least_sizes
from planner.spec.configuration import Configuration
from planner.tape.program import Block


class RunCache:
    """Recorded runs by their recordings, their sizes and work by shape besides."""

    def __init__(self) -> None:
        self._unfolded: dict[tuple[object, ...], Unfolded | NotRecordedError] = {}
        self._steps: dict[tuple[object, ...], Run] = {}
        self._runs: dict[tuple[object, ...], Run] = {}
        self._step_sizes: dict[tuple[object, ...], list[int]] = {}
        """recordings of the step and shape -> bytes by buffer, without the optimizer's"""
        self._sizes: dict[tuple[object, ...], TapeSizes] = {}
        self._held: dict[tuple[object, ...], dict[int, tuple[int, int]]] = {}
        """recordings and shape -> what `TapeSizes.stretches` has of them, whatever the kernel and the optimizer"""
        self._least: dict[tuple[object, ...], tuple[list[int], dict[int, tuple[int, int]]]] = {}
        """the same, at the least: (sizes by buffer, id of a list of events -> (change, peak))"""
        self._work: dict[tuple[object, ...], Passes] = {}

    def lay_out(self, configuration: Configuration, facts: Facts, grid: dict[str, int], trainer: str) -> Run:
        """`planner.layout.pipeline.lay_out`, starting from a copy of tapes that were unfolded before."""
        return self._transformed(configuration, facts, grid, trainer, transforms(trainer))

    def lay_out_for_peaks(self, configuration: Configuration, facts: Facts, grid: dict[str, int], trainer: str) -> Run:
        """The same as far as its stages' allocated peaks, host RAM and seconds depend on it."""
        peaks_only = has_plain_validation(configuration, facts, trainer)
        return self._transformed(configuration, facts, grid, trainer, transforms(trainer), peaks_only)

    def lay_out_for_host(self, configuration: Configuration, facts: Facts, grid: dict[str, int], trainer: str) -> Run:
        """The same as far as host RAM depends on it."""
        peaks_only = has_plain_validation(configuration, facts, trainer)
        return self._transformed(configuration, facts, grid, trainer, host_transforms(trainer), peaks_only)

    def _transformed(
        self,
        configuration: Configuration,
        facts: Facts,
        grid: dict[str, int],
        trainer: str,
        by: Iterable[Transform],
        peaks_only: bool = False,
    ) -> Run:
        run = self.untransformed(configuration, facts.trained_by(trainer), grid).untransformed_copy()
        run.trainer, run.peaks_only = trainer, peaks_only
        for transform in by:
            transform(run)
        run.sums = {}  # nothing changes it from here on
        return run

    def untransformed(self, configuration: Configuration, facts: Facts, grid: dict[str, int]) -> Run:
        """The run at a shape, before any transformation. Not to be changed."""
        sizes = self.sizes(configuration, facts, grid)
        base = sizes.run
        run = replace(base, base=base, configuration=configuration, facts=facts, sizes=sizes.nbytes, grid=grid)
        run.sums = sizes.sums
        return run

    def sizes(self, configuration: Configuration, facts: Facts, grid: dict[str, int]) -> TapeSizes:
        """What every buffer and stretch of a recorded run takes at a shape."""
        key = step_key(configuration, facts)
        shape = (*key, id(facts.optimizer), *grid.values())
        if shape not in self._sizes:
            known = self._held.setdefault((*unfolded_key(facts), *grid.values()), {})
            run, of_step = self._run(key, configuration, facts), (*key, *grid.values())
            if of_step not in self._step_sizes:
                self._step_sizes[of_step] = self._step(key, configuration, facts).program.bytes_of(grid)
            self._sizes[shape] = TapeSizes(run, run.program.bytes_of(grid, self._step_sizes[of_step]), known)
        return self._sizes[shape]

    def checkpointed(self, configuration: Configuration, facts: Facts) -> frozenset[Block]:
        """The blocks that are checkpointed, where only some are."""
        if facts.checkpointed is None:
            return frozenset()
        both, count = self._recordings(facts).both, configuration.strategy.checkpointed_blocks
        assert both is not None and count is not None
        return frozenset(both.blocks[:count])

    def first_of_kinds(self, facts: Facts) -> list[int]:
        """Of the blocks that can be checkpointed, in the order they run, the place of the second of each kind."""
        both = self._recordings(facts).both
        assert both is not None
        lists = [module_list for module_list, _ in both.blocks]
        return [lists.index(name) + 1 for name in dict.fromkeys(lists) if lists.count(name) > 2]

    def walked_in_part(self, configuration: Configuration, facts: Facts, grid: dict[str, int], bare: bool) -> Walked:
        """What `planner.search.lower_bounds.walked` says, of a step in which only some blocks are checkpointed, as far
        as that may be asked about: nothing is swapped or offloaded then."""
        recordings, count = self._recordings(facts), configuration.strategy.checkpointed_blocks
        assert recordings.both is not None and count is not None
        key = (*unfolded_key(facts), bare, *grid.values())
        if key not in self._least:
            self._least[key] = (least_sizes(recordings.program, grid, bare), {})
        sizes, known = self._least[key]
        level = peak = 0
        for stage in (recordings.load, recordings.both.first(count)[0]):
            for _, events in stage.stretches:
                if id(events) not in known:
                    known[id(events)] = held(events, sizes)
                rise, most = known[id(events)]
                peak = max(peak, level + most)
                level += rise
        gradients = sum(sizes[buffer] for buffer in recordings.program.named.get("gradient", {}).values())
        return Walked(0, peak, 0, 0, 0, gradients, (), ())

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

    sums: dict[Callable[[Run], int], int] = field(default_factory=dict)
    """of `Run.summed`"""

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
