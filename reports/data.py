"""What a page shows, as plain records: gathered from `planner`, which computes every number. No HTML, no colours."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, NamedTuple, Protocol, TypeVar

import planner
from planner.catalog import card_lookup, lookup
from planner.catalog.card_profiles import GpuProfile
from planner.catalog.shapes import grid
from planner.dialects.base import cli_words
from planner.estimate import timeline as step_timeline
from planner.estimate.estimate import assess, estimate, run_seconds
from planner.estimate.step_moments import StepMoment, moments
from planner.evidence import accuracy
from planner.evidence.accuracy import Comparison, Prediction, estimated_after_step
from planner.evidence.published import Row
from planner.hardware.memory_trace import Overlay
from planner.layout.recordings import Library, load_facts
from planner.layout.run import Facts
from planner.search import capacity_axes, ladder
from planner.search.capacity_map import Capacity, Cell, Forms, Mapper, Shape
from planner.search.objectives.longest_clip import Longest, longest
from planner.search.policy import EstimatePolicy, Policy
from planner.search.question import Question, Switch
from planner.search.screening import QuickEstimate, Screen
from planner.search.search import Search
from planner.search.space import typed_only
from planner.search.suggester import Suggester
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Strategy
from planner.spec.plan import Estimate, Plan
from planner.spec.rules import ResolvedStrategy
from planner.spec.wording import words
from reports.seen import Probe, evidence_row, measured, nearest, overlay, probes
from reports.sentences import after_command, measure_note, next_command, title, understood, verdict

T = TypeVar("T")

PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "bitsandbytes", "numpy")


@dataclass(frozen=True)
class RunnerUp:
    """One candidate strategy: its options in words, memory, speed, and whether the host has the RAM."""

    words: str
    lossy: tuple[str, ...]
    device_bytes: int
    step_seconds: float
    host_ram_bytes: int
    front: bool
    """no other is both faster and smaller"""
    chosen: bool
    has_ram: bool


class CardReach(NamedTuple):
    """What one class of card takes: its longest clip, and the plan's own clip."""

    longest: Longest
    seconds: float | None
    """of a step of the plan's own clip by the best plan for that card; None where none fits"""
    words: str
    """that plan's options"""
    lossy: bool


class Steps(NamedTuple):
    """The plan's own run: its phases, and one steady step."""

    phases: tuple[step_timeline.PhaseParts, ...]
    timeline: step_timeline.Timeline
    moments: tuple[StepMoment, ...]
    """one for each point of the timeline"""


class CapacityMap(NamedTuple):
    """The capacity map, with what else is known of its cells."""

    capacity: Capacity
    seconds: Mapping[Shape, float]
    """of a step, where something fits"""
    commands: Mapping[Shape, str]
    """that ask for the cell's plan, where flags can say it"""
    short_of_ram: frozenset[Shape]
    """where something fits the card that the host has not the RAM for"""


@dataclass(frozen=True)
class PlanData:
    """Everything that the page shows about one plan."""

    name: str
    verdict: str
    understood: str
    command: str
    estimate: Estimate
    words: str
    note: str
    title: str
    """what is trained, in a few words"""
    next_command: str
    """that writes the plan on the reader's computer, or looks for one that fits"""
    after_command: str
    """to type after that one; empty where nothing fits"""
    measure_note: tuple[str, str]
    """a command that measures it, and what that does"""
    changes: tuple[tuple[str, str], ...]
    """(what to change, what that does), where it does not fit and the changes are known"""
    phases: tuple[step_timeline.PhaseParts, ...]
    timeline: step_timeline.Timeline
    moments: tuple[StepMoment, ...]
    """one for each point of the timeline"""
    overlay: Overlay | None
    """a probe's trace over the timeline"""
    capacity: Capacity
    cell_seconds: Mapping[Shape, float]
    """of a step, for the shapes of the map at which something fits"""
    cell_commands: Mapping[Shape, str]
    """that ask for the plan of a cell, where flags can say it"""
    short_of_ram: frozenset[Shape]
    """shapes of the map that the card has room for, and the host has not the RAM"""
    ladder: tuple[str, ...]
    """in words, by rung of the capacity map"""
    measured: Mapping[Shape, tuple[str, ...]]
    """shapes of the map that somebody measured -> ids of the rows"""
    switches: tuple[Switch, ...]
    naive_bytes: int
    """the device peak before the first switch, by quick estimate"""
    candidates: tuple[RunnerUp, ...]
    cards: tuple[CardReach, ...]
    """by rising budget"""
    compared: tuple[Comparison, ...]
    rows_known: int
    probes: tuple[Probe, ...]


