"""One measured run of our own trainer: the row that a probe returns, a ledger keeps and estimates learn from."""

# No `from __future__ import annotations` here: pydantic would compile every field's annotation again at each start.
from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple, get_args

from pydantic import Field

from planner.schema import Bytes, Record
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Environment, Measured, PhaseName

REHEARSED = "rehearse"
"""The runner of rows taken on virtual cards."""


class ProbeRow(Record):
    """One measured run of our own trainer, a line of a ledger. The fields are those of the JSON."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    id: str
    """of the plan that was run, see `row_id`"""
    job: Job
    strategy: Strategy
    machine: Machine
    """where it ran; for a process with capped memory, `reserve` is what it could not use"""
    implementation: Literal["vplan"] = "vplan"
    measured: Measured
    env: Environment
    runner: str = "real"
    """`real`; `rehearse`: on virtual cards, without seconds; or `simulate`, which says nothing about real GPUs"""
    planned_gpu: str | None = None
    """the card or class of the plan, if it is not the one in `machine`"""
    capped_bytes: Bytes | None = None
    """the device bytes that this process could use, if that is less than the card has"""
    requested_bytes: Bytes | None = None
    """the size of the allocation that ran out of memory"""
    grid: str | None = None
    """the grid that it was measured for, see `held_out`"""
    details: dict[str, Any] = {}
    """what else the worker reported: counters by phase, seconds and loss of each step, missing counters (`missing`)"""

    @property
    def configuration(self) -> Configuration:
        """Its job, strategy and machine. Resolved at each call, because a row may leave fields of the strategy open."""
        return Configuration.of(self.job, self.strategy, self.machine)


def held_out(row: ProbeRow) -> bool:
    """Whether a row must not be learned from: half of a grid's rows, by a hash of their ids, only judge."""
    return row.grid is not None and in_held_out_half(row.id)


def in_held_out_half(name: str) -> bool:
    """Whether the id of a grid's row is in the half that only judges: the first bit of its SHA-256 is set."""
    import hashlib  # slow to import, and only needed if there are measurements

    return hashlib.sha256(name.encode()).digest()[0] >= 128


INSIDE = {"step": ("train", "optimizer")}
"""Phase of a probe -> the phases of an estimate that it contains."""


def phases_of(details: Mapping[str, Any]) -> frozenset[str]:
    """The phases of an estimate that a probe went through, from its row's details; empty if they do not say."""
    counters = details.get("phases")
    names = {inner for name in counters for inner in INSIDE.get(name, (name,))} if isinstance(counters, dict) else set()
    return frozenset(names.intersection(get_args(PhaseName)))


def peaks_of(details: Mapping[str, Any], phases: Collection[str], apart: bool = False) -> dict[str, int]:
    """The maximum of each counter over some phases of a probe, or over all others (``apart``); empty if the details do
    not say."""
    counters = details.get("phases")
    chosen = (
        [each for name, each in counters.items() if (name in phases) != apart] if isinstance(counters, dict) else []
    )
    peaks: dict[str, int] = {}
    for name in ("allocated_bytes", "reserved_bytes", "device_bytes"):
        counted = [each[name] for each in chosen if isinstance(each, dict) and isinstance(each.get(name), int)]
        peaks |= {name: max(counted)} if counted else {}
    return peaks


def is_of_a_gpu(row: ProbeRow) -> bool:
    """Whether a row is about a real card: not simulated or rehearsed, not on the CPU, and not of a shrunk model."""
    return row.runner == "real" and row.env.gpu != "cpu" and "config" not in row.details


class Setup(NamedTuple):
    """The GPU, driver, torch and diffusers: two measurements of one plan with the same setup should give the same
    numbers."""

    gpu: str
    """as torch and NVML name it"""
    driver: str
    torch: str
    diffusers: str

    @classmethod
    def of(cls, env: Environment) -> "Setup":
        """The setup of a row's environment."""
        return cls(env.gpu, env.driver, env.torch, env.diffusers)
