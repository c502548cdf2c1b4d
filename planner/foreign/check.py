"""What another trainer's command needs, where it dies, and the smallest change of it that fits.

Pure but for looking recordings up: a dialect and what was given in, an answer out.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from planner import dialects
from planner.catalog.shapes import check_blocks
from planner.dialects.base.bindings import EDIT, Fields, Fixed, InexpressibleError, Remark, Settings, is_edit
from planner.dialects.base.dialect import Dialect, Move, nearest_fields, settings_for
from planner.errors import NotRecordedError, VplanError
from planner.estimate.estimate import OPTIMIZER_MOMENT, PHASE_MOMENTS, assess, describe_moment, outside_bytes
from planner.foreign.case import Case, settle
from planner.layout import margin
from planner.layout.inputs import Library, load_facts
from planner.layout.run import Facts
from planner.search.screening import QuickEstimate, Screen
from planner.spec.combinations.contradictions import check
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Strategy
from planner.spec.plan import Estimate, Plan

__all__ = ["Case", "Checked", "CheckedEstimate", "Fix", "Pricing", "check_case", "settle"]

MOST_PARTS = 3
"""Changes of more parts are another way of training, not a small change."""


WORTH = 100 << 20
"""Bytes that a change must save to be told of when it is not enough."""


@dataclass(frozen=True)
class CheckedEstimate:
    """The estimate of a command, with the phase and moment that decide its verdict."""

    estimate: Estimate
    phase: str
    moment: str


Costs = Mapping[tuple[str, ...], str]
"""What each option of a change costs, by how it is typed."""


@dataclass(frozen=True)
class Fix:
    """A change of the command that is enough, of which nothing can be left out."""

    change: tuple[str, ...]
    """flags or lines; what belongs together is one entry"""
    cost: str
    lossy: bool
    case: Case
    outcome: CheckedEstimate
    costs: Costs = field(default_factory=dict)
    """the same by option"""


@dataclass(frozen=True)
class Checked:
    """The answer of `vplan check`: the case, its estimate, and fixes where it does not fit."""

    case: Case
    outcome: CheckedEstimate
    fixes: tuple[Fix, ...] = ()
    ineffective: tuple[Remark, ...] = ()
    helps: tuple[Fix, ...] = ()
    """changes that help and are not enough by themselves"""
    searched: bool = True
    today: str = ""
    """the same by today's script, for one that is gone"""
    least: Fix | None = None
    """where no option is enough: those that together need least"""
    smaller: tuple[Fix, ...] = ()
    """where no option is enough: a shorter clip and a smaller size that fit"""
    larger_card: CheckedEstimate | None = None
    """where no option is enough: the command as it is on the smallest class of card that it fits"""
    as_lora: tuple[str, Estimate] | None = None
    """where no option is enough for full training: the question that answers with a LoRA, and what it needs"""

    @property
    def assumptions(self) -> tuple[str, ...]:
        """How the command was understood, and what its estimate assumes; in words."""
        return (*self.case.notes, *self.outcome.estimate.assumptions)

    def to_json(self) -> dict[str, Any]:
        """The answer as `vplan check --json` prints it."""
        case, estimate = self.case, self.outcome.estimate
        estimate = estimate.replace(assumptions=self.assumptions)
        return {
            "trainer": case.dialect.name,
            "job": case.job.to_json(),
            "strategy": estimate.strategy.to_json(),
            "estimate": estimate.to_json(),
            "verdict": estimate.verdict,
            "limit": estimate.limit,
            "phase": self.outcome.phase,
            "moment": self.outcome.moment,
            "ineffective": [each._asdict() for each in self.ineffective],
            "gone": [each._asdict() for each in case.given.removed],
            "unknown": list(case.given.unknown),
            "refused": [each._asdict() for each in case.given.refused],
            "fixes": [_fix_json(fix) for fix in self.fixes],
            "least": _fix_json(self.least) if self.least else None,
            "smaller": [_fix_json(fix) for fix in self.smaller],
            **({"larger_card": self.larger_card.estimate.machine.gpu} if self.larger_card else {}),
            **({"as_lora": self.as_lora[1].to_json()} if self.as_lora else {}),
            "helps": [{"change": list(fix.change), "lossy": fix.lossy, "cost": fix.cost} for fix in self.helps],
            **({"today": self.today} if self.today else {}),
        }


def _fix_json(fix: Fix) -> dict[str, Any]:
    estimate = fix.outcome.estimate.to_json()
    return {"change": list(fix.change), "lossy": fix.lossy, "cost": fix.cost, "estimate": estimate}


# ---- what happens


