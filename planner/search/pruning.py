"""What a search need not look at: what is known to be too large, or much like something that is."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

from planner.search.space import most_swapped
from planner.spec.job import Job, Strategy

if TYPE_CHECKING:
    from planner.search.screening import Look
    from planner.search.search import Search


class Hopeless:
    """Strategies that cannot come to a verdict, told from others that do not: with the same passes and another
    optimizer only its step and its states differ."""

    def __init__(self, search: Search, job: Job, verdict: str) -> None:
        self.search = search
        self.job = job
        self.verdict = verdict
        self._any_step: set[Strategy] = set()
        self._any_adam: set[Strategy] = set()

    def add(self, strategy: Strategy) -> None:
        """A strategy without swap that no number of swapped blocks helps.

        What replays of it were seen to lose says nothing of the others.
        """
        search, family = self.search, strategy.replace(optimizer_step="foreach")
        looks = [search.look(self.job, search.most_in_ram(self.job, strategy))]
        if not self._too_large(looks[0]):  # it is the RAM, of which fewer swapped blocks need less
            looks.append(search.look(self.job, strategy))
        if any(look.in_optimizer or (search.has_ram(look) and not self._too_large(look)) for look in looks):
            return
        self._any_step.add(family)
        if all(self._too_large(look, look.states_bytes) for look in looks):
            self._any_adam.add(family.replace(optimizer="adamw"))

    def _too_large(self, look: Look, less: int = 0) -> bool:
        return self.search.over(look.device_bytes - less, look.strategy, self.verdict)

    def __contains__(self, strategy: Strategy) -> bool:
        family = strategy.replace(optimizer_step="foreach")
        adam = strategy.optimizer in ("adamw", "adamw-8bit")
        return family in self._any_step or (adam and family.replace(optimizer="adamw") in self._any_adam)


class Known:
    """What is known of a strategy without a look."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.question = search.question
        self.screen = search.screen
        self._lacks_ram: dict[tuple[Job, Strategy], bool] = {}

    def never_fits(self, job: Job, strategy: Strategy, verdict: str) -> bool:
        """Whether this verdict is ruled out, however many blocks are swapped."""
        if not self._most_swapped(job, strategy):
            return self.above_floor(job, strategy, verdict) or self.lacks_ram(job, strategy)
        if self.question.learned.proofs:  # some number of swapped blocks may have been tried
            return False
        most = self._most_in_ram(job, strategy)
        return most is None or self.above_floor(job, most, verdict)

    def weights_force_swap(self, job: Job, strategy: Strategy, verdict: str) -> bool:
        """Whether the weights alone rule this verdict out where no blocks are swapped, and some may be."""
        if not self._most_swapped(job, strategy) or self._tried(job, strategy):
            return False
        return self.search.over(self.screen.parameter_bytes(job, strategy, self.question.machine), strategy, verdict)

    def must_swap(self, job: Job, strategy: Strategy, verdict: str) -> bool:
        """Whether blocks must be swapped to come to a verdict, and may be."""
        untried = not self.question.learned.proofs
        return untried and bool(self._most_swapped(job, strategy)) and self.above_floor(job, strategy, verdict)

    def above_floor(self, job: Job, strategy: Strategy, verdict: str) -> bool:
        """Whether the GPU's memory rules out this strategy, and with fewer swapped blocks."""
        if self._tried(job, strategy):
            return False
        known = job, strategy, self.question.machine
        floors = (
            floor(*known) for floor in (self.screen.parameter_bytes, self.screen.floor_bytes)
        )  # sooner known first
        return any(self.search.over(nbytes, strategy, verdict) for nbytes in floors)

    def floor_bytes(self, job: Job, strategy: Strategy) -> int:
        """What is on the GPU for certain, however many blocks are swapped that the host's RAM holds."""
        if self._most_swapped(job, strategy):
            strategy = self._most_in_ram(job, strategy) or strategy
        return self.screen.floor_bytes(job, strategy, self.question.machine)

    def lacks_ram(self, job: Job, strategy: Strategy) -> bool:
        """Whether the host's RAM rules out a strategy whose blocks cannot be swapped."""
        if self.question.machine.host_ram is None or self._most_swapped(job, strategy) or self._tried(job, strategy):
            return False
        if job.trainable:  # which part of the states there are is known once it is laid out
            return False
        if strategy.optimizer_step == "fused":  # which kernels step is nothing to the host
            strategy = strategy.replace(optimizer_step="foreach")
        if (job, strategy) not in self._lacks_ram:
            known = job, strategy, self.question.machine
            lacks = self.search.lacks(self.screen.floor_ram_bytes(*known))
            self._lacks_ram[job, strategy] = lacks or self.search.lacks(self.screen.host_ram_bytes(*known))
        return self._lacks_ram[job, strategy]

    def _most_in_ram(self, job: Job, strategy: Strategy) -> Strategy | None:
        """With the most swapped blocks that the host's RAM may hold; None where it cannot even hold the rest."""

        def lacks(blocks: int) -> bool:
            swapped = strategy.replace(swap_blocks=blocks)
            return self.search.lacks(self.screen.floor_ram_bytes(job, swapped, self.question.machine))

        held = bisect.bisect_left(range(self._most_swapped(job, strategy) + 1), True, key=lacks)
        return strategy.replace(swap_blocks=held - 1) if held else None

    def _most_swapped(self, job: Job, strategy: Strategy) -> int:
        return most_swapped(job, strategy, self.question.model, self.question.fixed)

    def _tried(self, job: Job, strategy: Strategy) -> bool:
        """Whether this very plan was run, which says more than any floor."""
        return self.screen.told(job, strategy, self.question.machine) is not None
