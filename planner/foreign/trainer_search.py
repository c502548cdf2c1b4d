"""The search of `vplan suggest --for TRAINER`: only what that trainer can express, priced as it trains."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from itertools import chain

from planner import dialects
from planner.catalog.card_limits import BF16_ATTENTION_FROM
from planner.catalog.shapes import check_job
from planner.dialects.base.bindings import InexpressibleError
from planner.dialects.base.dialect import Dialect, nearest_fields
from planner.dialects.base.launchers import ON_HOST
from planner.errors import VplanError
from planner.foreign.export import (
    SLURM,
    check_target,
    fields_of,
    flags_of,
    idle,
    nearest_plan,
    priced,
    settings_and_fields,
    writers_of,
)
from planner.foreign.trainer_policy import OURS, PRECISION, TrainerPolicy, plan_for, typed
from planner.layout.experts import expert_assumption
from planner.search.cost import WORTH_LOSS
from planner.search.question import Question, Suggestion, Switch
from planner.search.space import searched
from planner.search.suggester import Suggester
from planner.spec.job import Job, Strategy
from planner.spec.plan import Estimate, Plan
from planner.spec.rules import ResolvedStrategy
from planner.units import format_gib

NO_TRAINERS = (SLURM, "accelerate", "diffusers-pipeline")
"""Targets of an export that train nothing by themselves."""


def trainer_of(target: str, model: str) -> str:
    """Whose memory terms the files of a target have, for a model: a batch script runs our own trainer."""
    name = check_target(target)
    return OURS if name == SLURM else dialects.writer(name, model).name


def suggest_for(question: Question, name: str, prefer: str = "speed") -> tuple[Question, Suggestion]:
    """The question as the trainer puts it, and the best plan that it can express. Raises a VplanError where it does not
    train that model or cannot do what was typed."""
    if check_target(name) == SLURM:
        return question, Suggester(OURS, prefer).suggest(question)
    dialect = dialects.writer(check_target(name), question.job.model)
    asked, found = _searched(question, dialect, prefer)
    if found.plan.verdict != "no":
        return asked, found
    tight: tuple[Question, Suggestion] | None = None
    for other in _otherwise(question, dialect):
        with contextlib.suppress(VplanError):
            changed, answer = _searched(other, dialect, prefer)
            changed = changed._replace(fixed=question.fixed)
            if answer.plan.verdict != "no":
                told = changed, answer._replace(switches=(*_told(question, other), *answer.switches))
                if _is_sure(answer.plan, tight[1].plan if tight else None):
                    return told
                tight = tight or told
            elif _needs_less(answer.plan, found.plan):
                lossless = tuple(wish for wish in found.relaxed if not wish.plan.lossy)
                more = (wish for wish in answer.relaxed if wish.plan.lossy or not lossless)
                asked, found = changed, answer._replace(relaxed=(*lossless, *more))
    if tight is not None:
        return tight
    return asked, _with_fewer_bits(found, dialect)


def _with_fewer_bits(suggestion: Suggestion, dialect: Dialect) -> Suggestion:
    """The answer with the first format of fewer bits that fits, where the trainer has one that no plan can say."""
    plan = suggestion.plan
    if plan.strategy.weights(plan.job.method) != "fp8":
        return suggestion
    for version, words in dialect.fewer_bits.items():
        fewer = priced(Plan.of(plan), f"{dialect.name}@{version}")
        if fewer is None or fewer.verdict == "no":
            continue
        told = f"as {dialect.title} trains with {words} it takes {format_gib(fewer.peak.device_bytes)}"
        told += " (lossy): no plan says that, `vplan check` prices a config that does"
        return suggestion._replace(plan=plan.replace(assumptions=(*plan.assumptions, told)))
    return suggestion


def fitting_for(question: Question, name: str) -> Estimate | None:
    """The plan alone that `suggest_for` has where one fits or is tight, without what explains it, which takes most of
    the time; None where there is none. Raises a VplanError as `suggest_for` does."""
    dialect = dialects.writer(check_target(name), question.job.model)
    if (found := _fitting(question, dialect)) is not None:
        return found
    tight: Estimate | None = None
    for other in _otherwise(question, dialect):
        with contextlib.suppress(VplanError):
            found = _fitting(other, dialect)
            if found is not None and _is_sure(found, tight):
                return found
            tight = tight or found
    return tight


def _is_sure(plan: Estimate, tight: Estimate | None) -> bool:
    """Whether a plan fits, and rounds nothing more than one that was tight before it."""
    return plan.verdict == "fits" and (tight is None or set(plan.lossy) <= set(tight.lossy))


PLACES = frozenset({"text_encoder", "vae"})
"""Fields of where encoders are. A search leaves them where the trainer has them: most cache what they make."""


def _otherwise(question: Question, dialect: Dialect) -> Iterator[Question]:
    """The question with what is tried where nothing fits, the mildest first: encoders elsewhere, which rounds nothing,
    and a quantised base, with the encoders where they were and elsewhere."""
    elsewhere = list(_encoders_elsewhere(question, dialect))
    yield from elsewhere
    if question.job.method == "full":
        yield from _full_otherwise(question, dialect, elsewhere)
    if "weights_dtype" in question.fixed or question.job.method != "lora":
        return
    for dtype in QUANTISED:
        for asked in (question, *elsewhere):
            yield typed(asked, {"weights_dtype": dtype})


FORMATS = ("weights_dtype", "autocast", "master_weights")
"""What a trainer without an engine decides together of trained weights."""


def _full_otherwise(question: Question, dialect: Dialect, elsewhere: Sequence[Question]) -> Iterator[Question]:
    """The question for full training with an optimizer of DeepSpeed's in host RAM, in the formats that the trainer has
    without an engine, where a search found those of an engine alone, and with 8-bit states."""
    now = nearest_fields(dialect, fields_of(plan_for(question, question.job, question.strategy)))
    formats = {field: now[field] for field in FORMATS}
    states = {"optimizer": "adamw-8bit"}
    stepped = [{"sharding": "zero-2", **ON_HOST}] if question.machine.world == 1 else []  # no search tries it alone
    for changes in (*stepped, formats, states, {**formats, **states}):
        if not changes.keys() & question.fixed:
            yield from (typed(asked, changes) for asked in (question, *elsewhere))


def _encoders_elsewhere(question: Question, dialect: Dialect) -> Iterator[Question]:
    """The question with the encoders where changes of the trainer's flags put them, as `check` offers them: each change
    by itself, and all together."""
    now = nearest_fields(dialect, fields_of(plan_for(question, question.job, question.strategy)))
    moves = [move for move in dialect.moves if move.changes.keys() <= PLACES and move.when(now)]
    steps = [dict(step) for move in moves for step in move.steps(now)]
    together = dict(chain.from_iterable(step.items() for step in steps))
    for number, step in enumerate([*steps, together]):
        changes = {field: place for field, place in step.items() if now[field] != place}
        if changes and not changes.keys() & question.fixed and step not in steps[:number]:
            yield typed(question, step)


def _told(question: Question, other: Question) -> Iterator[Switch]:
    """What a question has that was not typed, as switches of the answer."""
    for field in sorted(other.fixed - question.fixed):
        before = getattr(question.strategy, field)
        if field == "weights_dtype":
            before = question.strategy.weights(question.job.method)
        yield Switch(field, before, getattr(other.strategy, field), 0, 0.0)


def _fitting(question: Question, dialect: Dialect) -> Estimate | None:
    trained = _as_trained(question, dialect)
    suggester = _suggester(TrainerPolicy(trained, dialect), "speed")
    found = suggester.fitting(trained)[1]
    if found is None:
        return None
    plan = _exportable(found, dialect).plan
    if plan.verdict == "no":  # one beside the best may be exportable: only an explained answer has them
        plan = _searched(question, dialect, "speed")[1].plan
    return None if plan.verdict == "no" else plan


def _needs_less(other: Estimate, estimate: Estimate) -> bool:
    """Whether one of two plans that do not fit is called the smaller: host RAM is a limit like the card's memory, and
    what is rounded once more must be worth it (`planner.search.cost.WORTH_LOSS`)."""
    lacks_ram = [plan.host_ram_bytes > (plan.machine.host_ram or math.inf) for plan in (other, estimate)]
    if lacks_ram[0] != lacks_ram[1]:
        return lacks_ram[1]
    if lacks_ram[0] and other.host_ram_bytes > estimate.host_ram_bytes:
        return False
    worth = WORTH_LOSS if set(other.lossy) - set(estimate.lossy) else 1.0
    return other.peak.device_bytes * worth < estimate.peak.device_bytes


QUANTISED = ("fp8", "int8", "nf4")
"""Formats of a frozen base, the least lossy first."""


def _searched(question: Question, dialect: Dialect, prefer: str) -> tuple[Question, Suggestion]:
    question = _as_trained(question, dialect)
    policy = TrainerPolicy(question, dialect)
    suggester = _suggester(policy, prefer)
    try:
        found = suggester.suggest(question)
        least = _exportable(found, dialect)
        return question, least if found.plan.verdict == "no" or least.plan.verdict != "no" else suggester.short(
            suggester.search(question), least
        )
    except VplanError:
        if policy.found or not policy.unsaid:
            raise
        ((why, _),) = policy.unsaid.most_common(1)
        fix = "ask for a smaller size or a shorter clip, or a larger card"
        raise VplanError(f"{dialect.title} cannot do what this needs here: {why}", fix) from None


def _suggester(policy: TrainerPolicy, prefer: str) -> Suggester:
    """A suggester of a trainer's plans, whose policy has the question with what measurements say."""

    def with_measurements(asked: Question) -> TrainerPolicy:
        policy.question = asked
        return policy

    return Suggester(policy.dialect.name, prefer, with_measurements)


