"""`vplan train`: runs a plan on data, from the first check to the finished weights."""

from __future__ import annotations

import itertools
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

from planner.catalog import lookup
from planner.commands import USAGE
from planner.commands._shared.batch import write_script
from planner.commands._shared.pick_plan import PLAN, choose, weights_of
from planner.commands._shared.render import memory_bar, print_plan
from planner.commands._shared.request import TypedQuestion, request_options
from planner.commands._shared.run_progress import Follower, prepare
from planner.commands._shared.verb import (
    DONE,
    FiniteRange,
    Verb,
    answer_console,
    examples,
    json_option,
    show,
    stoppable,
    talk,
)
from planner.errors import VplanError, quoted
from planner.launch import checkpoints, launch, validation
from planner.launch.fallback import difference, next_plan
from planner.launch.multinode import Peers
from planner.preflight import preflight
from planner.preflight.checks import FAILED
from planner.spec.plan import Plan, write_plan
from planner.units import gib

if TYPE_CHECKING:
    from rich.console import Console

    from planner.spec.plan import Estimate

ENTRIES, CACHE, FINAL, ASIDE = "entries.jsonl", "cache", "final", "checkpoints.before"
VALIDATION = "validation.json"
SCHEDULES = get_args(launch.Schedule)
RATES = {"lora": 1e-4, "full": 1e-5}
"""What the published trainers use (diffusers examples/cogvideo, finetrainers examples/training)."""


@click.command(
    cls=Verb,
    epilog=examples(
        "vplan train plan.toml --data clips --output run --weights Wan2.1-T2V-1.3B",
        "vplan train my-wan --gpu 24GB --data clips --output run --steps 2000",
        "vplan train plan.toml --data clips --output run --log-with tensorboard",
        "vplan train plan.toml --data clips --output run --nodes 2 --slurm job.sh",
        "vplan train plan.toml --data clips --output run --validation-mode on",
    ),
)
@request_options(searched=True)
@click.option("--data", required=True, metavar="DIR", help="Clips or images with their captions.")
@click.option("--output", required=True, metavar="DIR", help="Folder for everything the run writes.")
@click.option("--weights", metavar="DIR", help="Model folder in diffusers format; not needed for your own models.")
@click.option(
    "--steps",
    type=click.IntRange(1, 10**5),
    default=1000,
    show_default=True,
    metavar="N",
    help="Total optimizer steps.",
)
@click.option(
    "--learning-rate", type=FiniteRange(0, min_open=True), metavar="X", help="[default: 1e-4 for lora, 1e-5 for full]"
)
@click.option(
    "--lr-scheduler",
    type=click.Choice(SCHEDULES),
    default="constant",
    show_default=True,
    metavar="NAME",
    help=f"One of {', '.join(SCHEDULES)}.",
)
@click.option(
    "--warmup-steps", type=click.IntRange(0, 10**5), default=0, metavar="N", help="Learning-rate warm-up steps."
)
@click.option("--seed", type=click.IntRange(0, 10**5), default=0, show_default=True, metavar="N")
@click.option(
    "--checkpoint-every",
    type=click.IntRange(1, 10**5),
    default=50,
    show_default=True,
    metavar="N",
    help="Steps between checkpoints.",
)
@click.option(
    "--keep", type=click.IntRange(1, 10**5), default=2, show_default=True, metavar="N", help="Checkpoints to keep."
)
@click.option(
    "--resume",
    default="auto",
    show_default=True,
    metavar="auto|no|DIR",
    help="Resume from the newest complete checkpoint, start over, or resume from DIR.",
)
@click.option(
    "--validate-every",
    type=click.IntRange(1, 10**5),
    metavar="N",
    help="Steps between validation samples (default: only at the end).",
)
@click.option(
    "--validation-prompt", multiple=True, metavar="TEXT", help="Prompt of a validation sample; may be repeated."
)
@click.option(
    "--validation-prompts", metavar="FILE", help="File with one prompt per line.  [default: a caption from the data]"
)
@click.option(
    "--validation-steps", type=click.IntRange(1, 1000), metavar="N", help="Denoising steps per validation sample."
)
@click.option(
    "--validation-guidance", type=FiniteRange(0, 100), metavar="X", help="Guidance scale of validation samples."
)
@click.option("--skip-bad", is_flag=True, help="Skip unusable clips instead of refusing to start.")
@click.option(
    "--log-with",
    type=click.Choice(launch.TRACKERS),
    metavar="NAME",
    help="Also log to one of accelerate's trackers: tensorboard, wandb, ...",
)
@click.option("--node-rank", type=click.IntRange(0), default=0, metavar="N", help="Rank of this node, from 0.")
@click.option("--main-address", metavar="HOST", help="Address of the first node, with --nodes.")
@click.option(
    "--main-port", type=click.IntRange(1, 65_535), default=launch.PORT, metavar="N", help="Free port on the first node."
)
@click.option(
    "--print-command", is_flag=True, help="Prepare everything and print the launch command without running it."
)
@click.option("--slurm", metavar="FILE", help="Write a batch script for sbatch instead of training.")
@click.option(
    "--device", type=click.Choice(["cuda", "cpu"]), default="cuda", help="cpu is for tiny models.  [default: cuda]"
)
@json_option
def command(asked: TypedQuestion, data: str, output: str, as_json: bool, **said: Any) -> int:
    """Train from a plan, or plan a model and train it.

    The plan is checked against what is free now, and the data is encoded once and cached. The same command again
    resumes training from its last checkpoint. Exit code 3: it does not fit; 4: it failed for another reason.
    """
    place = Path(output).expanduser().absolute()
    if not Path(data).expanduser().is_dir():
        raise VplanError(f"there is no folder {quoted(data)}", "pass the folder with your clips: --data DIR")
    if asked.model is not None:  # before anything is planned or written
        weights_of(lookup.model(asked.model), said["weights"])
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VplanError(f"cannot make {quoted(output)}: {error.strerror}", "name another --output") from None
    with launch.locked(place, said["node_rank"]):
        planned = asked.plan is None and not (place / PLAN).exists()  # which says what it found
        console = talk() if as_json else answer_console()  # with --json stdout is for the last answer alone
        plan = preflight.ready(choose(asked, place, first=said["node_rank"] == 0, console=console))
        with stoppable(lambda: _left(place)):
            return _Train(plan, Path(data).expanduser().absolute(), place, said).run(as_json, begins=not planned)


