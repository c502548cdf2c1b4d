"""The interface through which searches measure plans: on our own GPU, a virtual one or a simulated machine."""

from __future__ import annotations

from typing import Protocol

from planner.evidence.measurement import ProbeRow
from planner.spec.plan import Plan


class Runner(Protocol):
    """Measures one plan. Running out of memory, time or numbers, and crashes, are outcomes in the row, not errors."""

    @property
    def name(self) -> str:
        """`real`, `rehearse` or `simulate`; written into the row."""

    def run(self, plan: Plan, *, steps: int, time_limit: float, encode: bool = False) -> ProbeRow:
        """Runs a few steps of the plan, of which `steps` steady ones are timed. Everything ends within `time_limit`
        seconds, or twice that if a checkpoint is being written. `encode`: also runs the encoding that is cached before
        training.

        Raises a VplanError for a plan that cannot be run here as it is (no GPU, a switch that our step lacks).
        """
