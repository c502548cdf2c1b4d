"""Which plan `vplan train` trains: the one that was named, the one an earlier call kept, or the best there is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from planner.catalog import lookup
from planner.catalog.diffusers_folder import DENOISERS, has_name
from planner.catalog.profiles import ModelProfile
from planner.commands import USAGE
from planner.commands._shared.rendering.render import print_suggestion
from planner.commands._shared.request import TypedQuestion
from planner.commands._shared.verb import verdict_exit_code
from planner.errors import VplanError, quoted
from planner.hardware import doctor
from planner.search.suggester import Suggester
from planner.spec.plan import Plan, read_plan, write_plan
from planner.terminal import echo

if TYPE_CHECKING:
    from rich.console import Console

PLAN = "plan.toml"


def choose(asked: TypedQuestion, output: Path, first: bool, console: Console) -> Plan:
    """The plan that was given, or the one that an earlier call chose in this folder, or the best one that a search
    finds, which is printed on ``console``. ``first``: whether this is the first computer, which writes the plan. Raises
    a VplanError when there is neither plan nor model."""
    kept = output / PLAN
    if asked.plan is not None:
        plan = Plan.under(asked.settle().configuration(), asked.trainer).replace(training=asked.plan.training)
        if not asked.typed:
            plan = plan.replace(ladder=asked.plan.ladder, evidence=asked.plan.evidence)
        if first:
            write_plan(plan, kept)
        return plan
    if asked.model is None:
        raise VplanError(
            "no plan and no model", "pass one: vplan train plan.toml, or vplan train wan2.1-t2v-1.3b", USAGE
        )
    if kept.exists():
        plan = read_plan(kept)
        _check_same(asked, plan, kept)
        echo(f"continuing with {kept}", err=True)
        return plan
    _suggest(asked, kept, console)
    echo(f"plan written to {kept}", err=True)
    return read_plan(kept)


def _check_same(asked: TypedQuestion, plan: Plan, path: Path) -> None:
    """What was typed must be what the kept plan says."""
    fix = "leave it out, or choose another --output"
    if lookup.model(asked.model or "").name != lookup.model(plan.job.model).name:
        raise VplanError(f"{path} trains {plan.job.model}", fix)
    for record, said in ((plan.job, asked.job), (plan.strategy, asked.strategy), (plan.machine, asked.machine)):
        for name, value in said.items():
            if name not in ("model", "gpu") and name in asked.typed and getattr(record, name) != value:
                raise VplanError(f"{path} has {name} {getattr(record, name)}, not {value}", fix)


def _suggest(asked: TypedQuestion, path: Path, console: Console) -> None:
    """Writes and prints the plan that `vplan suggest` gives, on the card that is here where none was named."""
    question = asked.settle(gpu=None if asked.gpu else _card_here())
    suggestion = Suggester(asked.trainer).suggest(question)
    write_plan(suggestion.to_plan(asked.trainer), path)
    print_suggestion(console, question, suggestion)
    if code := verdict_exit_code(suggestion.plan.verdict):
        path.unlink(missing_ok=True)
        raise VplanError(f"no plan for {asked.model} fits", "see above for the nearest plan and what to change", code)


def _card_here() -> str:
    _, cards = doctor.visible()
    known = [card["known_as"] for card in cards if card.get("known_as")]
    if not known:
        raise VplanError("no --gpu, and this machine has no known card", "pass one, as --gpu 24GB", USAGE)
    return str(known[0])


def weights_of(model: ModelProfile, said: str | None) -> str:
    """The folder of a model's weights: the one given, else the folder of an own model. Raises a VplanError when there
    is neither, or when it says that it holds a distilled model."""
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
