"""`vplan tune`: the best measured plan, from the first estimate to a proof."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click

from planner.catalog import card_lookup, user_data
from planner.catalog.plan_id import row_id
from planner.commands import USAGE
from planner.commands._shared.progress import Progress
from planner.commands._shared.rendering import render
from planner.commands._shared.request import TypedQuestion, request_options
from planner.commands._shared.verb import (
    DOES_NOT_FIT,
    DONE,
    FiniteRange,
    Verb,
    examples,
    json_option,
    output_option,
    report_option,
    save_plan,
    show,
    stoppable,
    write_report,
)
from planner.errors import VplanError
from planner.evidence.measurement import REHEARSED, Setup
from planner.launch.supported import check_computers
from planner.layout.recordings import load_facts
from planner.search.objectives.objective import PREFERRED, chosen_objective
from planner.search.question import Question, Switch
from planner.search.screening import Screen
from planner.search.space import switched
from planner.spec import wording
from planner.spec.job import Job, Strategy
from planner.spec.plan import Estimate, Evidence, Plan
from planner.terminal import echo
from planner.tune.measured_policy import Applicable
from planner.tune.tuner import Goal, Tuner
from planner.units import format_seconds, gib

if TYPE_CHECKING:
    from rich.console import Console

    from planner.evidence.ledger import Ledger
    from planner.probe.runner import Runner
    from planner.tune.error_model import FinishedProbe
    from planner.tune.worker import Tuning

FAILED = 4
"""Exit code: the processes we started failed for a reason other than memory."""

SIMULATE = "simulate"
"""The runner whose measurements are of no card."""

NO_GPU = "tune measures real runs and needs an NVIDIA GPU, but none responds"
WITHOUT_GPU = (
    "use `vplan suggest`, which answers by estimate alone, --runner rehearse, which proves a plan on a virtual GPU, or "
    "--runner simulate, which shows a search"
)


@click.command(
    cls=Verb,
    epilog=examples(
        "vplan tune wan2.1-t2v-1.3b --gpu 24GB --frames 81 -o plan.toml",
        "vplan tune plan.toml --prefer batch --max-minutes 30",
        "vplan tune wan2.1-t2v-14b --gpu h100 --storage postgresql://me@db/vplan",
        "vplan tune wan2.1-t2v-1.3b --runner rehearse --gpu 24GB --frames 81",
    ),
)
@request_options(searched=True)
@click.option(
    "--prefer",
    type=click.Choice(["speed", *PREFERRED]),
    default="speed",
    help="What to maximise, subject to your other options.  [default: speed]",
)
@click.option("--allow", type=click.Choice(["lossy"]), help="Also consider lossy options when a lossless plan fits.")
@click.option(
    "--max-probes",
    type=click.IntRange(1, 1000),
    default=12,
    show_default=True,
    metavar="N",
    help="Maximum number of probes in the study.",
)
@click.option(
    "--max-minutes", type=FiniteRange(0.1, 10_000), default=120.0, show_default=True, metavar="MINUTES",
    help="Start no probe after this many minutes.",
)  # fmt: skip
@click.option(
    "--steps",
    type=click.IntRange(1, 1000),
    default=3,
    show_default=True,
    metavar="N",
    help="Steady-state steps to time.",
)
@click.option(
    "--time-limit", type=click.IntRange(1, 86_400), metavar="SECONDS",
    help="Kill a probe after this many seconds.  [default: 900, and three times what is estimated]",
)  # fmt: skip
@click.option(
    "--storage", metavar="FILE|URL", help="Where to store the study: a file, or a database shared by several workers."
)
@click.option("--study", metavar="NAME", help="Name of the study.  [default: one per question]")
@click.option(
    "--runner",
    "runner_name",
    type=click.Choice(["real", "rehearse", SIMULATE]),
    default="real",
    help="rehearse: use no GPU, but a virtual one, for memory alone; simulate: a simulated machine drawn from --seed.  "
    "[default: real]",
)
@click.option(
    "--python",
    metavar="PATH",
    help="Python with the CUDA wheel of PyTorch, for rehearse.  [default: VPLAN_CUDA_PYTHON]",
)
@click.option("--seed", type=click.IntRange(0, 2**31), default=0, metavar="N", help="Seed of the simulated machine.")
@output_option("the plan")
@report_option
@json_option
def command(
    asked: TypedQuestion,
    prefer: str,
    allow: str | None,
    output: str | None,
    report: str | None,
    as_json: bool,
    **typed: Any,
) -> int:
    """Find the best plan by measuring: probe the suggested plan, correct the estimate, try what could be 5 % better.

    Options you set stay fixed; the rest is searched. Each probe runs real steps in a fresh process. Run the same
    command again to resume the study; run it on several nodes with one --storage URL to share the work (on a node with
    several GPUs, give each worker its own with CUDA_VISIBLE_DEVICES). With --runner rehearse the probes run on a
    virtual GPU and prove that a plan fits, and its speed stays an estimate. Exit code 3: nothing fits; 4: the probes
    failed for another reason.
    """
    real = typed["runner_name"] == "real"
    if typed["python"] is not None and typed["runner_name"] != REHEARSED:
        raise VplanError("--python is for rehearsals", "add --runner rehearse, or leave it out", USAGE)
    gpu = _own_gpu() if real else None
    question = asked.to_question(gpu=None if asked.gpu else gpu)  # with --gpu auto the card is already known
    question = question._replace(allow_lossy=allow is not None)
    if asked.trainer != "vplan":
        raise VplanError(
            f"the plan is for {asked.trainer}, but tune measures vplan's own training step", 'write trainer = "vplan"'
        )
    if typed["runner_name"] != SIMULATE:
        check_computers(question.machine)
    goal = Goal(chosen_objective(question, prefer))
    screen = Screen(lambda configuration: load_facts(configuration, question.model, question.gpu))
    meter = _meter(screen, gpu, typed, question)
    basis: Literal["rehearsed", "measured"] = "rehearsed" if meter.runner.name == REHEARSED else "measured"
    tuner = Tuner(question, screen, goal, meter.applicable, basis)
    with (
        _tuning(tuner, meter, typed, prefer) as (tuning, progress),
        stoppable(lambda: f"{len(tuning.rows)} probes are kept; the same command continues from them"),
    ):
        why = tuning.run(progress.show)
    return _Answer(tuning, why).give(output, report, as_json)


def _own_gpu() -> str:
    """The name of the first GPU that CUDA shows. Raises a VplanError if there is none, or if a package for measuring is
    missing."""
    from planner.hardware.doctor import visible

    _, cards = visible()
    if not cards or not cards[0].get("name"):
        raise VplanError(NO_GPU, WITHOUT_GPU)
    for package in ("torch", "diffusers"):
        if importlib.util.find_spec(package) is None:
            raise VplanError(f"tune measures real runs and needs {package}", "install it: pip install 'vplan[train]'")
    return str(cards[0]["name"])


class _Meter(NamedTuple):
    """The runner that probes plans, its hardware, and the ledger for its rows."""

    runner: Runner
    setup: Setup
    ledger: Ledger
    applicable: Applicable


def _meter(screen: Screen, gpu: str | None, typed: dict[str, Any], question: Question) -> _Meter:
    """This machine's GPU, a virtual one or a simulated machine. The latter two have ledgers of their own."""
    from planner.evidence.ledger import Ledger, default_path

    if gpu is not None:
        from planner.hardware.doctor import gpus
        from planner.probe.probe import RealRunner

        real = RealRunner(command="vplan tune")
        driver, _ = gpus()
        setup = Setup(gpu, str(driver["version"]), metadata.version("torch"), metadata.version("diffusers"))
        return _Meter(real, setup, Ledger(default_path()), _applied(question, real.python.has))
    folder = user_data.folder()
    if typed["runner_name"] == REHEARSED:
        from planner.rehearsal.probe_runner import RehearsalRunner, cuda_interpreter

        interpreter = cuda_interpreter(typed["python"])
        command = f"vplan tune --runner {REHEARSED}"
        virtual = RehearsalRunner(interpreter=interpreter, command=command, say=lambda line: echo(line, err=True))
        setup, ledger = virtual.setup(question.gpu), Ledger(folder / "rehearsed.jsonl")
        return _Meter(virtual, setup, ledger, _applied(question, virtual.has))
    from planner.probe.simulated import SimulatedRunner, environment

    simulated = SimulatedRunner(typed["seed"], screen.facts, screen.run_cache.lay_out)
    setup = Setup.of(environment(question.gpu, simulated.seed, "vplan tune"))
    return _Meter(simulated, setup, Ledger(folder / "simulated.jsonl"), lambda job, way: True)