class Pricing:
    """Estimates of one case and its changes; what they share is looked up once."""

    def __init__(self, case: Case) -> None:
        self.model, self.gpu = case.model, case.gpu
        self.library = Library()
        self.screens: dict[str, Screen] = {}

    def facts(self, configuration: Configuration) -> Facts:
        """The facts (tapes, model, card, measurements) for an estimate."""
        return load_facts(configuration, self.model, self.gpu, self.library)

    def may_be(self, verdict: str, case: Case) -> bool:
        """Whether, by a quick estimate, a replay could still reach the verdict ("fits" or "tight"); False when there is
        no quick estimate."""
        quick = self.quick_estimate(case)
        if quick is None:
            return False
        budget = self.gpu.allocatable_bytes - case.machine.reserve
        held = case.machine.host_ram is None or quick.host_ram_bytes <= case.machine.host_ram
        low, high = margin.interval(quick.device_bytes)
        return held and (high if verdict == "fits" else low) <= budget

    def quick_estimate(self, case: Case) -> QuickEstimate | None:
        """What a case needs, without a replay; None where it contradicts itself, or nothing was recorded of it."""
        screen = self.screens.setdefault(case.trainer, Screen(self.facts, case.trainer))
        try:
            configuration = case.configuration
            check(configuration)
            check_blocks(case.model, case.strategy)
            return screen.quick_estimate(configuration)
        except VplanError:
            return None

    def outcome(self, case: Case) -> CheckedEstimate:
        """The estimate of a case, with the phase and moment at which it ends if it does not fit."""
        configuration = case.configuration
        run, played, estimate, kept = assess(configuration, self.facts(configuration), case.trainer)
        if kept:
            return CheckedEstimate(estimate, _phase(estimate.peak.phase, estimate.peak.moment), estimate.peak.moment)
        if estimate.verdict == "no" and estimate.limit == "host" and estimate.host:
            return CheckedEstimate(estimate, estimate.host.phase, "host RAM")
        room = estimate.budget_bytes - outside_bytes(run)
        over = (entry for entry in played if entry.replayed.reserved_peak_bytes > room)
        ended = next(over, None) if estimate.verdict != "fits" else None
        if ended is None:
            return CheckedEstimate(estimate, _phase(estimate.peak.phase, estimate.peak.moment), estimate.peak.moment)
        moment = describe_moment(ended, estimate.strategy)
        phase = _phase(ended.phase, moment)
        first = next(entry for entry in played if entry.phase == phase) if phase == "encode" else ended
        if first is not ended:  # it had room before there were gradients and states beside it
            return CheckedEstimate(estimate, "train", "encoding the next batch beside gradients and optimizer states")
        return CheckedEstimate(estimate, phase, moment)


def _phase(phase: str, moment: str) -> str:
    """The phase as people count: the first step's own are loading, training and its optimizer step."""
    if moment == PHASE_MOMENTS["load"]:
        return "load"
    if phase != "first_step":
        return phase
    return "optimizer" if moment == OPTIMIZER_MOMENT else "train"


# ---- the smallest change


def check_case(case: Case, search: bool = True) -> Checked:
    """Estimates a case and, with ``search``, looks for the smallest changes that fit. Raises a NotRecordedError in the
    trainer's words where a tape is missing."""
    pricing = Pricing(case)
    try:
        outcome = pricing.outcome(case)
    except NotRecordedError as error:
        raise _in_its_words(case, error, pricing) from None
    fixes: tuple[Fix, ...] = ()
    helps: tuple[Fix, ...] = ()
    if outcome.estimate.verdict != "fits" and search:
        fixes, helps = _fixes(case, outcome, pricing)
    settled = fixes[0].case if fixes else case
    return Checked(case, outcome, fixes, case.reading.ineffective, helps, search, _today(settled, outcome))


def _in_its_words(case: Case, error: NotRecordedError, pricing: Pricing) -> NotRecordedError:
    """The error of a batch that is not recorded, with a smaller one that is, in the trainer's words."""
    for move in smaller_batches(case.dialect):
        for step in move.steps(case.fields):
            other = case.changed(step)
            with contextlib.suppress(NotRecordedError):
                pricing.outcome(other)
                words = " ".join(changed_words(case, other.fields, frozenset(step)))
                return NotRecordedError(error.message, f"use {words}: {move.cost}")
    return error


def _today(case: Case, outcome: CheckedEstimate) -> str:
    """The same job by today's script, of a trainer whose former script was given."""
    if not case.dialect.successor:
        return ""
    today = dialects.dialect(case.dialect.successor)
    assert today.files is not None
    fields = nearest_fields(today, {**case.fields, "expandable_segments": False})
    plan = Plan(
        job=Job.read({name: value for name, value in fields.items() if name in Job.model_fields}),
        strategy=Strategy.read({name: value for name, value in fields.items() if name in Strategy.model_fields}),
        machine=case.machine,
        trainer=today.name,
    )
    text = list(today.files(plan, settings_for(today, fields)).values())[-1]
    return "\n".join(line for line in text.splitlines() if not line.startswith(("#!", "set -e")))


