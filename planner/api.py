"""What `import vplan` gives a script or a notebook: the answers of the command line as typed objects, in its process.

Options are those of the command line, read by the commands' own options. `vplan.py` is the only caller, and everything
a user may call raises its VplanError.
"""

from __future__ import annotations

import functools
import io
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import click
from pydantic import PrivateAttr

import reports
from planner.commands import as_ours
from planner.commands import check as check_command
from planner.commands import estimate as estimate_command
from planner.commands import suggest as suggest_command
from planner.commands._shared.rendering import render
from planner.commands._shared.rendering.verdict_words import VERDICTS
from planner.commands._shared.request import question_of
from planner.errors import VplanError
from planner.foreign import export as exports
from planner.foreign.check import Checked
from planner.foreign.trainer_search import suggest_for, trainer_of
from planner.garbage_collection import without_garbage_collection
from planner.search.question import Suggestion, Switch
from planner.search.suggester import Suggester
from planner.spec.plan import Estimate, Plan, write_plan
from planner.spec.plan import read_plan as read_plan_file
from planner.terminal import console
from planner.units import gib

if TYPE_CHECKING:
    from rich.console import Console

Parameters = ParamSpec("Parameters")
Answer = TypeVar("Answer")
Words = Sequence[str]

WIDTH = 100
"""Columns of an answer that is shown outside a terminal."""

ELSEWHERE = {
    "error": "use the command line: vplan check --error FILE",
    "force": "files are overwritten by export(..., force=True)",
    "help": "see docs/json.md",
    "json": "call to_json() on the answer",
    "output": "call save(FILE) on the answer",
    "report": "call report(FILE) on the answer",
    "strict": "look at the answer's verdict",
}
"""Options of the commands that a call does not take, and what does the same."""


def _door(function: Callable[Parameters, Answer]) -> Callable[Parameters, Answer]:
    """Raises what the function refuses as the VplanError that the user knows."""

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Answer:
        try:
            with without_garbage_collection():
                return function(*args, **kwargs)
        except VplanError as error:
            import vplan

            raise vplan.VplanError(error.message, error.fix, error.exit_code) from None

    return call


class _Shown:
    """An answer that prints as it does on the command line, and shows itself in a notebook."""

    def _print(self, console: Console) -> None:
        raise NotImplementedError

    def _short(self) -> str:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<vplan: {self._short()}>"

    def __str__(self) -> str:
        file = io.StringIO()
        self._print(_console(file))
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines())

    def _repr_html_(self) -> str:
        """What a terminal shows, with its colours."""
        console = _console(io.StringIO(), record=True, force_terminal=True)
        self._print(console)
        page = '<pre style="line-height:1.25;white-space:pre;overflow-x:auto">{code}</pre>'
        return console.export_html(inline_styles=True, code_format=page)