def _applied(question: Question, has: Callable[[str], bool]) -> Applicable:
    """Whether our training step supports a strategy, and the worker's Python has the packages for it."""
    from planner.launch.launch import libraries
    from planner.launch.supported import supported_plan

    def allowed(job: Job, way: Strategy) -> bool:
        if not all(map(has, libraries(way))):
            return False
        try:
            supported_plan(Plan(job=job, strategy=way, machine=question.machine))
        except VplanError:  # the runner would refuse it
            return False
        return True

    return allowed


@contextlib.contextmanager
def _tuning(tuner: Tuner, meter: _Meter, typed: dict[str, Any], prefer: str) -> Iterator[tuple[Tuning, Progress]]:
    """A worker of the question's study, with its progress on stderr."""
    from planner.tune.storage import without_password
    from planner.tune.study import Study
    from planner.tune.worker import Limits, Tuning

    question = tuner.question
    runner, setup, ledger, _ = meter
    asks = {
        "job": question.job.to_json(),
        "strategy": {name: getattr(question.strategy, name) for name in sorted(question.strategy.model_fields_set)},
        "machine": question.machine.to_json(),
        "wishes": [prefer, question.allow_lossy, sorted(question.fixed)],
        "GPU, driver or versions": [runner.name, *setup],
    }
    digest = hashlib.sha256(json.dumps(asks, sort_keys=True).encode()).hexdigest()[:12]
    name = typed["study"] or f"{question.job.model}-{question.job.method}-{digest}"
    storage = typed["storage"] or str(user_data.folder() / "studies" / f"{name}.journal")
    limits = Limits(typed["max_probes"], typed["max_minutes"] * 60, typed["steps"], typed["time_limit"])
    tuning = Tuning(tuner, Study(storage, name, asks), runner, ledger, limits, setup)
    with Progress(name, without_password(storage)) as progress:
        yield tuning, progress