def _fixes(case: Case, base: CheckedEstimate, pricing: Pricing) -> tuple[tuple[Fix, ...], tuple[Fix, ...]]:
    """Changes that are enough, smallest first; and single ones that help where it ends and are not enough.

    Tight ones are told only where nothing fits. More parts are tried until something lossless is among what fits.
    """
    moves = moves_of(case)
    enough: dict[frozenset[int], Fix] = {}
    tight: dict[frozenset[int], Fix] = {}
    helps: list[Fix] = []
    for size in range(1, MOST_PARTS + 1):
        for chosen in map(frozenset, itertools.combinations(range(len(moves)), size)):
            if any(done <= chosen for done in enough):  # a part of it does
                continue
            fix = _tried(case, base, [moves[at] for at in sorted(chosen)], pricing)
            verdict = fix.outcome.estimate.verdict if fix else ""
            if fix is None or verdict == "no":
                helps += [fix] if fix and size == 1 and _saved(base, fix) >= WORTH else []
            elif verdict == "fits":
                enough[chosen] = fix
            elif base.estimate.verdict == "no" and not any(done <= chosen for done in tight):
                tight[chosen] = fix
        if any(not fix.lossy for fix in enough.values()):
            break
    useful = _without_idle(enough or tight)
    order = {id(fix): at for at, fix in enumerate(useful.values())}
    fixes = sorted(useful.values(), key=lambda fix: (_size(fix), fix.lossy, order[id(fix)]))
    return tuple(fixes), tuple(helps)


def _without_idle(fixes: dict[frozenset[int], Fix]) -> dict[frozenset[int], Fix]:
    """Without those that say all that another one says, and more: the rest of it is idle."""
    words = {chosen: frozenset(_flags(fix)) for chosen, fix in fixes.items()}
    return {chosen: fix for chosen, fix in fixes.items() if not any(other < words[chosen] for other in words.values())}


def _flags(fix: Fix) -> list[str]:
    """A change as single flags with their values, and lines."""
    return [flag for part in fix.change for flag in re.split(r"\s(?=--)|\n", part)]


def _saved(base: CheckedEstimate, fix: Fix) -> int:
    """Bytes less allocated where it ends."""
    phases = (each.estimate.phases for each in (base, fix.outcome))
    before, after = (peaks.get(base.phase) for peaks in phases)  # type: ignore[call-overload]  # any text may be asked
    return before.allocated_bytes - after.allocated_bytes if before and after else 0


def _size(fix: Fix) -> int:
    """How much there is to type: flags, and lines of code."""
    return sum(flag.startswith("--") for flag in _flags(fix)) or len(fix.change)


def moves_of(case: Case) -> list[Move]:
    """The changes that its trainer knows and that change something of a case."""
    return [move for move in (*case.dialect.moves, *smaller_batches(case.dialect)) if _is_change(case, move)]


def _is_change(case: Case, move: Move) -> bool:
    fields = case.fields
    changed = any(fields.get(name) != value for step in move.steps(fields) for name, value in step.items())
    return move.when(fields) and changed


def _tried(case: Case, base: CheckedEstimate, moves: list[Move], pricing: Pricing) -> Fix | None:
    """The fix that these moves together are, or None."""
    changes: dict[str, Any] = {}
    for move in moves:
        if any(changes.get(name, value) != value for name, value in move.changes.items()):
            return None
        changes |= {} if move.counts else move.changes
    counted = [move for move in moves if move.counts]
    together = list(itertools.product(*(move.steps(case.fields) for move in counted)))
    for at, steps in enumerate(together):
        for step in steps:
            changes |= step
        other = case.changed(changes)
        if not pricing.may_be("tight" if len(moves) == 1 and not counted else "fits", other):
            continue
        try:
            outcome = pricing.outcome(other)
        except NotRecordedError:
            return None
        if outcome.estimate.verdict != "fits" and at < len(together) - 1:
            continue
        rounds = any(move.lossy for move in moves) or bool(set(outcome.estimate.lossy) & changes.keys())
        lossy = rounds or _global_batch(other) != _global_batch(case)
        try:
            words = [tuple(move_words(case, other, move)) for move in moves]
        except InexpressibleError:  # this script of the trainer has no word for it
            return None
        faster = outcome.estimate.step_seconds < base.estimate.step_seconds
        costs = costs_of(moves, words, faster)
        change = tuple(itertools.chain(*words))
        return Fix(change, cost_words(costs, len(moves) > 1), lossy, other, outcome, costs)
    return None


SLOWER = "slower, and "


