"""What a search need not look at: what is known to be too large, or much like something that is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner import margin
from planner.job import Job, Strategy
from planner.question import Question
from planner.screen import Screen
from planner.space import most_swapped

if TYPE_CHECKING:
    from planner.suggest import Search


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
        """A strategy without swap that no number of swapped blocks helps."""
        search, family = self.search, strategy.replace(optimizer_step="foreach")
        most = search.most_in_ram(self.job, strategy)
        looks = [search.look(self.job, most)]
        if not search.too_large(looks[0], self.verdict):  # it is the RAM, of which fewer swapped blocks need less
            looks.append(search.look(self.job, strategy))
        if any(look.in_optimizer for look in looks):
            return
        self._any_step.add(family)
        if all(search.too_large(look, self.verdict, look.states_bytes) for look in looks):
            self._any_adam.add(family.replace(optimizer="adamw"))

    def __contains__(self, strategy: Strategy) -> bool:
        family = strategy.replace(optimizer_step="foreach")
        adam = strategy.optimizer in ("adamw", "adamw-8bit")
        return family in self._any_step or (adam and family.replace(optimizer="adamw") in self._any_adam)


class Known:
    """What is known of a strategy without a look."""

    def __init__(self, question: Question, screen: Screen) -> None:
        self.question = question
        self.screen = screen
        self._lacks_ram: dict[tuple[Job, Strategy], bool] = {}

    @property
    def sides(self) -> margin.Sides:
        """How sure estimates are here."""
        return self.question.learned.correction.sides

    def over(self, device_bytes: int, strategy: Strategy, verdict: str) -> bool:
        """Whether so many bytes on the GPU rule a verdict out."""
        low, high = margin.interval(device_bytes, strategy.compile != "none", self.sides)
        return (high if verdict == "fits" else low) > self.question.budget_bytes

    def never_fits(self, job: Job, strategy: Strategy, verdict: str) -> bool:
        """Whether this verdict is ruled out, however many blocks are swapped."""
        swapped = self._most_swapped(job, strategy)
        return not swapped and (self.above_floor(job, strategy, verdict) or self.lacks_ram(job, strategy))

    def above_floor(self, job: Job, strategy: Strategy, verdict: str) -> bool:
        """Whether the GPU's memory rules out just this strategy."""
        if self._tried(job, strategy):
            return False
        return self.over(self.screen.floor_bytes(job, strategy, self.question.machine), strategy, verdict)

    def floor_bytes(self, job: Job, strategy: Strategy) -> int:
        """What is on the GPU for certain, however many blocks are swapped."""
        if last := self._most_swapped(job, strategy):
            strategy = strategy.replace(swap_blocks=last)
        return self.screen.floor_bytes(job, strategy, self.question.machine)

    def lacks_ram(self, job: Job, strategy: Strategy) -> bool:
        """Whether the host's RAM rules out a strategy whose blocks cannot be swapped."""
        limit = self.question.machine.host_ram
        if limit is None or self._most_swapped(job, strategy) or self._tried(job, strategy):
            return False
        if strategy.optimizer_step == "fused":  # which kernels step is nothing to the host
            strategy = strategy.replace(optimizer_step="foreach")
        if (job, strategy) not in self._lacks_ram:
            needed = self.screen.host_ram_bytes(job, strategy, self.question.machine)
            self._lacks_ram[job, strategy] = needed > limit
        return self._lacks_ram[job, strategy]

    def _most_swapped(self, job: Job, strategy: Strategy) -> int:
        return most_swapped(job, strategy, self.question.model, self.question.fixed)

    def _tried(self, job: Job, strategy: Strategy) -> bool:
        """Whether this very plan was run, which says more than any floor."""
        return self.screen.told(job, strategy, self.question.machine) is not None