class _Answer:
    """The result of a search."""

    def __init__(self, tuning: Tuning, why: str) -> None:
        self.question = tuning.tuner.question
        self.tuning = tuning
        self.why = why
        self.best = tuning.tuner.best

    def give(self, output: str | None, report: str | None, as_json: bool) -> int:
        """Writes the plan and the page, prints the answer, and returns the exit code."""
        best, tuner = self.best, self.tuning.tuner
        others: tuple[Estimate, ...]
        if best is None:
            self._check_failures()
            estimate, others = tuner.tightest(), ()
        else:
            estimate, others = tuner.answer(best).replace(basis=self._basis()), tuner.runners_up(best)
        estimate = estimate.replace(assumptions=(*self._assumptions(estimate), *estimate.assumptions))
        plan = self._plan(estimate, others)
        if output and best is not None:
            save_plan(plan, output)
        if report:
            measured = [row.to_json() for row in self.tuning.rows.values()]
            write_report(report, [(output or "plan.toml", plan)], probes=measured)
        answer = {
            "plan": {**estimate.to_json(), "evidence": [each.to_json() for each in plan.evidence]},
            "probes": [row.to_json() for row in self.tuning.probes],
            "alternatives": [other.to_json() for other in others],
            "why": self.why,
        }
        show(answer, as_json, lambda console: self._print(console, estimate, others, output))
        return DONE if best is not None else DOES_NOT_FIT

    def _check_failures(self) -> None:
        """Raises a VplanError if probes failed for other reasons than memory, and none for memory."""
        from planner.tune.worker import failed

        bad = [row for row in self.tuning.probes if failed(row)]
        if bad and len(bad) == len(self.tuning.probes):
            last = bad[-1]
            message = last.details.get("message", last.measured.outcome)
            log = last.details.get("log")
            fault = f"no probe finished; the last one: {message}" + (f" (log: {log})" if log else "")
            fix = "see the log and `vplan doctor`; once fixed, start a new study: --study NAME"
            raise VplanError(fault, fix, FAILED)

    def _plan(self, estimate: Estimate, others: tuple[Estimate, ...]) -> Plan:
        row = self.tuning.rows.get(row_id(Plan.under(estimate.configuration)))
        proof = (Evidence(id=row.id, measured=row.measured, env=row.env),) if row and self.best else ()
        ladder = tuple(other for other in others if other.high_bytes < estimate.high_bytes)
        return Plan.of(estimate, tuple(sorted(ladder, key=lambda each: each.step_seconds))).replace(evidence=proof)

    def _switches(self, estimate: Estimate) -> list[Switch]:
        """The options that are switched on, without the effect of each, which only `suggest` computes."""
        before, after = self.tuning.tuner.search.space.baseline(estimate.job), estimate.strategy
        fields = [*switched(before, after), *(["checkpointed_blocks"] if after.checkpointed_blocks else [])]
        return [Switch(field, getattr(before, field) or 0, getattr(after, field), 0, 0.0) for field in fields]

    def _proof(self, best: FinishedProbe) -> str:
        """A line about the measured peak, next to the estimate and the budget."""
        measured, estimate = best.measured, best.estimate
        proved = "[bold green]proved[/]"
        step = f"{format_seconds(measured.step_seconds)} per step" if measured.step_seconds else "runs"
        if self.tuning.tuner.basis == "rehearsed":
            proved = "[bold green]proved in rehearsal[/]"
            step = f"{format_seconds(estimate.step_seconds)} per step (estimated)"
        if self.tuning.runner.name == SIMULATE:
            proved = "[bold yellow]simulated, so not proved on any card[/]"
        if measured.device_bytes is None:
            return f"{proved}: {step}; GPU memory was not measured"
        took, estimated, budget = map(gib, (measured.device_bytes, estimate.peak.device_bytes, estimate.budget_bytes))
        return f"{proved}: used {took:.2f} GiB of {budget:.2f} (estimated {estimated:.2f}), {step}"

    def _basis(self) -> str:
        """The basis of the measurement. On a card of another architecture, which runs other kernels, it is only
        approximate."""
        if self.tuning.tuner.basis == "rehearsed":
            return "rehearsed"
        gpu = self.tuning.setup.gpu if self.tuning.setup else ""
        with contextlib.suppress(VplanError):  # a card that the catalogue does not know
            if card_lookup.gpu(gpu).architecture != self.question.gpu.architecture:
                return "nearby"
        return "measured"

    def _assumptions(self, estimate: Estimate) -> tuple[str, ...]:
        """The defaults that were taken; if an objective chose the shape, the note about the default shape is
        dropped."""
        if estimate.job == self.question.job:
            return self.question.assumptions
        return tuple(note for note in self.question.assumptions if " frames" not in note and " pixels" not in note)

    def _print(self, console: Console, estimate: Estimate, others: tuple[Estimate, ...], output: str | None) -> None:
        render.print_answer(console, self.question, estimate)
        if self.best is not None:
            console.print(self._proof(self.best), markup=True)  # contains only numbers, so no markup of others
        console.print(f"plan: {wording.ways(estimate)}", style="bold")
        render.print_flags(console, self._switches(estimate))
        if estimate.lossy:
            console.print(f"lossy: {', '.join(estimate.lossy)}", style="yellow")
        count = len(self.tuning.probes)
        console.print(f"{count} probe{'s' if count != 1 else ''}: {self.why}")
        if self.best is None:
            console.print("no plan was proved to fit; this one needs the least", style="bold")
        render.print_assumptions(console, self.question, estimate)
        if others:
            console.print()
            console.print(render.runners_up(others))
        if self.best is not None:
            render.print_next(console, estimate, output)
