"""What a page shows, as plain records: gathered from `planner`, which computes every number. No HTML, no colours."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, NamedTuple, Protocol, TypeVar

import planner
from planner.catalog import lookup
from planner.catalog.profiles import GpuProfile
from planner.dialects.base import cli_words
from planner.estimate import timeline as step_timeline
from planner.estimate.estimate import after_step_bytes, assess, estimate
from planner.evidence import accuracy
from planner.evidence.accuracy import Comparison, Prediction
from planner.evidence.published import Row
from planner.hardware.memory_trace import Overlay
from planner.layout.inputs import load_facts
from planner.layout.run import Facts
from planner.search import capacity_axes
from planner.search import ladder as ways_of
from planner.search.capacity_map import Capacity, Forms, Mapper, Shape
from planner.search.longest_clip import Longest, longest
from planner.search.question import Question, Switch
from planner.search.screening import QuickEstimate, Screen
from planner.search.search import Search
from planner.search.space import typed_only
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Estimate, Plan
from planner.spec.wording import words
from planner.units import gib
from reports.seen import Probe, evidence_row, measured, nearest, overlay, probes

T = TypeVar("T")

PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "bitsandbytes", "numpy")

VERDICTS = {"fits": "fits", "tight": "is tight", "no": "does not fit"}


@dataclass(frozen=True)
class RunnerUp:
    """One candidate: its memory, speed and what it switches on."""

    words: str
    lossy: tuple[str, ...]
    device_bytes: int
    step_seconds: float
    host_ram_bytes: int
    front: bool
    """no other is both faster and smaller"""
    chosen: bool
    has_ram: bool


@dataclass(frozen=True)
class PlanData:
    """Everything the page says of one plan."""

    name: str
    verdict: str
    understood: str
    command: str
    found: Estimate
    words: str
    note: str
    phases: tuple[step_timeline.PhaseParts, ...]
    timeline: step_timeline.Timeline
    overlay: Overlay | None
    """a probe's trace over the timeline"""
    capacity: Capacity
    ladder: tuple[str, ...]
    """in words, by rung of the capacity map"""
    measured: Mapping[Shape, tuple[str, ...]]
    """shapes of the map that somebody measured -> ids of the rows"""
    switches: tuple[Switch, ...]
    naive_bytes: int
    """the device peak before the first switch, by quick estimate"""
    ways: tuple[RunnerUp, ...]
    longest: tuple[Longest, ...]
    longest_words: Mapping[str, tuple[str, str]]
    compared: tuple[Comparison, ...]
    rows_known: int
    probes: tuple[Probe, ...]


@dataclass(frozen=True)
class Fact:
    """One line of the environment."""

    name: str
    value: str