class _Train:
    """One call of the command, its plan at hand."""

    def __init__(self, plan: Plan, data: Path, output: Path, said: dict[str, Any]) -> None:
        self.plan, self.data, self.output, self.said = plan, data, output, said
        self.device: Literal["cuda", "cpu"] = said["device"]
        self.notes: list[str] = []
        self.nodes = launch.Nodes(said["node_rank"], said["main_address"], said["main_port"])
        machine = plan.machine
        if self.nodes.rank >= machine.nodes:
            raise VplanError(f"--node-rank {self.nodes.rank} of {machine.nodes} nodes", "ranks start at 0")
        if machine.nodes > 1 and not self.nodes.address and not said["slurm"]:
            raise VplanError(
                f"{machine.nodes} nodes but no --main-address", "pass the address of the first node", USAGE
            )
        self.weights = weights_of(lookup.model(plan.job.model), said["weights"])
        self.prompts = validation.prompts(plan, said)

    def run(self, as_json: bool, *, begins: bool) -> int:
        """Checks, prepares, trains, and says how it ended. ``begins``: nothing was said of the plan yet."""
        if self.said["slurm"]:
            return write_script(Path(self.said["slurm"]).expanduser(), self.plan, self.output, as_json)
        entries = self._entries()
        launch.check_installed(self.plan, self.said["log_with"])
        self.plan, note = validation.fitted(self.plan)
        if note:
            self._note(f"warning: {note}")
        asked = preflight.PreflightOptions(device=self.device, output=self.output, keep=self.said["keep"])
        report = preflight.preflight(self.plan, asked)
        if begins:
            print_plan(talk(), self.plan, report.estimate)
        report.raise_fault()
        for one in report.checks:
            if one.level == "warning":
                self._note(f"warning: {one.what}{one.fix and f' ({one.fix})'}")
        if self.plan.machine.nodes == 1 or self.said["print_command"]:
            return self._train(entries, report.estimate, None, as_json)
        if self.nodes.rank:
            self._note("waiting for the first node")
        with Peers(self.output, self.nodes.rank, self.plan.machine.nodes) as peers:
            return self._train(entries, report.estimate, peers, as_json)

    def _note(self, *texts: str) -> None:
        self.notes += texts
        for text in texts:
            click.echo(text, err=True)

    def _entries(self) -> Path:
        """The list of cached samples: the data folder's own where it is one, else the cache's."""
        own = self.data / ENTRIES
        return own if own.is_file() else self.output / CACHE / ENTRIES

    @property
    def _listed(self) -> str | None:
        """File that lists the samples to make; None where none are."""
        return None if self.plan.strategy.validation_mode == "off" else str(self.output / CACHE / VALIDATION)

    def _preparation(self, entries: Path) -> launch.Preparation:
        return launch.Preparation(
            plan=self.plan,
            data=str(self.data),
            weights=self.weights,
            entries=str(entries),
            device=self.device,
            skip_bad=self.said["skip_bad"],
            prompts=self.prompts,
            validation=self._listed,
        )

    def _resume(self) -> Path | None:
        """The checkpoint to go on from. To start over moves the old ones aside; nothing finished is removed."""
        said, run = self.said["resume"], checkpoints.run_id(self.output)
        folder = self.output / checkpoints.FOLDER
        if said == "no":
            if folder.exists():
                aside = next(path for n in range(10**6) if not (path := self.output / f"{ASIDE}-{n}").exists())
                folder.rename(aside)
                self._note(f"earlier checkpoints are in {aside}")
            return None
        if said != "auto":
            found = Path(said).expanduser().absolute()
            checkpoints.check(found, run)
            return self._within(found)
        newest, faults = checkpoints.newest(self.output, run)
        for fault in faults:
            self._note(f"warning: skipped: {fault}")
        if newest:
            self._note(f"resuming from {newest}")
        elif faults:
            raise VplanError("no checkpoint is complete", "start over with --resume no, which keeps them aside")
        return self._within(newest) if newest else None

    def _within(self, checkpoint: Path) -> Path:
        """The checkpoint itself, where it is not of a later step than training ends at."""
        done, steps = _steps_of(checkpoint), self.said["steps"]
        assert done is not None
        if done > steps:
            fix = f"pass --steps {done} or more, or start over with --resume no"
            raise VplanError(f"{checkpoint} has {done} steps, but --steps is {steps}", fix)
        return checkpoint

    def _request(self, entries: Path, resume: Path | None) -> launch.RunRequest:
        said, output = self.said, self.output
        return launch.RunRequest(
            plan=self.plan,
            entries=str(entries),
            weights=self.weights,
            output=str(output),
            run=checkpoints.run_id(output),
            device=self.device,
            steps=said["steps"],
            learning_rate=said["learning_rate"] or RATES[self.plan.job.method],
            schedule=said["lr_scheduler"],
            warmup_steps=said["warmup_steps"],
            seed=said["seed"],
            checkpoint_every=said["checkpoint_every"],
            keep=said["keep"],
            resume=str(resume) if resume else None,
            log_with=said["log_with"],
            validation=validation.request(self._listed, said),
        )

    def _train(self, entries: Path, estimate: Estimate | None, peers: Peers | None, as_json: bool) -> int:
        """Trains to the end, with the next plan of the ladder from the last checkpoint when memory runs out."""
        output, first = self.output, self.nodes.rank == 0
        resume = self._resume() if first else None
        if first:  # for all computers
            wanted = self._preparation(entries)
            if not entries.is_file() or not validation.is_listed(wanted):
                prepared, notes = prepare(wanted, output)
                self._note(*notes)
                self._raise_unless_ok(prepared)
        begun: int | None = None
        follower: Follower | None = None
        for attempt in itertools.count():
            request = self._request(entries, resume) if first else self._told(peers, attempt, entries)
            resume = Path(request.resume) if request.resume else None
            begun = begun if attempt else _steps_of(resume)
            if self.said["print_command"]:
                return self._print_command(request, as_json)
            if peers and first:
                peers.publish(attempt, request)
            high = estimate.high_bytes if estimate and self.device == "cuda" else None
            every, done = request.checkpoint_every, _steps_of(resume) or 0
            with Follower(output / launch.METRICS, request.steps, every, high, done, follower) as follower:
                if peers:
                    ended = peers.run(attempt, request, self.nodes, follower.tick)
                else:
                    ended = launch.run(request, self.nodes, follower.tick)
            self.notes += follower.warnings
            if ended.name not in ("oom", "host-oom") or (first and not self._step_down(ended)):
                break
            resume, _ = checkpoints.newest(output, request.run)
            estimate = None
        self._raise_unless_ok(ended)
        assert follower is not None
        last = follower.last or {}
        answer = {
            "output": str(output),
            "weights": str(output / FINAL),
            "checkpoint": str(output / checkpoints.FOLDER / checkpoints.folder_name(request.steps)),
            "steps": request.steps,
            "resumed_from": begun,
            "loss": last.get("loss"),
            "step_seconds": follower.step_seconds,
            "peak": follower.peaks or None,
            "samples": follower.samples,
            "notes": self.notes,
        }
        budget = estimate.budget_bytes if estimate else lookup.parse_gpus(self.plan.machine.gpu)[1].allocatable_bytes
        show(answer, as_json, lambda console: _render(console, answer, budget))
        return DONE

    def _told(self, peers: Peers | None, attempt: int, entries: Path) -> launch.RunRequest:
        """What the first computer says to do, with this one's own paths to what they share."""
        if peers is None:  # --print-command
            return self._request(entries, None)
        request = peers.request(attempt)
        if request is None:
            why = peers.end_message() or "it ended before its ranks started"
            raise VplanError(f"the first node ended: {why}", "see its output", FAILED)
        self.plan = request.plan
        resume = str(self.output / checkpoints.FOLDER / Path(request.resume).name) if request.resume else None
        return request.replace(
            output=str(self.output), weights=self.weights, entries=str(entries), resume=resume, device=self.device
        )

    def _print_command(self, request: launch.RunRequest, as_json: bool) -> int:
        folder = launch.write_request(launch.run_folder(self.output, self.nodes), request)
        words, unset = launch.command(self.plan, folder, self.nodes), launch.foreign()
        settings = launch.settings(self.device)
        answer = {"command": words, "environment": settings, "unset": unset}
        lines = [f"unset {shlex.join(unset)}"] if unset else []
        lines += [f"export {name}={shlex.quote(value)}" for name, value in settings.items()]
        lines.append(shlex.join(words))

        def render(console: Console) -> None:
            console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)

        show(answer, as_json, render)
        return DONE

    def _step_down(self, ended: launch.Outcome) -> bool:
        """Takes the next plan and keeps the one that ran out beside it; False when there is none."""
        found = next_plan(self.plan)
        if found is None:
            return False
        kept = self.output / PLAN
        kept.replace(next(path for n in range(10**6) if not (path := self.output / f"plan.before-{n}.toml").exists()))
        write_plan(found, kept)
        self._note(f"warning: {_memory(ended)}; resuming from the last checkpoint with {difference(self.plan, found)}")
        self.plan = found
        return True

    def _raise_unless_ok(self, ended: launch.Outcome) -> None:
        """One message for whatever ended it, with where to go on from."""
        if ended.name == "ok":
            return
        if ended.name == "refused" and ended.exit_code == 1:  # before anything was trained
            raise VplanError(ended.message, ended.fix, ended.exit_code)
        message, fix = ended.message, ended.fix
        if ended.name in ("oom", "host-oom"):
            message = f"{_memory(ended)}: {message}"
            fix = "use less memory, e.g. with --gradient-checkpointing full, and run the command again"
        if ended.name == "nan":
            fix = "try a lower --learning-rate, and check the data of that step"
        raise VplanError(f"{message}; {_last(self.output)}", fix, ended.exit_code)


