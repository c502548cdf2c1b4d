"""Chooses the plan that `vplan train` trains: passed by the user, kept by an earlier call, or found by a search."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from planner.catalog import lookup
from planner.catalog.diffusers_folder import DENOISERS, has_name
from planner.catalog.profiles import ModelProfile
from planner.commands import USAGE
from planner.commands._shared.data_options import evened_plan
from planner.commands._shared.rendering.render import print_suggestion
from planner.commands._shared.rendering.render_job import print_shapes
from planner.commands._shared.request import TypedQuestion, answer_with_samples
from planner.commands._shared.verb import DONE, verdict_exit_code
from planner.errors import VplanError, quoted
from planner.hardware import doctor
from planner.search.question import Question, Suggestion
from planner.search.suggester import Suggester
from planner.spec.job import Bucket
from planner.spec.plan import Plan, read_plan, write_plan
from planner.terminal import echo

if TYPE_CHECKING:
    from rich.console import Console

PLAN = "plan.toml"


class Chosen(NamedTuple):
    """The plan to train, and whether it is the one that is kept in the output folder already."""

    plan: Plan
    is_kept: bool = False

    def keep(self, output: Path, *, searched: bool) -> None:
        """Writes the plan where the next start finds it. Call it only when everything typed is known to agree with the
        plan: otherwise the corrected command would be held to a wrong one."""
        if not self.is_kept:
            write_plan(self.plan, output / PLAN)
        if searched and not self.is_kept:
            echo(f"plan written to {output / PLAN}", err=True)


def choose(
    asked: TypedQuestion, output: Path, samples: str | None, most: Mapping[Bucket, int], console: Console
) -> Chosen:
    """The plan that was passed, or the one that an earlier call kept in this folder, or the best one that a search
    finds, which is printed on ``console``.

    ``samples``: the option that asks for samples, which a search then plans for. ``most``: how many samples each
    proposed shape has, which limits its batch size. Raises a VplanError if there is neither a plan nor a model.
    """
    kept = output / PLAN
    if asked.plan is not None:
        plan = Plan.under(asked.to_question().configuration(), asked.trainer).replace(training=asked.plan.training)
        if not asked.typed:
            plan = plan.replace(ladder=asked.plan.ladder, evidence=asked.plan.evidence)
        return Chosen(plan)
    if asked.model is None:
        raise VplanError(
            "no plan and no model", "pass one: vplan train plan.toml, or vplan train wan2.1-t2v-1.3b", USAGE
        )
    if kept.exists():
        plan = read_plan(kept)
        _check_same(asked, plan, kept)
        if samples and plan.strategy.validation_mode == "off":
            fault = f"{samples}, but {kept} makes no samples (validation_mode off)"
            raise VplanError(fault, f"leave {samples} out, or choose another --output")
        echo(f"continuing with {kept}", err=True)
        return Chosen(plan, is_kept=True)
    return Chosen(_suggest(asked, samples, most, console))


def _check_same(asked: TypedQuestion, plan: Plan, path: Path) -> None:
    """Checks that what was typed agrees with the kept plan."""
    fix = "leave it out, or choose another --output"
    if lookup.model(asked.model or "").name != lookup.model(plan.job.model).name:
        raise VplanError(f"{path} trains {plan.job.model}", fix)
    for record, typed in ((plan.job, asked.job), (plan.strategy, asked.strategy), (plan.machine, asked.machine)):
        for name, value in typed.items():
            if name not in ("model", "gpu") and name in asked.typed and getattr(record, name) != value:
                raise VplanError(f"{path} has {name} {getattr(record, name)}, not {value}", fix)


def _suggest(asked: TypedQuestion, samples: str | None, most: Mapping[Bucket, int], console: Console) -> Plan:
    """Prints and returns the plan that `vplan suggest` finds, on this machine's card if none was named. If samples were
    requested, they are made with the model on the GPU, or with it in host RAM if only that fits."""
    suggester = Suggester(asked.trainer)

    def found(asked: TypedQuestion) -> tuple[Question, Suggestion]:
        question = asked.to_question(gpu=None if asked.gpu else _card_here())
        return question, suggester.suggest(question)

    question, suggestion = answer_with_samples(asked, found, _fits) if samples else found(asked)
    even = evened_plan(suggester, suggestion.plan, most) if most else None
    suggestion = suggestion._replace(plan=even.plan) if even else suggestion
    print_suggestion(console, question, suggestion)
    if even:
        print_shapes(console, even)
    if code := verdict_exit_code(suggestion.plan.verdict):
        without = f", or leave out {samples}" if samples else ""
        fix = f"see above for the nearest plan and what to change{without}"
        raise VplanError(f"no plan for {asked.model} fits", fix, code)
    return suggestion.to_plan(asked.trainer)


def _fits(answer: tuple[Question, Suggestion]) -> bool:
    return verdict_exit_code(answer[1].plan.verdict) == DONE


def _card_here() -> str:
    _, cards = doctor.visible()
    known = [card["known_as"] for card in cards if card.get("known_as")]
    if not known:
        raise VplanError("no --gpu, and this machine has no known card", "pass one, as --gpu 24GB", USAGE)
    return str(known[0])


def weights_of(model: ModelProfile, said: str | None) -> str:
    """The folder of a model's weights: the one passed, else the folder of an own model. Raises a VplanError if there is
    neither, or if the folder says that it holds a distilled model."""
    if said is None and not model.is_own:
        raise VplanError("no --weights", f"pass --weights DIR, the folder of {model.title} in diffusers format", USAGE)
    folder = said or str(_own_folder(model.origin))
    for distilled in model.traits.distilled:
        if has_name(Path(folder).expanduser(), distilled):
            fault = f"{quoted(folder)} says {distilled}, a distilled model, which training as {model.title} would undo"
            raise VplanError(fault, f"pass --weights DIR, the folder of {model.title} itself")
    return folder


def _own_folder(origin: str) -> Path:
    """The folder of the model that a profile was recorded from: a pipeline's, or the component's own."""
    place = Path(origin).parent
    return place.parent if place.name in DENOISERS else place