@dataclass(frozen=True)
class Fact:
    """One line of the page's environment: a name and its value."""

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
        changes: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.points = points
        self.name = name
        self.plan = plan
        self.rows = rows
        self.probe_rows = probes
        self.changes = tuple(changes)
        self.cards: dict[str, GpuProfile] = {}
        self.library = Library()
        self.model = lookup.model(plan.job.model)
        self.gpu = card_lookup.parse_gpus(plan.machine.gpu)[1]
        self.cards[plan.machine.gpu] = self.gpu
        self.screen = Screen(self._facts, plan.trainer)
        # What a search sets is open again: the page is about all ways, not the plan's alone.
        typed = typed_only(plan.job.method, plan.strategy, ())
        question = Question(plan.job, typed, plan.machine, self.model, self.gpu)
        policy: Callable[[Question], Policy] = EstimatePolicy
        if plan.trainer != "vplan":
            from planner.foreign.trainer_policy import other_ways_of  # which reads all trainers' tables

            question, policy = other_ways_of(plan, question)
        self.search = Search(question, self.screen, policy(question))
        self.suggester = Suggester(plan.trainer, policy=policy, run_cache=self.screen.run_cache)
        """of what other cards take"""

    def _facts(self, configuration: Configuration) -> Facts:
        profile = self.model if configuration.job.model == self.plan.job.model else None
        return load_facts(configuration, profile, self.cards[configuration.machine.gpu], self.library)

    def estimate(self) -> Estimate:
        """The plan's own estimate, or a new one where its file has none."""
        plan = self.plan
        if plan.estimate is not None:
            return plan.estimate
        configuration = plan.configuration
        return assess(configuration, self._facts(configuration), plan.trainer).estimate

    def quick_estimates(self) -> tuple[QuickEstimate, ...]:
        """Quick estimates of all candidate strategies and of the plan's own."""
        plan = self.plan
        # As the plan's file writes it, fields left open and all: the page knows its own row by that.
        written = ResolvedStrategy(plan.strategy)
        plan_quick = self.search.feasibility.quick_estimate(plan.job, written, recorded=plan.configuration)
        candidates = ladder.quick_estimates(self.search, plan.job)
        return tuple({quick.strategy: quick for quick in (*candidates, plan_quick)}.values())

    def steps(self) -> Steps:
        """Every phase at its peak, and the memory of one steady step."""
        plan = self.plan
        configuration = plan.configuration
        run = step_timeline.largest_run(configuration, self._facts(configuration), plan.trainer)
        timeline = step_timeline.timeline(run, self.points)
        return Steps(step_timeline.phases(run), timeline, moments(run, [point.at for point in timeline.points]))

    def _forms(self) -> Forms:
        return Forms(self.screen, self.plan.job, capacity_axes.axis(self.model))

    def map(self, rungs: Sequence[QuickEstimate]) -> CapacityMap:
        """The capacity map of the plan's job on its machine, over a ladder."""
        forms = self._forms()
        mapper = Mapper(self.search, forms)
        capacity = mapper.map(rungs)
        budget = self.search.question.budget_bytes
        short_of_ram = frozenset(
            cell.shape
            for row in capacity.cells
            for cell in row
            if cell.rung is None and cell.device_bytes <= budget
            if not all(mapper.has_ram(cell.shape, rung.strategy) for rung in rungs)
        )
        seconds, commands = {}, {}
        for cell in (cell for row in capacity.cells for cell in row):
            if cell.rung is None:
                continue
            strategy = capacity.ladder[cell.rung].strategy
            strategy = strategy.replace(vae_tiling=True) if cell.tiled else strategy
            job = forms.at(cell.shape)
            candidate = self.search.question.candidate(job, strategy)
            where = grid(self.model, job)
            facts = self.screen.facts(candidate)
            run = self.screen.run_cache.lay_out_for_peaks(candidate, facts, where, self.plan.trainer)
            seconds[cell.shape] = run_seconds(run)[0]
            if self.plan.machine.links is None and job.validation is None:
                commands[cell.shape] = cli_words.command("estimate", job, strategy, self.plan.machine)
        return CapacityMap(capacity, seconds, commands, short_of_ram)

    def _with_own(self, mapped: CapacityMap, answer: Estimate) -> CapacityMap:
        """The map whose cell of the plan's own clip says what the plan says, where both are of one kind: a strategy of
        the ladder swaps as many blocks as the longest clips need, and the plan swaps fewer."""
        job, capacity = self.plan.job, mapped.capacity
        length = job.frames if capacity.axis == "frames" else job.batch_size
        shape = length, job.height, job.width
        cell = next((cell for row in capacity.cells for cell in row if cell.shape == shape), None)
        if cell is None or cell.rung is None or cell.verdict != answer.verdict or job.buckets or cell.tiled:
            return mapped
        of_map, own = capacity.ladder[cell.rung].strategy, self.plan.strategy
        if own.swap_blocks > of_map.swap_blocks or _unswapped(own, job) != _unswapped(of_map, job):
            return mapped
        cell = replace(cell, device_bytes=answer.peak.device_bytes)
        command = cli_words.command("estimate", job, own, self.plan.machine, self.name)
        return mapped._replace(
            capacity=_with_cell(capacity, cell),
            seconds={**mapped.seconds, shape: answer.step_seconds},
            commands={**mapped.commands, shape: command} if shape in mapped.commands else mapped.commands,
        )

    def card_reaches(self, same_ram: bool) -> tuple[CardReach, ...]:
        """What each of `CLIP_CARDS` and the plan's own class takes, as `vplan suggest` answers for it with `--frames
        max` and without: of those with as much host RAM as the plan's, or of all others."""
        machines = []
        own_card = card_lookup.parse_gpus(self.plan.machine.gpu)[1]
        own_ram = card_lookup.default_host_ram(own_card, self.plan.machine.gpus, self.plan.machine.os)
        for group in card_lookup.gpu_classes():
            card = card_lookup.gpu(group.name)
            if group.name not in CLIP_CARDS and card.allocatable_bytes != own_card.allocatable_bytes:
                continue
            ram = card_lookup.default_host_ram(card, self.plan.machine.gpus, self.plan.machine.os)
            beside_own = ram == own_ram  # the plan's computer with another card of its kind
            ram = self.plan.machine.host_ram or ram if beside_own else ram
            if beside_own is same_ram:
                machine = self.plan.machine.replace(gpu=card.name, unified=card.unified, host_ram=ram)
                machines.append((card, machine))
        question = self.search.question._replace(job=self.plan.job.replace(buckets=()))
        return tuple(
            self._reach(clip, question._replace(gpu=card, machine=machine))
            for clip, (card, machine) in zip(longest(self.suggester, question, machines), machines, strict=True)
        )

    def _reach(self, clip: Longest, question: Question) -> CardReach:
        """``question``: about the plan's own clip on that card."""
        if not max(clip.lossless, clip.lossy):  # not even the shortest clip
            return CardReach(clip, None, "", False)
        found = self.suggester.search(question).best(question.job, explain=False)
        if found is None:
            return CardReach(clip, None, "", False)
        best = found.plan
        return CardReach(clip, best.step_seconds, words(best.strategy, best.lossy), bool(best.lossy))

    def compared(self) -> tuple[Comparison, ...]:
        """The nearest measured rows of the model, and the plan's own evidence, each compared with its prediction."""
        predicted = self.estimate()
        of_plan = accuracy.compare(
            [evidence_row(self.plan, entry) for entry in self.plan.evidence if not entry.env.is_virtual],
            lambda *_: Prediction.of(predicted),
            lambda *_: 0,
        )
        proof = {entry.id for entry in self.plan.evidence}
        unproven = [row for row in self.rows if row.id not in proof]
        return (*of_plan, *accuracy.compare(nearest(unproven, self.plan.job), _predict, estimated_after_step))

    def data(
        self, share: Callable[[Builder, PartDone], Parts] | None = None, progress: PartDone = lambda part: part
    ) -> PlanData:
        """All data of the plan's page. ``share`` computes the slow parts, on several cores (`reports.share`) or by
        default in turn; ``progress`` is called with every finished part and returns it."""
        plan, answer = self.plan, self.estimate()
        candidates, steps, mapped, cards, compared = (share or in_turn)(self, progress)
        mapped, timeline = self._with_own(mapped, answer), steps.timeline
        table = mapped.capacity
        switches, naive_bytes = self._switches(answer)
        return PlanData(
            name=self.name,
            verdict=verdict(self.model.title, self.gpu, answer),
            understood=understood(self.gpu, answer),
            command=cli_words.command("estimate", plan.job, plan.strategy, plan.machine, self.name),
            estimate=answer,
            words=words(plan.strategy, answer.lossy),
            note=f"as {plan.trainer.partition('@')[0]} trains" if plan.trainer != "vplan" else "",
            title=title(self.model.title, answer),
            next_command=next_command(self.name, plan, answer),
            after_command=after_command(self.name, plan, answer),
            measure_note=measure_note(self.name, plan),
            changes=self.changes,
            phases=steps.phases,
            timeline=timeline,
            moments=steps.moments,
            overlay=overlay(plan, self.probe_rows, timeline),
            capacity=table,
            cell_seconds=mapped.seconds,
            cell_commands=mapped.commands,
            short_of_ram=mapped.short_of_ram,
            ladder=tuple(_rung(look.strategy, plan.job) for look in table.ladder),
            measured=measured(table, self.rows, plan.job),
            switches=switches,
            naive_bytes=naive_bytes,
            candidates=runners_up(candidates, plan, self.search),
            cards=tuple(sorted(cards, key=lambda card: card.longest.budget_bytes)),
            compared=compared,
            rows_known=sum(row.job.model == plan.job.model for row in self.rows),
            probes=probes(self.plan, self.probe_rows),
        )

    def _switches(self, answer: Estimate) -> tuple[tuple[Switch, ...], int]:
        """What each switch did, and the device peak that the first one found."""
        switches = self.search.switches(answer)
        start = self.search.quick_estimate(answer.job, answer.configuration.strategy).device_bytes
        return switches, start - sum(switch.device_bytes for switch in switches)