def _memory(ended: launch.Outcome) -> str:
    """Which memory was short, and at which shape."""
    shape = ended.shape
    size = f" at {shape['frames']}x{shape['height']}x{shape['width']}" if shape else ""
    return f"out of {'GPU' if ended.name == 'oom' else 'host'} memory{size}"


def _last(output: Path) -> str:
    """The checkpoint to go on from, in words."""
    newest, _ = checkpoints.newest(output, checkpoints.run_id(output))
    return f"the last good checkpoint is {newest}" if newest else "there is no checkpoint yet"


def _left(output: Path) -> str:
    """What a run that was stopped leaves behind."""
    return f"{_last(output)}; encoded data is kept, and the same command resumes from there"


def _steps_of(checkpoint: Path | None) -> int | None:
    """The steps a checkpoint has done."""
    if checkpoint is None:
        return None
    return int(json.loads((checkpoint / checkpoints.MANIFEST).read_text(encoding="utf-8"))["step"])


def _render(console: Console, answer: dict[str, Any], budget: int) -> None:
    loss, peak = answer["loss"], (answer["peak"] or {}).get("device_bytes")
    console.print(f"trained to step {answer['steps']}", style="bold green", end="")
    console.print("" if loss is None else f", loss {loss:.4f}")
    if peak is not None:
        console.print(f"used {gib(peak):.2f} GiB of {gib(budget):.2f}")
        console.print(memory_bar(console, peak, budget, "bold green"))
    for name in ("weights", "checkpoint"):
        console.print(f"{name}: {answer[name]}", markup=False, soft_wrap=True)
    if answer["samples"]:
        console.print(f"samples: {len(answer['samples'])} in {Path(answer['samples'][0]).parent}", markup=False)
    if console.is_terminal:
        console.print()
        more = f"to continue, the same with --steps {2 * answer['steps']}"
        console.print(f"next: {more}", style="bold", markup=False, soft_wrap=True)