def _exportable(suggestion: Suggestion, dialect: Dialect) -> Suggestion:
    """The suggestion with a plan that its export takes. One that runs only because PyTorch empties its cache is `no`,
    and for one that swaps a number of blocks as the trainer cannot, the nearest plan stands that it can do."""
    plans = (suggestion.plan, *suggestion.alternatives)
    for plan in () if suggestion.plan.verdict == "no" else plans:
        asked = Plan.of(plan, trainer=dialect.name)
        said = _said(dialect, asked)
        sure = priced(said, dialect.name)
        if plan is suggestion.plan:
            least = sure
        if said is not asked and sure is not None and sure.verdict != "no":
            return suggestion._replace(plan=sure.replace(assumptions=plan.assumptions), switches=())
        if said is asked and (sure is None or sure.verdict != "no"):
            return suggestion if plan is suggestion.plan else suggestion._replace(plan=plan, switches=())
    return (
        suggestion if suggestion.plan.verdict == "no" or least is None else suggestion._replace(plan=least, relaxed=())
    )


def _said(dialect: Dialect, plan: Plan) -> Plan:
    """The plan itself where the trainer can express it, else the nearest that it can."""
    try:
        settings_and_fields(dialect, plan)
    except InexpressibleError:
        return nearest_plan(dialect, plan)
    return plan


