"""`vplan suggest`: the best way to train on a card; without a card, on any; without a model, any model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from planner.catalog import lookup
from planner.catalog.profiles import GpuProfile
from planner.commands import USAGE
from planner.commands._shared import render
from planner.commands._shared.request import Request, TypedQuestion, request_options
from planner.commands._shared.verb import (
    DOES_NOT_FIT,
    Verb,
    examples,
    json_option,
    output_option,
    report_option,
    show,
    verdict_exit_code,
    write_report,
)
from planner.errors import VplanError
from planner.estimate.estimate import assess
from planner.evidence.from_ledger import learned
from planner.layout.correction import ModelMeasurements
from planner.layout.inputs import load_facts
from planner.layout.run import Facts
from planner.parallel import spread
from planner.search.objectives import PREFERRED, Relaxed, largest, relaxed
from planner.search.question import Question, Suggestion
from planner.search.screening import Screen
from planner.search.search import Search
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Estimate, write_plan
from planner.units import format_gib, gib

if TYPE_CHECKING:
    from rich.console import Console

OTHER_CARD = 0.02
"""Share of a peak by which another card of the same class may differ (its CUDA context, its kernels)."""


@click.command(
    cls=Verb,
    epilog=examples(
        "vplan suggest --gpu 24GB --frames 81",
        "vplan suggest wan2.1-i2v-14b-480p --gpu h100-80gb --frames 129 -o plan.toml",
        "vplan suggest flux.1-dev --method full",
        "vplan suggest wan2.1-t2v-14b --gpu rtx4090 --frames max",
    ),
)
@request_options(searched=True)
@click.option(
    "--prefer",
    type=click.Choice(["speed", *PREFERRED]),
    default="speed",
    help="What to maximise, subject to your other options.  [default: speed]",
)
@click.option(
    "--allow", "allow", type=click.Choice(["lossy"]), help="Also consider lossy options when a lossless plan fits."
)
@click.option("--strict", is_flag=True, help="Exit with code 3 if the verdict is tight.")
@output_option("the plan")
@report_option
@json_option
def command(
    asked: TypedQuestion,
    prefer: str,
    allow: str | None,
    strict: bool,
    output: str | None,
    report: str | None,
    as_json: bool,
) -> int:
    """Find the fastest way to train that fits, lossless if possible.

    Options you set stay fixed; the rest is searched. Without --gpu the answer covers every card class, without --model
    every model that can train at that length.
    """
    started = time.perf_counter()
    wanted = _Wanted(asked, "frames" if asked.job.get("frames") == "max" else prefer, allow is not None)
    if asked.model is None and asked.gpu is None:
        raise VplanError("no --model and no --gpu", "give one of them, as --gpu 24GB", USAGE)
    if asked.model is not None and asked.gpu is not None:
        found = wanted.one()
        if output:
            write_plan(found.suggestion.to_plan(asked.trainer), output)
        if report:
            write_report(report, [(output or "plan.toml", found.suggestion.to_plan(asked.trainer))])
        said = found.to_json(time.perf_counter() - started)
        show(said, as_json, lambda console: _print_one(console, found, output))
        return verdict_exit_code(found.suggestion.plan.verdict, strict=strict)
    if report:
        raise VplanError("--report is about one plan", "give --model and --gpu", USAGE)
    if output:
        raise VplanError("-o writes one plan", "give --model and --gpu", USAGE)
    kind = "models" if asked.model is None else "classes"
    rows = wanted.models() if asked.model is None else wanted.classes()
    said = {
        kind: [row.to_json(kind) for row in rows],
        "considered": sum(row.considered for row in rows),
        "seconds": round(time.perf_counter() - started, 3),
    }
    show(said, as_json, lambda console: render.print_rows(console, wanted.first_line(), kind, rows))
    verdicts = [row.plan.verdict for row in rows if row.plan]
    return min((verdict_exit_code(verdict, strict=strict) for verdict in verdicts), default=DOES_NOT_FIT)


class _Found:
    """The answer for one model on one card."""

    def __init__(self, request: Request, suggestion: Suggestion) -> None:
        self.request = request
        self.suggestion = suggestion
        self.relax: tuple[Relaxed, ...] = ()
        self.smaller: tuple[Estimate, ...] = ()
        """The plan on the smaller cards of its class, where the verdict is another."""

    def to_json(self, seconds: float) -> dict[str, Any]:
        """The object of DESIGN section 9, with what to relax and the smaller cards beside it."""
        found = self.suggestion
        return {
            "plan": found.plan.to_json(),
            "alternatives": [other.to_json() for other in found.alternatives],
            "switches": [switch.to_json() for switch in found.switches],
            "relax": [wish.to_json() for wish in self.relax],
            "smaller_cards": [{"gpu": other.machine.gpu, "verdict": other.verdict} for other in self.smaller],
            "considered": found.considered,
            "seconds": round(seconds, 3),
        }


class _Wanted:
    """What was asked, for as many models and cards as it takes."""

    def __init__(self, asked: TypedQuestion, prefer: str, allow_lossy: bool) -> None:
        self.asked = asked
        self.prefer = prefer
        self.allow_lossy = allow_lossy
        self.cards: dict[str, GpuProfile] = {}
        self.known: dict[tuple[str, str], ModelMeasurements] = {}
        self.screen = Screen(self._facts, asked.trainer)

    def _facts(self, job: Job, strategy: Strategy, machine: Machine) -> Facts:
        found = load_facts(job, strategy, machine, None, self.cards[machine.gpu])
        return replace(found, measurements=self._learned(found.model.name, found.gpu))

    def _learned(self, model: str, gpu: GpuProfile) -> ModelMeasurements:
        """What measurements say, looked up once."""
        key = model, gpu.name
        if key not in self.known:
            self.known[key] = learned(model, gpu, self.asked.trainer)
        return self.known[key]

    def one(self) -> _Found:
        """The answer in full for the one model and card."""
        request = self.asked.settle(searched=True)
        search = self._search(request)
        suggestion = self._best(search, explain=True)
        if suggestion is None:
            found = _Found(request, Suggestion(_tightest(search), (), (), search.considered))
            found.relax = relaxed(search, search.question.job)
        else:
            found = _Found(request, suggestion)
            found.smaller = self._on_smaller_cards(request, search, suggestion.plan)
        plan = found.suggestion.plan.replace(assumptions=_assumptions(request, found.suggestion.plan))
        found.suggestion = Suggestion(plan, found.suggestion.alternatives, found.suggestion.switches, search.considered)
        return found

    def _on_smaller_cards(self, request: Request, search: Search, plan: Estimate) -> tuple[Estimate, ...]:
        """The plan on the cards sold under the same label that give less, where the verdict changes."""
        found, there = [], search.chosen
        for card in lookup.smaller_cards(request.gpu):
            if plan.high_bytes * (1 + OTHER_CARD) <= card.allocatable_bytes - request.machine.reserve:
                continue
            machine = request.machine.replace(gpu=card.name)
            known = load_facts(plan.job, plan.strategy, machine, request.model, card)
            there = assess(plan.job, plan.strategy, machine, known, self.asked.trainer, self.screen.lay_out, like=there)
            if there.estimate.verdict != plan.verdict:
                found.append(there.estimate)
        return tuple(found)

    def models(self) -> list[render.TableRow]:
        """A line for every model that can train at that length."""
        frames = self.asked.job.get("frames")
        names = [name for name in lookup.model_names() if lookup.model(name).kind == "video" or frames in (None, 1)]
        rows, refusals = [], []
        for name, found in zip(names, spread(_asker, self._typed, names, "models"), strict=True):
            if isinstance(found, VplanError):
                refusals.append(found)
                found = render.TableRow(name, None, found.message, 0)
            rows.append(found)
        if refusals and len(refusals) == len(rows):
            raise refusals[0]
        return rows

    def classes(self) -> list[render.TableRow]:
        """A line for every class of card."""
        rows = []
        for found in spread(_asker, self._typed, [group.name for group in lookup.gpu_classes()], "cards"):
            if isinstance(found, VplanError):
                raise found
            rows.append(found)
        return rows

    @property
    def _typed(self) -> tuple[TypedQuestion, str, bool]:
        return self.asked, self.prefer, self.allow_lossy

    def row(self, name: str) -> render.TableRow | VplanError:
        """The line for one model, or for one class of card of the model that was typed; or why there is none."""
        try:
            if self.asked.model is None:
                return self._row(name, self.asked.settle(model=name, searched=True))
            return self._row(name, self.asked.settle(gpu=name, searched=True))
        except VplanError as error:
            return error

    def first_line(self) -> str:
        """How a question about many was understood."""
        asked = self.asked
        if asked.model is None:
            count, card = lookup.parse_gpus(asked.gpu or "")
            several = f"{count} x " if count > 1 else ""
            return f"every model we know, {asked.job.get('method', 'lora')}, on {several}{card.title}: " + (
                f"{card.allocatable_gib:.2f} GiB to use"
            )
        return f"{lookup.model(asked.model).title}, {asked.job.get('method', 'lora')}, on every class of card"

    def _row(self, name: str, request: Request) -> render.TableRow:
        search = self._search(request)
        suggestion = self._best(search, explain=False)
        if suggestion is None:
            least = search.tightest(search.question.job)
            reason = _shortage(least) if least else search.missing.message if search.missing else ""
            return render.TableRow(name, None, reason, search.considered)
        plan = suggestion.plan.replace(assumptions=_assumptions(request, suggestion.plan))
        return render.TableRow(name, plan, "", search.considered)

    def _search(self, request: Request) -> Search:
        self.cards[request.machine.gpu] = request.gpu
        question = Question(
            request.job,
            request.strategy,
            request.machine,
            request.model,
            request.gpu,
            request.fixed,
            self.allow_lossy,
            self._learned(request.model.name, request.gpu),
        )
        return Search(question, self.screen)

    def _best(self, search: Search, explain: bool) -> Suggestion | None:
        if self.prefer == "speed":
            return search.best(search.question.job, explain)
        wish = PREFERRED[self.prefer](search.question.model)
        typed = [field for field in wish.fields if field in search.question.fixed]
        if typed and not (self.prefer == "frames" and self.asked.job.get("frames") == "max"):
            raise VplanError(
                f"--prefer {self.prefer} would change what you fixed: {', '.join(typed)}", f"leave out --{typed[0]}"
            )
        return largest(search, wish, explain)


def _asker(asked: TypedQuestion, prefer: str, allow_lossy: bool) -> Callable[[str], render.TableRow | VplanError]:
    return _Wanted(asked, prefer, allow_lossy).row


def _shortage(least: Estimate) -> str:
    """What the tightest plan needs, in words."""
    ram = least.machine.host_ram
    if least.limit == "host":
        return f"needs {format_gib(least.host_ram_bytes)} of host RAM at least"
    reason = f"needs {gib(least.peak.device_bytes):.1f} GiB at least"
    return reason + (f" with {format_gib(ram)} of host RAM" if ram and least.host_ram_bytes > 0.8 * ram else "")


def _tightest(search: Search) -> Estimate:
    found = search.tightest(search.question.job)
    if found is None:
        raise search.missing or VplanError("no strategy to look at", "type fewer switches")
    return found


def _assumptions(request: Request, plan: Estimate) -> tuple[str, ...]:
    """The request's, corrected where the search chose another shape."""
    if plan.job == request.job:
        return (*request.assumptions, *plan.assumptions)
    chosen = {"frames": " frames", "pixels": " pixels"}
    kept = [note for note in request.assumptions if not any(word in note for word in chosen.values())]
    if plan.job.frames > request.model.shape.max_frames:
        kept.append(
            f"{plan.job.frames} frames is longer than the model was trained on ({request.model.shape.max_frames})"
        )
    return (*kept, *plan.assumptions)


def _print_one(console: Console, found: _Found, output: str | None) -> None:
    render.print_suggestion(console, found.request, found.suggestion, found.relax, found.smaller)
    render.print_next(console, found.suggestion.plan, output)
