"""Whatever can measure a plan: our own GPU, a virtual one, or a machine that is simulated. Searches know no more."""

from __future__ import annotations

from typing import Protocol

from planner.evidence.measurement import ProbeRow
from planner.spec.plan import Plan


class Runner(Protocol):
    """Measures one plan. Running out of memory, time or numbers, and crashes, are outcomes in the row, not errors."""

    @property
    def name(self) -> str:
        """`real`, `rehearse` or `simulate`; it is written into the row."""

    def run(self, plan: Plan, *, steps: int, time_limit: float, encode: bool = False) -> ProbeRow:
        """A few steps of the plan: `steps` steady ones are timed, and all of it ends within `time_limit` seconds, a
        checkpoint within as many more. `encode`: what is cached before training is gone through too.

        A plan that cannot be run here as it stands (no GPU, a switch our step lacks) is a VplanError.
        """