FOLLOWS = "grad_buckets"
"""A field that a trainer decides by others (`TrainerPolicy` lets it be)."""


def _as_trained(question: Question, dialect: Dialect) -> Question:
    """The question with what the trainer does otherwise in place of our defaults, said among the assumptions."""
    plan = plan_for(question, question.job, question.strategy)
    before = after = fields_of(plan)
    try:
        settings_and_fields(dialect, plan)
    except InexpressibleError as error:
        _check_possible(question, dialect, error)
        after = nearest_fields(dialect, before)
    unsaid = idle(plan.replace(strategy=plan.strategy.replace(sharding=after["sharding"])))
    changed = {field: after[field] for field in after if after[field] != before[field] and field not in unsaid}
    for field in changed.keys() & question.fixed:
        fault = f"{dialect.title} cannot do {flags_of({field: before[field]})}"
        raise VplanError(fault, f"use {flags_of({field: after[field]})}, or leave it out")
    left_open = set(searched(question.job.method))
    job = question.job.replace(**{field: value for field, value in changed.items() if field in Job.model_fields})
    check_job(question.model, job)
    strategy_changes = {field: value for field, value in changed.items() if field in Strategy.model_fields}
    otherwise = {field: value for field, value in changed.items() if field not in left_open}
    layers = ["LoRA layers of its own"] if otherwise.pop("lora_targets", None) else []
    words = ", ".join([*layers, *([flags_of(otherwise)] if otherwise else [])])
    notes = (f"as {dialect.title} trains" + (f" ({words})" if words else ""),)
    asked = question._replace(
        job=job,
        strategy=question.strategy.replace(
            **{field: strategy_changes[field] for field in strategy_changes.keys() - left_open}
        ),
        assumptions=(*_still_assumed(question, job), *notes),
    )
    # Where nothing that a search tries can be said, more and more of what the trainer does instead is taken for typed.
    own = {field: value for field, value in after.items() if field in Strategy.model_fields and value is not None}
    for held in ((), strategy_changes, {*strategy_changes, *PRECISION}, own):
        narrowed = typed(asked, {field: own[field] for field in held if field in own and field != FOLLOWS})
        if candidates := TrainerPolicy(narrowed, dialect).all_candidates():
            _check_card(narrowed, dialect, candidates)
            return narrowed
    if question.machine.world > 1:
        _as_trained(question._replace(machine=question.machine.replace(gpus=1, nodes=1)), dialect)
        raise VplanError(f"{dialect.title} trains on one GPU here", f"ask for one: --gpu {question.machine.gpu}")
    fault = f"{dialect.title} trains {question.model.title} in no way that this search knows"
    raise VplanError(fault, "price its command: `vplan check`")


