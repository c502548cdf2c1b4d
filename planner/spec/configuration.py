"""The three records that every question about a run is made of, as one."""

from __future__ import annotations

from typing import NamedTuple

from planner.spec.job import Job, Machine, Strategy
from planner.spec.rules import resolve


class Configuration(NamedTuple):
    """A job, a strategy and a machine: what is trained, how it is made to fit, and on which machine."""

    job: Job
    strategy: Strategy
    machine: Machine

    def resolved(self) -> Configuration:
        """The same with every field of the strategy filled in that the job and the machine decide (`rules.resolve`).

        Raises a VplanError where the three contradict each other.
        """
        return self._replace(strategy=resolve(*self))