CLIP_CARDS = ("8GB", "12GB", "16GB", "24GB", "32GB", "48GB", "80GB", "141GB")
"""Classes of cards whose longest clip a page has: each is a search of its own, 1 to 4 s of CPU."""


class Parts(NamedTuple):
    """The parts of a page that take long to compute."""

    quick: tuple[QuickEstimate, ...]
    steps: Steps
    mapped: CapacityMap
    cards: tuple[CardReach, ...]
    """in any order"""
    compared: tuple[Comparison, ...]


class PartDone(Protocol):
    """A callback that gets each finished part of `PARTS` and returns it, so that a caller can count them."""

    def __call__(self, part: T, /) -> T: ...


PARTS = 5
"""Times that ``progress`` is called for a plan."""


def in_turn(builder: Builder, progress: PartDone) -> Parts:
    """Computes the slow parts of a page one after another. ``progress`` is called with every finished part and returns
    it."""
    quick = progress(builder.quick_estimates())
    rungs = ladder.ladder(builder.search, builder.plan.job, quick)
    steps = progress(builder.steps())
    cards = progress(builder.card_reaches(same_ram=True))
    further, compared = progress((builder.card_reaches(same_ram=False), builder.compared()))
    return Parts(quick, steps, progress(builder.map(rungs)), (*cards, *further), compared)


