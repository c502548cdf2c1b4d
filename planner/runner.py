"""Whatever can measure a plan: our own GPU, or a machine that is simulated. Searches know no more of it than this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from planner.measurement import ProbeRow
from planner.plan import Plan


class Runner(Protocol):
    """Measures one plan. Running out of memory, time or numbers, and crashes, are outcomes in the row, not errors."""

    @property
    def name(self) -> str:
        """`real` or `simulate`, which goes into the row."""

    def run(self, plan: Plan, *, steps: int, time_limit: float, encode: bool = False) -> ProbeRow:
        """A few steps of the plan: `steps` steady ones are timed, and all of it ends within `time_limit` seconds, a
        checkpoint within as many more. `encode`: what is cached before training is gone through too.

        A plan that cannot be run here as it stands (no GPU, a switch our step lacks) is a VplanError.
        """


@dataclass(frozen=True, kw_only=True)
class RealRunner:
    """Measures in fresh processes on this machine, see `planner.probe.probe`."""

    device: Literal["cuda", "cpu"] = "cuda"
    weights: str | Path | None = None
    """folder of published weights; random ones take as much"""
    config: Mapping[str, Any] | None = None
    """replaces keys of the model's published architecture, to shrink it"""
    history: str | Path | None = None
    """file for every event of the allocator"""
    encode: bool = False
    """goes through what is cached before training too, whoever asks"""
    command: str = "vplan probe"
    """what a row says was typed"""

    @property
    def name(self) -> str:
        return "real"

    def run(self, plan: Plan, *, steps: int, time_limit: float, encode: bool = False) -> ProbeRow:
        from planner.probe import probe  # processes and NVML are nothing that a simulation needs

        return probe(plan, self, steps=steps, time_limit=time_limit, encode=encode or self.encode)
