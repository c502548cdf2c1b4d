"""From a question to its plan: what `vplan suggest` prints and `vplan train` trains.

`Suggester.suggest` answers in full; `Suggester.fitting` finds the plan only. One `Suggester` answers questions about
several models and cards, and reads each tape and each measurement once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from planner.catalog import card_lookup, lookup
from planner.catalog.card_limits import BF16_ATTENTION_FROM, in_fp16
from planner.catalog.card_profiles import GpuProfile
from planner.catalog.profiles import ModelProfile
from planner.errors import NotEstimatedError, NotRecordedError, VplanError
from planner.estimate.estimate import assess
from planner.evidence.from_ledger import measurements_of
from planner.layout.correction import ModelMeasurements
from planner.layout.recordings import Library, load_facts
from planner.layout.run import Facts
from planner.search.objectives.largest import largest, other_kind
from planner.search.objectives.objective import chosen_objective, frames
from planner.search.objectives.relaxed import least, more_ram, one_gpu, relaxed
from planner.search.policy import Policy
from planner.search.question import Question, Relaxed, Suggestion, Unrecorded
from planner.search.run_cache import RunCache
from planner.search.screening import Screen
from planner.search.search import Search
from planner.spec.combinations.contradictions import contradictions
from planner.spec.configuration import Configuration
from planner.spec.plan import Estimate
from planner.units import GIB, format_gib, gib

OTHER_CARD = 0.02
"""Share of a peak by which another card of the same class may differ (its CUDA context, its kernels)."""


class Suggester:
    """Suggests plans for one trainer. ``prefer``: "speed", or a name in `objectives.PREFERRED`. ``policy``: what counts
    as a candidate, if not everything does. ``run_cache``: that of another search."""

    def __init__(
        self,
        trainer: str = "vplan",
        prefer: str = "speed",
        policy: Callable[[Question], Policy] | None = None,
        run_cache: RunCache | None = None,
    ) -> None:
        self.policy = policy
        self.trainer = trainer
        self.prefer = prefer
        self.screen = Screen(self._facts, trainer, run_cache)
        self._library = Library()
        self._models: dict[str, ModelProfile] = {}
        self._cards: dict[str, GpuProfile] = {}
        self._measurements: dict[tuple[str, str], ModelMeasurements] = {}

    def suggest(self, question: Question, early: Callable[[Suggestion], object] | None = None) -> Suggestion:
        """The plan for a question, explained: the best one that fits, or else the tightest one, with what to relax if
        not even that runs. ``early``: called with the plan alone as soon as it is known, about half-way.

        Raises a VplanError if there is nothing to search, or the question contradicts itself.
        """
        search, fitting = self.fitting(question)
        suggestion = fitting or Suggestion(_tightest(search), (), (), search.considered)
        if early:
            early(_assumed(question, suggestion))
        if fitting:
            suggestion = search.suggestion(fitting.plan)
            smaller = self._on_smaller_cards(search, suggestion.plan)
            suggestion = suggestion._replace(smaller_cards=smaller, relaxed=self._other_kind(search, suggestion.plan))
        elif suggestion.plan.verdict == "no":
            suggestion = self.short(search, suggestion)
        return _assumed(question, suggestion)._replace(considered=search.considered)

    def short(self, search: Search, suggestion: Suggestion) -> Suggestion:
        """The suggestion for a question that does not fit, with what would: one option relaxed, or else how far
        relaxing all of them reaches."""
        plan = suggestion.plan
        suggestion = suggestion._replace(unrecorded=unrecorded(search, plan))
        relax = relaxed(search, search.question.job)
        if relax:
            return suggestion._replace(relaxed=relax)
        reached = least(search, search.question.job)
        if reached and reached.verdict == "no" and reached.peak.device_bytes >= plan.peak.device_bytes:
            reached = None
        return suggestion._replace(relaxed=(), least=reached, larger_card=self._on_a_larger_card(search, plan))

    def _on_a_larger_card(self, search: Search, plan: Estimate) -> Estimate | None:
        """The plan on the smallest class of card that it fits, with as much host RAM as it needs, in whole GiB. None if
        the card is not what is short, or no class fits."""
        machine = search.question.machine
        if plan.limit != "gpu" or machine.unified:
            return None
        if machine.host_ram is not None and plan.host_ram_bytes > machine.host_ram:
            machine = machine.replace(host_ram=-(-plan.host_ram_bytes // GIB) * GIB)
        for group in card_lookup.gpu_classes():
            card = card_lookup.gpu(group.name)
            if card.unified or card.allocatable_bytes - machine.reserve < plan.high_bytes * (1 - OTHER_CARD):
                continue
            there = replace(plan.configuration, machine=machine.replace(gpu=group.name))
            facts = load_facts(there, search.question.model, card)
            found = assess(there, facts, self.trainer, self.screen.run_cache.lay_out).estimate
            if found.verdict == "fits":
                return found
        return None

    def _other_kind(self, search: Search, plan: Estimate) -> tuple[Relaxed, ...]:
        """What plans of the other kind reach. On one GPU: without loss. If the plan is lossy: the most without loss. If
        the most was asked for: the most with loss."""
        question, objective = search.question, chosen_objective(search.question, self.prefer)
        given_up = plan.lossy and not question.allow_lossy
        alone = tuple(one_gpu(search, plan.job)) if given_up else ()
        if objective is None and given_up and question.model.kind == "video":
            objective = frames(question.model)
        return (*alone, *(other_kind(search, plan, objective) if objective else ()))

    def fitting(self, question: Question) -> tuple[Search, Suggestion | None]:
        """The search that answers a question, and the plan it finds. If nothing fits in full training, the search also
        tries the values reserved for that case."""
        search = self.search(question)
        found = self.best(search, explain=False)
        if found is None and question.job.method == "full" and not question.last_resort:
            last = self.search(question._replace(last_resort=True))
            if last.candidates(question.job) != search.candidates(question.job):  # not all of it was typed
                return last, self.best(last, explain=False)
        return search, found

    def search(self, question: Question) -> Search:
        """A search for a question, with what measurements of its model on its card say."""
        self._cards[question.machine.gpu] = question.gpu
        measurements = self._measurements_of(question.model.name, question.gpu)
        question = question._replace(learned=measurements)
        return Search(question, self.screen, self.policy(question) if self.policy else None)

    def best(self, search: Search, explain: bool) -> Suggestion | None:
        """The best plan for the chosen objective, or the fastest if there is none; None if nothing fits."""
        objective = chosen_objective(search.question, self.prefer)
        if objective is None:
            return search.best(search.question.job, explain)
        return largest(search, objective, explain)

    def _facts(self, configuration: Configuration) -> Facts:
        name, card = configuration.job.model, self._cards[configuration.machine.gpu]
        if name not in self._models:
            self._models[name] = lookup.model(name)
        facts = load_facts(configuration, self._models[name], card, self._library)
        return facts._replace(measurements=self._measurements_of(facts.model.name, facts.gpu))

    def _measurements_of(self, model: str, gpu: GpuProfile) -> ModelMeasurements:
        key = model, gpu.name
        if key not in self._measurements:
            self._measurements[key] = measurements_of(model, gpu, self.trainer)
        return self._measurements[key]

    def _on_smaller_cards(self, search: Search, plan: Estimate) -> tuple[Estimate, ...]:
        """The plan on the smaller cards that are sold under the same label, if the verdict changes there."""
        question, assessment = search.question, search.chosen
        others = []
        for card in card_lookup.smaller_cards(question.gpu):
            if plan.high_bytes * (1 + OTHER_CARD) <= card.allocatable_bytes - question.machine.reserve:
                continue
            there = replace(plan.configuration, machine=question.machine.replace(gpu=card.name))
            if card.capability < BF16_ATTENTION_FROM:
                there = replace(there, strategy=in_fp16(there.strategy))
            # Most cards of a class allocate the very same: the replay of the one before is used again.
            try:
                facts = load_facts(there, question.model, card, self._library)
                assessment = assess(there, facts, self.trainer, self.screen.run_cache.lay_out, like=assessment)
            except NotEstimatedError:  # it runs another kernel, which the answer for that card by name says
                continue
            if assessment.estimate.verdict != plan.verdict:
                others.append(assessment.estimate)
        return tuple(others)


def _assumed(question: Question, suggestion: Suggestion) -> Suggestion:
    return suggestion._replace(plan=suggestion.plan.replace(assumptions=assumptions(question, suggestion.plan)))


def assumptions(question: Question, plan: Estimate) -> tuple[str, ...]:
    """The question's assumptions and the plan's, corrected if the search chose another shape."""
    if plan.job == question.job:
        return (*question.assumptions, *plan.assumptions)
    kept = [note for note in question.assumptions if " frames" not in note and " pixels" not in note]
    longest = question.model.shape.max_frames
    if plan.job.frames > longest:
        kept.append(f"{plan.job.frames} frames is longer than the model was trained on ({longest})")
    return (*kept, *plan.assumptions)


def _tightest(search: Search) -> Estimate:
    plan = search.tightest(search.question.job)
    if plan is None:
        raise search.missing or VplanError("no valid strategy left", "remove some options")
    return plan


LESS_MEMORY: tuple[dict[str, object], ...] = (
    {"gradient_checkpointing": "full"},
    {"nested_checkpointing": True},
    {"adapter_inputs": "shared"},
)
"""Options that keep less on the card and each have a recording of their own: the first of every model of a user's own
that was recorded in part, the others over a base in 16 bits alone (`planner.tape.variants.inventory`)."""


def unrecorded(search: Search, plan: Estimate) -> Unrecorded | None:
    """The first option that would make a plan which does not fit the card smaller, or may, and has no recording."""
    strategy, question = plan.configuration.strategy, search.question
    if plan.verdict != "no" or plan.limit != "gpu" or plan.job.method == "sample":
        return None
    for changes in LESS_MEMORY:
        ((field, value),) = changes.items()
        held = field in question.fixed or getattr(strategy, field) not in ("none", "cast", False)
        other = Configuration.of(plan.job, strategy.replace(**changes), question.machine)
        if held or next(contradictions(other), None) or not search.policy.candidates(plan.job, [other.strategy]):
            continue
        try:
            search.screen.facts(other)
        except NotRecordedError as error:
            if "vplan record" in error.fix:
                return Unrecorded(field, value, error.fix.partition(": ")[2])
        except NotEstimatedError:
            continue
    return None


def shortage(search: Search, tightest: Estimate) -> str:
    """What would fit with more RAM, or else what the tightest plan needs, in words."""
    ram = tightest.machine.host_ram
    richer = min(more_ram(search, tightest.job), key=lambda wish: wish.plan.host_ram_bytes, default=None)
    if richer is not None and ram is not None:
        lossy = " (lossy)" if richer.plan.lossy else ""
        return f"no with {gib(ram):.0f} GiB of host RAM; fits with {str(richer.after).removesuffix('GiB')}{lossy}"
    if tightest.limit == "host":
        return f"needs at least {format_gib(tightest.host_ram_bytes)} of host RAM"
    reason = f"needs at least {gib(tightest.peak.device_bytes):.1f} GiB"
    return reason + (f" with {format_gib(ram)} of host RAM" if ram and tightest.host_ram_bytes > 0.8 * ram else "")
