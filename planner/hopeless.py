"""What a search need not look at, because something much like it cannot fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.job import Job, Strategy

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