class EstimateAnswer(_Shown, Estimate):
    """What one way of training takes: an `Estimate` that can be shown, saved and reported."""

    _show: Callable[[Console], None] | None = PrivateAttr(default=None)

    @property
    def fits(self) -> bool:
        """Whether it surely fits; of a `tight` one that is not sure."""
        return self.verdict == "fits"

    def to_plan(self) -> PlanAnswer:
        """The plan for exactly this."""
        return _plan_answer(Plan.of(Estimate.model_construct(self.model_fields_set, **self.__dict__)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes plan.toml, as `vplan estimate -o` does."""
        self.to_plan().save(path)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Writes the HTML report, as `vplan report` does."""
        self.to_plan().report(path)

    def _print(self, console: Console) -> None:
        if self._show is not None:
            self._show(console)
        else:
            render.print_estimate(console, self)

    def _short(self) -> str:
        need, budget = gib(self.peak.device_bytes), gib(self.budget_bytes)
        words = VERDICTS[self.verdict][0]
        return f"{self.job.model} {self.job.method} on {self.machine.gpu} {words}: {need:.2f} of {budget:.2f} GiB"


class PlanAnswer(_Shown, Plan):
    """A `Plan` that can be shown, saved, reported and exported; of a suggestion, with what its search found."""

    estimate: EstimateAnswer | None = None
    _show: Callable[[Console], None] | None = PrivateAttr(default=None)
    _suggestion: Suggestion | None = PrivateAttr(default=None)

    @property
    def fits(self) -> bool:
        """Whether it surely fits; False too where it was never estimated."""
        return self.estimate is not None and self.estimate.fits

    @property
    def alternatives(self) -> tuple[Estimate, ...]:
        """The runners-up of the search; none of a plan that was read."""
        return self._suggestion.alternatives if self._suggestion else ()

    @property
    def switches(self) -> tuple[Switch, ...]:
        """What each option on the way to the plan saved and cost; none of a plan that was read."""
        return self._suggestion.switches if self._suggestion else ()

    @_door
    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes plan.toml, as `vplan suggest -o` does."""
        write_plan(self, os.fspath(path))

    def report(self, path: str | os.PathLike[str]) -> None:
        """Writes the HTML report, as `vplan report` does."""
        report(self, path)

    def export(
        self, to: str, folder: str | os.PathLike[str], *, nearest: bool = False, force: bool = False
    ) -> exports.Exported:
        """Writes another trainer's files, as `vplan export` does."""
        return export(self, to, folder, nearest=nearest, force=force)

    def _print(self, console: Console) -> None:
        if self._show is not None:
            self._show(console)
        else:
            render.print_plan(console, self, self.estimate)

    def _short(self) -> str:
        return self.estimate._short() if self.estimate else f"{self.job.model} {self.job.method}, not estimated"


def _estimate_answer(estimate: Estimate, show: Callable[[Console], None] | None = None) -> EstimateAnswer:
    """The same estimate; `show` prints it."""
    made = EstimateAnswer.model_construct(estimate.model_fields_set, **estimate.__dict__)
    made._show = show
    return made


def _plan_answer(
    plan: Plan, suggestion: Suggestion | None = None, show: Callable[[Console], None] | None = None
) -> PlanAnswer:
    """The same plan; `show` prints it."""
    fields = dict(plan.__dict__)
    if plan.estimate is not None:
        fields["estimate"] = _estimate_answer(plan.estimate)
    made = PlanAnswer.model_construct(plan.model_fields_set, **fields)
    made._show, made._suggestion = show, suggestion
    return made


class CheckedCommand(_Shown):
    """What another trainer's command needs, and what makes it fit."""

    def __init__(self, checked: Checked) -> None:
        self.checked = checked
        """all of it: the case as it was read, with remarks on its flags"""
        self.estimate = _estimate_answer(checked.outcome.estimate)
        self.verdict = self.estimate.verdict
        self.phase, self.moment = checked.outcome.phase, checked.outcome.moment
        """where that is decided"""
        self.fixes, self.helps = checked.fixes, checked.helps
        """changes that make it fit, and those that help and are not enough"""

    def to_json(self) -> dict[str, Any]:
        """The object that `vplan check --json` prints."""
        return self.checked.to_json()

    def _print(self, console: Console) -> None:
        check_command.print_checked(console, self.checked)

    def _short(self) -> str:
        return f"{self.checked.case.dialect.title}, {self.estimate._short()}"


@_door
def suggest(options: Mapping[str, Any], words: Words) -> PlanAnswer:
    """The best way to train a model on a card; where nothing fits, the tightest, whose verdict is `no`. `words`: the
    options as a command line has them."""
    said = question_of(_values(suggest_command.command, "suggest", options, words), own_card=True)
    asked = said["asked"]
    question = asked.to_question()._replace(allow_lossy=said["allow"] is not None)
    trainer = asked.trainer
    if said["trainer"] is None:
        found = Suggester(trainer, said["prefer"]).suggest(question)
    else:
        question, found = suggest_for(question, said["trainer"], said["prefer"])
        trainer = trainer_of(said["trainer"], found.plan.job.model)
    plan = found.to_plan(trainer)
    return _plan_answer(plan, found, lambda console: render.print_suggestion(console, question, found))


@_door
def estimate(options: Mapping[str, Any], words: Words) -> EstimateAnswer:
    """What one way of training takes, whether or not it fits."""
    said = question_of(_values(estimate_command.command, "estimate", options, words), own_card=True)
    question, found, _ = estimate_command.estimated(said["asked"])

    def show(console: Console) -> None:
        render.print_answer(console, question, found)
        render.print_estimate(console, found)
        render.print_assumptions(console, question, found)

    return _estimate_answer(found, show)


@_door
def check(command: str | os.PathLike[str] | Words, options: Mapping[str, Any], words: Words) -> CheckedCommand:
    """What another trainer's command or file needs. `command`: a file, a command line, or its words."""
    if isinstance(command, str | os.PathLike):
        text = os.fspath(command)
        command = [text] if os.path.isfile(text) else shlex.split(text)
    said = _values(check_command.command, "check", options, [*words, "--", *command])
    return CheckedCommand(check_command.checked(said))


@_door
def read_plan(path: str | os.PathLike[str]) -> PlanAnswer:
    """The plan in a file."""
    return _plan_answer(read_plan_file(os.fspath(path)))


@_door
def report(plans: Plan | Sequence[Plan], path: str | os.PathLike[str]) -> None:
    """Writes one HTML page about a plan, or several side by side."""
    many = [plans] if isinstance(plans, Plan) else list(plans)
    names = [each.job.model if len(many) == 1 else f"{each.job.model} ({at})" for at, each in enumerate(many, 1)]
    reports.write(os.fspath(path), list(zip(names, many, strict=True)))


@_door
def export(
    plan: Plan, to: str, folder: str | os.PathLike[str], *, nearest: bool = False, force: bool = False
) -> exports.Exported:
    """Writes another trainer's files into a folder; returns what was written, and how it is started."""
    done = exports.export(plan, to, nearest)
    exports.write_files(done, Path(folder), force)
    return done


def _values(command: click.Command, verb: str, options: Mapping[str, Any], words: Words) -> dict[str, Any]:
    """The values of a command's options, read as on its command line; a VplanError for what it would refuse."""
    for name in options.keys() & ELSEWHERE.keys():
        raise VplanError(f"vplan.{verb}() does not take {name}", ELSEWHERE[name])
    try:
        return command.make_context(f"vplan {verb}", list(words)).params
    except click.ClickException as error:
        raise as_ours(error) from None


def _console(file: io.StringIO, **more: Any) -> Console:
    return console(file=file, width=WIDTH, **more)