class Builder:
    """Gathers one plan's page; its parts are worked out one by one, so that cores can share them."""

    def __init__(
        self,
        name: str,
        plan: Plan,
        rows: Sequence[Row] = (),
        probes: Sequence[Mapping[str, Any]] = (),
        points: int = step_timeline.POINTS,
    ) -> None:
        self.points = points
        self.name = name
        self.plan = plan
        self.rows = rows
        self.told = probes
        self.cards: dict[str, GpuProfile] = {}
        self.model = lookup.model(plan.job.model)
        self.gpu = lookup.parse_gpus(plan.machine.gpu)[1]
        self.cards[plan.machine.gpu] = self.gpu
        self.screen = Screen(self._facts, plan.trainer)
        # What a search sets is open again: the page is about all ways, not the plan's alone.
        asked = typed_only(plan.job.method, plan.strategy, ())
        self.search = Search(Question(plan.job, asked, plan.machine, self.model, self.gpu), self.screen)

    def _facts(self, job: Job, strategy: Strategy, machine: Machine) -> Facts:
        known = self.model if job.model == self.plan.job.model else None
        return load_facts(job, strategy, machine, known, self.cards[machine.gpu])

    def estimate(self) -> Estimate:
        """The plan's own, or a new one where its file has none."""
        plan = self.plan
        if plan.estimate is not None:
            return plan.estimate
        known = self._facts(plan.job, plan.strategy, plan.machine)
        return assess(plan.job, plan.strategy, plan.machine, known, plan.trainer).estimate

    def looks(self) -> tuple[QuickEstimate, ...]:
        """All candidates, and the plan's own way."""
        own = self.search.quick_estimate(self.plan.job, self.plan.strategy)
        candidates = ways_of.quick_estimates(self.search, self.plan.job)
        return tuple({quick.strategy: quick for quick in (*candidates, own)}.values())

    def steps(self) -> tuple[tuple[step_timeline.PhaseParts, ...], step_timeline.Timeline]:
        """Phases, and the timeline of a step."""
        plan = self.plan
        known = self._facts(plan.job, plan.strategy, plan.machine)
        run = step_timeline.laid_out(plan.job, plan.strategy, plan.machine, known, plan.trainer)
        return step_timeline.phases(run), step_timeline.timeline(run, self.points)

    def _forms(self) -> Forms:
        return Forms(self.screen, self.plan.job, capacity_axes.axis(self.model))

    def map(self, rungs: Sequence[QuickEstimate]) -> Capacity:
        """The capacity map."""
        return Mapper(self.search, self._forms()).map(rungs)

    def longest(self, rungs: Sequence[QuickEstimate], own: bool) -> tuple[Longest, ...]:
        """The longest clip of each class of card with as much host RAM as the plan's, or of all others.

        ``rungs``: the plan's ladder, which is that of its own class.
        """
        machines = []
        for group in lookup.gpu_classes():
            card = lookup.gpu(group.name)
            ram = lookup.default_host_ram(card, self.plan.machine.gpus)
            if (ram == self.plan.machine.host_ram) is not own:
                continue
            self.cards[card.name] = card
            machine = self.plan.machine.replace(gpu=card.name, unified=card.unified, host_ram=ram, reserve=0)
            machines.append((card, machine))
        return longest(self.search, self._forms(), rungs, machines)

    def compared(self) -> tuple[Comparison, ...]:
        """The nearest measured rows of the model, and the plan's own evidence, beside what is predicted."""
        found = self.estimate()
        own = accuracy.compare(
            [evidence_row(self.plan, entry) for entry in self.plan.evidence],
            lambda *_: Prediction.of(found),
            lambda *_: 0,
        )
        proof = {entry.id for entry in self.plan.evidence}
        others = [row for row in self.rows if row.id not in proof]
        return (*own, *accuracy.compare(nearest(others, self.plan.job), _predict, _after_step))

    def data(
        self, share: Callable[[Builder, PartDone], Parts] | None = None, done: PartDone = lambda part: part
    ) -> PlanData:
        """All of it. ``share``: works the parts out on several cores (`reports.share`). ``done``: see there."""
        plan, found = self.plan, self.estimate()
        seen, phases, timeline, table, reach, compared = (share or in_turn)(self, done)
        switches, naive_bytes = self._switches(found)
        return PlanData(
            name=self.name,
            verdict=verdict(self.model.title, self.gpu, found),
            understood=understood(self.gpu, found),
            command=cli_words.command("estimate", plan.job, plan.strategy, plan.machine, self.name),
            found=found,
            words=words(plan.strategy, found.lossy),
            note=f"as {plan.trainer} trains" if plan.trainer != "vplan" else "",
            phases=phases,
            timeline=timeline,
            overlay=overlay(plan, self.told, timeline),
            capacity=table,
            ladder=tuple(_rung(look.strategy, plan.job) for look in table.ladder),
            measured=measured(table, self.rows, plan.job),
            switches=switches,
            naive_bytes=naive_bytes,
            ways=ways(seen, plan, self.search),
            longest=tuple(sorted(reach, key=lambda each: each.budget_bytes)),
            longest_words={
                each.card: (_by(each.lossless_by, plan.job), _by(each.lossy_by, plan.job)) for each in reach
            },
            compared=compared,
            rows_known=sum(row.job.model == plan.job.model for row in self.rows),
            probes=probes(self.plan, self.told),
        )

    def _switches(self, found: Estimate) -> tuple[tuple[Switch, ...], int]:
        """What each switch did, and the device peak that the first one found."""
        switches = self.search.switches(found)
        start = self.search.quick_estimate(found.job, found.strategy).device_bytes
        return switches, start - sum(switch.device_bytes for switch in switches)


class Parts(NamedTuple):
    """The parts of a page that take long."""

    looks: tuple[QuickEstimate, ...]
    phases: tuple[step_timeline.PhaseParts, ...]
    timeline: step_timeline.Timeline
    table: Capacity
    longest: tuple[Longest, ...]
    """in any order"""
    compared: tuple[Comparison, ...]


