"""Which plans of a grid can run on a card, how long each takes, and the most informative order to measure them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from planner.catalog import card_lookup, lookup
from planner.catalog.plan_id import row_id
from planner.errors import VplanError
from planner.estimate.estimate import estimate
from planner.evidence.measurement import ProbeRow, phases_of
from planner.launch.supported import supported_plan
from planner.layout import margin
from planner.layout.correction import SEPARATE_PHASES
from planner.layout.recordings import load_facts
from planner.probe.grid_file import GridEntry
from planner.spec.job import Machine
from planner.spec.plan import RAN, Estimate, PhaseName, PhasePeak, Plan
from planner.units import MIB, gib

START_SECONDS = 25.0
"""Time from the start of a probe's process to its first step: imports, building the model on the meta device and its
random weights, loading kernels. Measured on two slow cores: 15 to 34 s for imports, 3.5 to 7 s to build a model of 1 to
14 billion parameters. A run corrects it by what its own plans take."""

STEPS = 3
"""Steady steps, which are timed."""

OTHER_STEPS = 5
"""A probe's other steps: the first, a warm-up, one measured by phase, an extra forward pass, and the end."""

SAMPLED_STEPS = 3
"""Time of a sample with two noise levels, in steps: decoding takes about as long as denoising."""

SAVED_BYTES_PER_SECOND = 1e9

OFF = (("allocated_bytes", 0.01), ("device_bytes", 0.03))
"""(counter, relative error) above which an error of the estimate should be investigated."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One plan of a grid on one card, with the expected duration of its probe."""

    entry: GridEntry
    plan: Plan
    name: str
    """id of its row"""
    seconds: float
    """expected duration of the whole probe"""
    skip: str | None = None
    """why it cannot run there, if so"""
    phases: Mapping[PhaseName, PhasePeak] = field(default_factory=dict)
    """estimated peak of each phase"""

    def is_off(self, row: ProbeRow) -> bool:
        """Whether a row that ran differs from the estimate of its phases by more than `OFF` allows."""
        expected = [peak for phase, peak in self.phases.items() if phase in phases_of(row.details)]
        if not expected or row.measured.outcome not in RAN:
            return False
        pairs = (
            (getattr(row.measured, name), max(getattr(peak, name) for peak in expected), share) for name, share in OFF
        )
        return any(seen and abs(predicted - seen) > share * seen for seen, predicted, share in pairs)


def pricing(
    entries: Sequence[GridEntry], machine: Machine, host_ram: int | None, on_cpu: bool
) -> Callable[[str], Candidate]:
    """A function from the number of an entry (as text, for `planner.parallel`) to its `candidate`."""
    return lambda number: candidate(entries[int(number)], machine, host_ram, on_cpu)


def candidate(entry: GridEntry, machine: Machine, host_ram: int | None = None, on_cpu: bool = False) -> Candidate:
    """A grid entry's plan on a machine, with the reason if it cannot run there.

    `host_ram`: bytes of this computer; `on_cpu`: the probe runs on the CPU, where only shrunk models are possible.
    """
    bare = Plan(job=entry.job, strategy=entry.strategy, machine=machine.replace(gpus=entry.gpus))
    try:
        if entry.gpus > machine.gpus:
            raise VplanError(f"it is for {entry.gpus} GPUs, and this machine has {machine.gpus}")
        plan = supported_plan(bare)
        if on_cpu and not entry.config:
            raise VplanError("the full model takes too long on the CPU: its job needs a config that shrinks it")
        if entry.config:
            if entry.is_capped:
                raise VplanError("a shrunk model's peak is not estimated, so nothing can be capped at it")
            seconds = START_SECONDS * (2 if entry.encode else 1)
            return Candidate(entry=entry, plan=plan, name=row_id(plan, entry.config), seconds=seconds)
        # From recordings only, without learned corrections: a plan then has the same row on every machine of a kind.
        configuration = plan.configuration
        answer = estimate(configuration, load_facts(configuration))
        plan = plan.replace(machine=_capped(entry, answer)) if entry.is_capped else plan
        skip = None if entry.is_capped else _short_of_memory(answer, entry.encode)
        if host_ram is not None and answer.host_ram_bytes > host_ram:
            skip = (
                f"it needs {gib(answer.host_ram_bytes):.0f} GiB of host RAM, and this machine has {gib(host_ram):.0f}"
            )
    except VplanError as error:
        return Candidate(entry=entry, plan=bare, name="", seconds=0.0, skip=error.message)
    return Candidate(
        entry=entry,
        plan=plan,
        name=row_id(plan),
        seconds=_seconds(answer, entry.encode),
        skip=skip,
        phases=answer.phases,
    )  # fmt: skip