def costs_of(moves: Sequence[Move], words: Sequence[tuple[str, ...]], faster: bool = False) -> Costs:
    """What each of several changes costs; what is free is not told of beside what is not. ``faster``: that the step is,
    so that none of them is called slower."""
    costs = {typed: move.cost for move, typed in zip(moves, words, strict=True) if move.cost}
    told = {typed: cost for typed, cost in costs.items() if cost != "free"} or costs
    return {typed: cost.removeprefix(SLOWER) if faster else cost for typed, cost in told.items()}


def cost_words(costs: Costs, several: bool) -> str:
    """The costs of a change in one line, each with its option where there are ``several``."""
    if not several or set(costs.values()) == {"free"}:
        return next(iter(costs.values()), "")
    return "; ".join(f"{' '.join(typed)} ({cost})" for typed, cost in costs.items())


def _global_batch(case: Case) -> int:
    """Samples of one GPU in one optimizer step."""
    return case.job.batch_size * case.strategy.gradient_accumulation


def smaller_batches(dialect: Dialect) -> tuple[Move, ...]:
    """Fewer samples in one pass, and as many more passes before the optimizer steps: the same mean gradient. Of a
    trainer that does not accumulate, fewer samples, which is another training."""
    settable = {name for binding in dialect.bindings if not isinstance(binding, Fixed) for name in binding.fields}
    if "batch_size" not in settable:
        return ()
    accumulates = "gradient_accumulation" in settable

    def parts(fields: Fields) -> tuple[Fields, ...]:
        batch, passes = int(fields["batch_size"]), int(fields["gradient_accumulation"])
        changes = []
        for part in range(batch - 1, 0, -1):
            if batch % part == 0:
                more = {"gradient_accumulation": passes * batch // part} if accumulates else {}
                changes.append({"batch_size": part, **more})
        return tuple(changes)

    cost = "same samples per step, in several passes" if accumulates else "fewer samples per step: changes training"
    fields = ("batch_size", "gradient_accumulation") if accumulates else ("batch_size",)
    return (Move(dict.fromkeys(fields), cost, by_fields=parts),)


def move_words(case: Case, other: Case, move: Move) -> Iterator[str]:
    """One entry: what the move's own bindings write anew, and what goes with it."""
    if move.words_for is not None:
        settings = move.words_for(case.given.settings)
    else:
        settings = list(changed_words(case, other.fields, frozenset(move.changes)))
    if words := [*settings, *move.words]:
        yield _as_typed(words, case.dialect.assigns)


def _as_typed(words: Sequence[str], assigns: str) -> str:
    """The words of one change, ready to paste: flags behind each other, each key of a config on a line of its own."""
    text = words[0]
    for before, word in itertools.pairwise(words):
        keys = not word.startswith("-") and assigns in word, not before.startswith("-") and assigns in before
        text += ("\n" if any(keys) else " ") + word
    return text


def changed_words(case: Case, after: Fields, fields: frozenset[str]) -> Iterator[str]:
    """The flags that the bindings of these fields write differently after a change, as they are typed; the launcher's
    flags come last."""
    old: Settings = {}
    new: Settings = {}
    for binding in case.dialect.bindings:
        if not fields & set(binding.fields):
            continue
        with contextlib.suppress(InexpressibleError):  # what it is now has no word: it came about by itself
            old |= binding.to_settings(case.fields)
        new |= binding.to_settings(after)
    typed = {
        name: _typed(_where(name, case.given.settings), value, case.dialect.assigns)
        for name, value in new.items()
        if old.get(name) != value and case.given.settings.get(_where(name, case.given.settings)) != value
    }
    launcher = [words for name, words in typed.items() if name.startswith("launch:")]
    if launcher:
        yield " ".join(["accelerate launch", *launcher])
    yield from (words for name, words in typed.items() if not name.startswith("launch:"))
    for name in old if not new else ():  # else what is said now stands for what was said
        yield f"without {name.rpartition(':')[2]}"


FILES = ("config", "dataset")


def _where(name: str, settings: Settings) -> str:
    """The setting, or what its user has for that key: the same key of another table, or a flag."""
    file, _, path = name.partition(":")
    if name in settings or file not in FILES:
        return name
    key = path.rpartition(".")[2]
    tables = (own for own in settings if own.startswith(f"{file}:") and own.rpartition(".")[2] == key)
    return next(itertools.chain(tables, (own for own in (f"--{key}", f"--train_{key}") if own in settings)), name)


def _typed(name: str, value: object, assigns: str) -> str:
    """A setting as its user types it."""
    if name == "env:expandable_segments":
        return "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    if is_edit(name):
        return name.removeprefix(EDIT)
    where, colon, key = name.rpartition(":")
    if where in FILES:
        return f"{key}{assigns}{json.dumps(value, ensure_ascii=False)}"
    words = [] if value is True else value if isinstance(value, list | tuple) else [value]
    return " ".join([key if colon else name, *map(str, words)])