class PartDone(Protocol):
    """Given a part of `PARTS`, hands it back: so that somebody can count them."""

    def __call__(self, part: T, /) -> T: ...


PARTS = 5
"""Times that ``done`` is called for a plan."""


def in_turn(builder: Builder, done: PartDone) -> Parts:
    """One after another."""
    looks = done(builder.looks())
    rungs = ways_of.ladder(builder.search, builder.plan.job, looks)
    phases, timeline = done(builder.steps())
    own = done(builder.longest(rungs, own=True))
    further, compared = done((builder.longest((), own=False), builder.compared()))
    return Parts(looks, phases, timeline, done(builder.map(rungs)), (*own, *further), compared)


# ---- sentences


def verdict(title: str, gpu: GpuProfile, answer: Estimate) -> str:
    """The answer in one sentence."""
    job = answer.job
    shape = f"{job.frames} x {job.height} x {job.width}" if job.frames > 1 else f"{job.height} x {job.width}"
    count = f"{answer.machine.world} x " if answer.machine.world > 1 else ""
    card = gpu.title.replace(", as ", " (") + ")" if ", as " in gpu.title else gpu.title
    card = card if answer.machine.world > 1 or lookup.gpu_class(gpu.name) is None else f"a {card}"
    what = {"lora": "LoRA training", "full": "full fine-tuning", "sample": "sampling"}[job.method]
    batch = f", batch {job.batch_size}" if job.batch_size > 1 else ""
    need = f"it needs {gib(answer.peak.device_bytes):.1f} of {gib(answer.budget_bytes):.1f} GiB"
    if answer.limit == "host":
        need += f", but {gib(answer.host_ram_bytes):.1f} GiB of host RAM"
    word = VERDICTS[answer.verdict]
    return f"{title}, {what} at {shape}{batch}, {word} on {count}{card}: {need}."


def understood(gpu: GpuProfile, answer: Estimate) -> str:
    """The budget as it was understood."""
    text = f"{gpu.title} gives a process {gpu.allocatable_gib:.2f} GiB"
    if answer.machine.reserve:
        text += f", of which {gib(answer.machine.reserve):.2f} GiB are kept free"
    ram = answer.machine.host_ram
    return text + (f"; host RAM {gib(ram):.0f} GiB" if ram else "") + "."


def _words(strategy: Strategy, job: Job) -> str:
    return words(strategy, strategy.lossy_fields(job))


def _rung(strategy: Strategy, job: Job) -> str:
    """A way of the ladder: as many blocks as that are swapped where they must be."""
    return _words(strategy, job).replace(f"{strategy.swap_blocks} blocks", f"up to {strategy.swap_blocks} blocks")


def _by(strategy: Strategy | None, job: Job) -> str:
    return _words(strategy, job) if strategy else ""


# ---- parts


def ways(seen: Sequence[QuickEstimate], plan: Plan, search: Search) -> tuple[RunnerUp, ...]:
    """All candidates, the fastest first."""
    front = ways_of.pareto(seen)
    found = [
        RunnerUp(
            _words(look.strategy, plan.job),
            look.strategy.lossy_fields(plan.job),
            look.device_bytes,
            look.step_seconds,
            look.host_ram_bytes,
            index in front,
            look.strategy == plan.strategy,
            search.feasibility.has_ram(look),
        )
        for index, look in enumerate(seen)
    ]
    return tuple(sorted(found, key=lambda way: (way.step_seconds, way.device_bytes)))


def _predict(job: Job, strategy: Strategy, machine: Machine, trainer: str) -> Prediction:
    return Prediction.of(estimate(job, strategy, machine, load_facts(job, strategy, machine), trainer))


def _after_step(job: Job, strategy: Strategy, machine: Machine, trainer: str) -> int:
    return after_step_bytes(job, strategy, machine, load_facts(job, strategy, machine), trainer)


def environment(made: str) -> tuple[Fact, ...]:
    """The versions behind the page. ``made``: when, ISO 8601."""
    found = [Fact("made", made), Fact("vplan", planner.__version__)]
    found += [Fact("Python", platform.python_version()), Fact("system", f"{platform.system()} {platform.machine()}")]
    for package in PACKAGES:
        try:
            found.append(Fact(package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            found.append(Fact(package, "not installed (estimates need none but numpy)"))
    return tuple(found)