def _check_card(question: Question, dialect: Dialect, candidates: Sequence[ResolvedStrategy]) -> None:
    """A VplanError where the trainer computes in bf16 whatever is asked for, and the card has none."""
    formats = {question.candidate(question.job, strategy).computes_in for strategy in candidates}
    if question.gpu.vendor == "nvidia" and question.gpu.capability < BF16_ATTENTION_FROM and formats == {"bf16"}:
        fault = f"{dialect.title} computes in bf16 here, which {question.gpu.title} does not have"
        raise VplanError(
            fault, "use an Ampere card or newer (RTX 30, A10), or leave out --for: vplan's own trainer uses fp16"
        )


def _still_assumed(question: Question, job: Job) -> Iterator[str]:
    """The defaults that were taken, without those that the trainer replaces."""
    replaced = [expert_assumption(question.model, question.job)] if job.experts != question.job.experts else []
    marks = ((" frames (", ("frames",)), (" pixels (", ("height", "width")))
    said = [mark for mark, fields in marks if any(getattr(job, each) != getattr(question.job, each) for each in fields)]
    return (note for note in question.assumptions if note not in replaced and not any(mark in note for mark in said))


def _check_possible(question: Question, dialect: Dialect, error: InexpressibleError) -> None:
    """A VplanError where the trainer does not train the model, or not by this method."""
    for each in error.values:
        if each.field in ("model", "method"):
            exact, near = writers_of(plan_for(question, question.job, question.strategy))
            others = [name for name in (*exact, *near) if name not in NO_TRAINERS]
            fix = f"`vplan suggest {question.job.model} --gpu {question.machine.gpu}` plans for vplan's own trainer"
            fix += f"; --for {', '.join(others)} for others that do" if others else ""
            raise VplanError(f"{dialect.title} cannot do this: {each.message}", fix)