def _short_of_memory(answer: Estimate, encodes: bool) -> str | None:
    """Why a plan cannot fit; None if it may. ``encodes``: whether the probe encodes, else those phases do not count."""
    needed = max(peak.device_bytes for phase, peak in answer.phases.items() if encodes or phase not in SEPARATE_PHASES)
    if margin.verdict(needed, answer.budget_bytes, answer.strategy.compile != "none") != "no":
        return None
    return f"it needs {gib(needed):.1f} GiB, and the card gives {gib(answer.budget_bytes):.1f}"


def _capped(entry: GridEntry, answer: Estimate) -> Machine:
    """The machine, with a reserve that leaves the plan only the memory of its cap."""
    if answer.peak.phase in SEPARATE_PHASES:
        raise VplanError("its peak is in encoding, so a cap there says nothing about training")
    if entry.cap_share is not None:
        budget = round(entry.cap_share * answer.peak.device_bytes / MIB) * MIB
    else:
        budget = answer.low_bytes // MIB * MIB - MIB if entry.cap == "under" else -(-answer.high_bytes // MIB) * MIB
    card = card_lookup.parse_gpus(answer.machine.gpu)[1].allocatable_bytes
    if budget >= card:
        raise VplanError(f"a cap at {gib(budget):.1f} GiB does not cap a card of {gib(card):.1f}")
    return answer.machine.replace(reserve=card - budget)


def _seconds(answer: Estimate, encodes: bool) -> float:
    steps = OTHER_STEPS + STEPS + len(answer.job.buckets) + SAMPLED_STEPS * (answer.strategy.validation_mode != "off")
    usual = (answer.step_seconds + (answer.step_seconds_high or answer.step_seconds)) / 2
    return START_SECONDS * (2 if encodes else 1) + steps * usual + answer.disk_bytes / SAVED_BYTES_PER_SECOND


# ---- order of measuring

FAMILY, MODEL, ROW = 4.0, 1.0, 0.25
"""Information in the first row of a family, in the first of a model, and in any row; the first of a technique has 1."""

TECHNIQUES = 2
"""The most techniques of a row that count: an error in a row with many new ones cannot be attributed to one."""

AGAIN = 0.5
"""Information in each further row of the same kind, relative to the previous one."""


About = tuple[str, object]
"""A feature of a row: ("family", "wan")."""

LONG_CLIP = 49
"""Frames."""


def measuring_order(candidates: Iterable[Candidate], done: Iterable[GridEntry] = ()) -> list[Candidate]:
    """The candidates in the order to measure them: always next is the one that adds most information per second, given
    what was measured before (`done` and those ahead of it)."""
    left, seen = list(candidates), Counter[About]()
    for entry in done:
        seen.update(itertools.chain(*_tells(entry)))
    ordered = []
    while left:
        best = max(left, key=lambda each: _worth(each.entry, seen) / each.seconds)
        left.remove(best)
        ordered.append(best)
        seen.update(itertools.chain(*_tells(best.entry)))
    return ordered


def _worth(entry: GridEntry, seen: Counter[About]) -> float:
    shapes, techniques = _tells(entry)
    weights = {"family": FAMILY, "model": MODEL}
    tried = sorted((AGAIN ** seen[about] for about in techniques), reverse=True)
    return ROW + sum(weights.get(about[0], 1.0) * AGAIN ** seen[about] for about in shapes) + sum(tried[:TECHNIQUES])


def _tells(entry: GridEntry) -> tuple[list[About], list[About]]:
    """(features of what is trained, techniques that the row tries)."""
    job, strategy = entry.job, entry.strategy
    tried = [(name, getattr(strategy, name)) for name in sorted(strategy.model_fields_set)]
    shape = "image" if job.frames == 1 else "clip" if job.frames < LONG_CLIP else "long clip"
    trained: list[About] = [
        ("family", lookup.model(job.model).family),
        ("model", job.model),
        ("method", job.method),
        ("shape", shape),
        ("batch", min(job.batch_size, 2)),
        ("buckets", bool(job.buckets)),
    ]
    techniques: list[About] = [(name, value > 0 if isinstance(value, int) else value) for name, value in tried]
    caps: list[About] = [("cap", entry.cap), ("cap", entry.cap_share)]
    return trained, [*techniques, *caps, ("encode", entry.encode), ("gpus", entry.gpus)]