# ---- parts


def _words(strategy: Strategy, job: Job) -> str:
    return words(strategy, strategy.lossy_fields(job))


def _unswapped(strategy: Strategy, job: Job) -> str:
    return _words(strategy.replace(swap_blocks=0), job)


def _with_cell(capacity: Capacity, new: Cell) -> Capacity:
    rows = (tuple(new if cell.shape == new.shape else cell for cell in row) for row in capacity.cells)
    return replace(capacity, cells=tuple(rows))


def _rung(strategy: Strategy, job: Job) -> str:
    """A way of the ladder: as many blocks as that are swapped where they must be."""
    return _words(strategy, job).replace(f"{strategy.swap_blocks} blocks", f"up to {strategy.swap_blocks} blocks")


def runners_up(candidates: Sequence[QuickEstimate], plan: Plan, search: Search) -> tuple[RunnerUp, ...]:
    """All candidate strategies, the fastest first."""
    front = ladder.pareto(candidates)
    rows = [
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
        for index, look in enumerate(candidates)
    ]
    return tuple(sorted(rows, key=lambda row: (row.step_seconds, row.device_bytes)))


def _predict(configuration: Configuration, trainer: str) -> Prediction:
    return Prediction.of(estimate(configuration, load_facts(configuration), trainer))


def environment(created: str) -> tuple[Fact, ...]:
    """Versions and system behind the page. ``created``: when it was made, ISO 8601."""
    facts = [Fact("made", created), Fact("vplan", planner.__version__)]
    facts += [Fact("Python", platform.python_version()), Fact("system", f"{platform.system()} {platform.machine()}")]
    for package in PACKAGES:
        try:
            facts.append(Fact(package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            facts.append(Fact(package, "not installed (estimates need none but numpy)"))
    return tuple(facts)
