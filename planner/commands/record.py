"""`vplan record`: records the tapes of a model of your own, or ours again, or says whether they are still the same.

The one command that runs torch: `trainers` is imported inside it, in this process or in the workers of `--jobs`.
"""

from __future__ import annotations

import gzip
import importlib.util
import itertools
import json
import os
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

import profiles
from planner.catalog import lookup, user_data
from planner.catalog.components import COMPONENTS, Component, components
from planner.catalog.profiles import ModelProfile
from planner.commands import USAGE
from planner.commands._shared import own_model
from planner.commands._shared.verb import Verb, examples, json_option, show
from planner.errors import VplanError, quoted
from planner.tape.parameter_table import FILE as PARAMETERS_FILE

if TYPE_CHECKING:
    from rich.console import Console

NEEDED = (
    "torch",
    "diffusers",
    "accelerate",
    "peft",
    "bitsandbytes",
    "transformers",
    "torchao",
    "prodigyopt",
    "came_pytorch",
)
"""What recording imports. A planning laptop has none of them."""

NOT_COMPARED = ("versions",)
"""Keys of a tape that may differ: another torch may well record the same allocations."""


PARAMETERS = "parameters"
"""The table of a model's parameters, recorded beside its tapes."""


class Task(NamedTuple):
    """One tape to record, and the file it is written to or compared with."""

    model: str
    variant: str
    component: str
    """the VAE or text encoder of that model it is a tape of; empty: the model itself"""
    path: Path
    check: bool


class RecordedTape(NamedTuple):
    """A recorded tape: its file's size, and where it differs from the file that is there ("" when it does not)."""

    task: Task
    nbytes: int
    difference: str
    unclassified: tuple[str, ...] = ()
    """operators nobody has compared with CUDA's"""


@click.command(
    cls=Verb,
    epilog=examples(
        "vplan record ~/models/my-wan --name my-wan",
        "vplan record ~/models/my-wan/transformer/config.json --all",
        "vplan record mochi-1 --variant optimizer-lora-fp32-lion-foreach",
        "vplan record wan2.1-t2v-1.3b -o tapes",
        "vplan record --check --jobs 4",
    ),
)
@click.argument("models", nargs=-1, metavar="[FOLDER|CONFIG.json|MODEL]...")
@click.option("--name", metavar="NAME", help="Name for the model in FOLDER.  [default: the folder's name]")
@click.option(
    "--variant",
    "texts",
    metavar="TEXT",
    multiple=True,
    help="Only the variant named TEXT, or those with TEXT in their name.",
)
@click.option("--all", "everything", is_flag=True, help="All variants of your own model, not only those needed first.")
@click.option("--check", is_flag=True, help="Write nothing; exit 1 at the first tape that would change.")
@click.option("--jobs", type=click.IntRange(1, 256), default=1, show_default=True, help="Number of processes.")
@click.option("-o", "--output", metavar="FOLDER", help="Folder for the tapes.  [default: vplan's own]")
@json_option
def command(
    models: Sequence[str],
    name: str | None,
    texts: Sequence[str],
    everything: bool,
    check: bool,
    jobs: int,
    output: str | None,
    as_json: bool,
) -> None:
    """Record the tapes that estimates are computed from.

    A tape holds every allocation of one real training step, recorded with fake tensors: no GPU, no weights, no
    download. Recording needs the training dependencies: pip install 'vplan[train]'.

    FOLDER is a model of your own in diffusers format, or its config.json. It is kept in your data folder (set
    VPLAN_HOME to change it) and then known everywhere by its name and its folder. Existing tapes are not recorded
    again. MODEL is a known model; without any, all bundled models are recorded: 80 to 180 tapes each, 2 to 40 seconds
    per tape.
    """
    folders = [model for model in models if own_model.is_folder(model)]
    _check_use(models, folders, name, check, output)
    sources = [own_model.read(model, name) for model in folders]
    _require_torch()
    kept = [own_model.keep(source, chosen) for source, chosen in sources]
    known = [lookup.model(model).name for model in models if model not in folders]
    names = [entry.profile.name for entry in kept] + known or list(profiles.model_names())
    folder = Path(output) if output else _default_folder(check)
    tasks = _tasks(dict.fromkeys(names), _Wanted(tuple(texts), everything, check), folder)
    try:
        done = _all_done(tasks, jobs)
    except VplanError:
        for entry in kept:
            user_data.forget(entry.profile.name)
        raise
    answer = {
        "folder": str(user_data.tapes() if kept or any(lookup.model(name).is_own for name in names) else folder),
        "checked": check,
        "own": [entry.to_json() for entry in kept],
        "tapes": [{"model": entry.task.model, "variant": entry.task.variant, "bytes": entry.nbytes} for entry in done],
        "unclassified": sorted({name for entry in done for name in entry.unclassified}),
    }
    show(answer, as_json, lambda console: _render(console, answer, kept))


def _check_use(models: Sequence[str], folders: list[str], name: str | None, check: bool, output: str | None) -> None:
    if name is not None and (len(models) != 1 or not folders):
        raise VplanError("--name is for one folder or config.json", "name the folder of your model", USAGE)
    if folders and check:
        raise VplanError("--check is for what is recorded", "give the model's name instead of its folder", USAGE)
    own_names = user_data.model_names()
    if output and (folders or any(model.lower() in own_names for model in models)):
        raise VplanError("-o is not for your own models", f"set {user_data.VARIABLE} to keep them elsewhere", USAGE)


def _all_done(tasks: list[Task], jobs: int) -> list[RecordedTape]:
    """Everything recorded, in the order asked for; a VplanError at the first tape that differs or cannot be made."""
    done = []
    for entry in _with_progress(_run(tasks, jobs), len(tasks)):
        if entry.difference:
            task = entry.task
            raise VplanError(
                f"tape {task.variant} of {task.model} is not what is recorded now: {entry.difference}",
                f"vplan record {task.model} --variant {task.variant}",
            )
        done.append(entry)
    return sorted(done, key=lambda entry: tasks.index(entry.task))


def _render(console: Console, answer: dict[str, Any], kept: Sequence[own_model.Kept]) -> None:
    for entry in kept:
        profile = entry.profile
        size = f"{profile.parameters:,} parameters"
        console.print(f"{profile.name}: {profile.diffusers_class}, {size}, {profile.blocks} blocks", markup=False)
        for note in entry.notes:
            console.print(note, markup=False)
    what = "as recorded now" if answer["checked"] else "written"
    kilobytes = sum(tape["bytes"] for tape in answer["tapes"]) / 1000
    console.print(f"tapes {what}: {len(answer['tapes'])}, {kilobytes:.0f} kB in {answer['folder']}", markup=False)
    if answer["unclassified"]:
        names = ", ".join(answer["unclassified"])
        console.print(f"not compared with what CUDA does, so less sure: {names}", markup=False)
    for entry in kept:
        console.print(f"next: vplan suggest {entry.profile.name} --gpu 24GB", markup=False)


def _require_torch() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise VplanError(f"recording needs {', '.join(missing)}, not installed here", "pip install 'vplan[train]'")


def _default_folder(check: bool) -> Path:
    """Where our own models' tapes are; where nobody may write there, new ones go to the user's beside them."""
    return profiles.TAPES if check or os.access(profiles.TAPES, os.W_OK) else user_data.tapes()


class _Wanted(NamedTuple):
    """Which variants of each model: those with a text in their name, all, or what is needed first (own models)."""

    texts: tuple[str, ...]
    everything: bool
    check: bool

    def names(self, variant: str, known: Collection[str]) -> bool:
        """Whether a name has one of the texts in it; a text that is a variant's whole name means that one alone."""
        return not self.texts or any(text == variant if text in known else text in variant for text in self.texts)


def _tasks(models: dict[str, None], wanted: _Wanted, folder: Path) -> list[Task]:
    tasks: list[Task] = []
    around: dict[Component, None] = {}
    for model in models:
        profile = lookup.model(model)
        if profile.is_own:
            tasks += _own_tasks(profile, wanted)
            continue
        named = [(name, folder / model / f"{name}.json.gz") for name in _names(profile, wanted)]
        if wanted.check:  # not all of them are shipped
            due = {*own_model.first_variants(profile), *wanted.texts}
            named = [(name, path) for name, path in named if name in due or path.is_file()]
        tasks += [Task(model, name, "", path, wanted.check) for name, path in named]
        tasks.append(Task(model, PARAMETERS, "", folder / model / PARAMETERS_FILE, wanted.check))
        for part in components(profile):
            if part not in around:
                around[part] = None
                path = folder / COMPONENTS / part.name / f"{part.variant}.json.gz"
                tasks.append(Task(model, part.variant, part.name, path, wanted.check))
    known = {task.variant for task in tasks}
    chosen = [
        task
        for task in tasks
        if wanted.names(task.variant, known) or (task.component and wanted.names(task.component, known))
    ]
    if tasks and not chosen:
        fault = f"no variant has {' or '.join(map(quoted, wanted.texts))} in its name"
        raise VplanError(fault, f"they are named like {tasks[0].variant}")
    return [task for task in chosen if not lookup.model(task.model).is_own or _is_due(task)]


def _own_tasks(profile: ModelProfile, wanted: _Wanted) -> list[Task]:
    """What an own model may need: its VAE and text encoders too, unless they come with vplan."""
    names = _names(profile, wanted)
    if not wanted.texts and not wanted.everything and not wanted.check:
        names = list(own_model.first_variants(profile))
    tasks = [
        Task(profile.name, name, "", user_data.tapes() / profile.name / f"{name}.json.gz", wanted.check)
        for name in names
    ]
    tasks.append(Task(profile.name, PARAMETERS, "", user_data.tapes() / profile.name / PARAMETERS_FILE, wanted.check))
    for part in components(profile):
        place = Path(COMPONENTS, part.name, f"{part.variant}.json.gz")
        if not (profiles.TAPES / place).is_file():
            tasks.append(Task(profile.name, part.variant, part.name, user_data.tapes() / place, wanted.check))
    return tasks


def _is_due(task: Task) -> bool:
    """Whether a tape of an own model is to be recorded, or checked: what is there is not recorded again."""
    return task.path.is_file() if task.check else not own_model.is_current(task.path)


def _names(profile: ModelProfile, wanted: _Wanted) -> list[str]:
    """The names of a model's variants; of those that nobody needs unasked, the ones that are asked for in full, and to
    be checked all of them."""
    from planner.tape.variants import OptimizerVariant, SampleVariant, StepVariant

    kinds = (StepVariant, SampleVariant, OptimizerVariant)
    usual = [variant.name for kind in kinds for variant in kind.all(profile)]
    further = [variant.name for variant in StepVariant.on_request(profile)]
    return usual + [name for name in further if name in wanted.texts or (wanted.check and not profile.is_own)]


def _run(tasks: Sequence[Task], jobs: int) -> Iterator[RecordedTape]:
    """The recordings as they end. Several processes are spawned, because torch's threads do not survive a fork."""
    if jobs == 1 or not tasks:
        yield from map(_record, tasks)
        return
    with ProcessPoolExecutor(min(jobs, len(tasks)), get_context("spawn")) as pool:
        futures = [pool.submit(_record, task) for task in tasks]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _with_progress(entries: Iterator[RecordedTape], total: int) -> Iterator[RecordedTape]:
    """Passes the entries on, with a bar on stderr that names the tape recorded last."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=total)
        for entry in entries:
            progress.update(bar, advance=1, description=f"{entry.task.model} {entry.task.variant}")
            yield entry


def _record(task: Task) -> RecordedTape:
    """Records one tape and writes it, or compares it. Runs in a worker when there are several jobs."""
    from planner.tape.variants import StepVariant
    from trainers.recording import tapes
    from trainers.recording.op_table import CLASSIFIED

    profile = lookup.model(task.model)
    if task.component:
        tape = tapes.component_tape(profile, Component(task.component, task.variant))
    elif task.variant == PARAMETERS:
        tape = tapes.parameter_table(profile)
    else:
        known = itertools.chain(tapes.all_variants(profile), StepVariant.on_request(profile))
        variant = next(variant for variant in known if variant.name == task.variant)
        tape = _of_own(tapes.record, profile, variant) if profile.is_own else tapes.record(profile, variant)
    if not task.check:
        unclassified = tuple(name for name in tape.get("operators", ()) if name not in CLASSIFIED)
        return RecordedTape(task, tapes.write(tape, task.path).stat().st_size, "", unclassified)
    if not task.path.is_file():
        return RecordedTape(task, 0, f"there is no {task.path}")
    there = _read(task.path)
    for key in NOT_COMPARED:
        there.pop(key, None)
        tape.pop(key, None)
    return RecordedTape(task, task.path.stat().st_size, first_difference(there, tape))


Recording = Callable[[ModelProfile, Any], dict[str, Any]]


def _of_own(record: Recording, profile: ModelProfile, variant: Any) -> dict[str, Any]:
    """Records a model whose config nobody vouches for: what its class makes of it may well fail."""
    from trainers.recording.own import REFUSALS, refusal

    try:
        return record(profile, variant)
    except VplanError:
        raise
    except REFUSALS as error:
        fault = f"a training step of {profile.name} cannot be run as {profile.diffusers_class} of {profile.lent_by}"
        raise refusal(error, fault, "complete the config, and name the pipeline's folder if there is one") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise VplanError(f"tape {path.name} is damaged ({type(error).__name__})", "record it again") from None
    return found


def first_difference(there: Any, now: Any, where: str = "") -> str:
    """Where two trees of JSON first differ, and how; "" when they are equal."""
    if isinstance(there, dict) and isinstance(now, dict):
        for key in sorted(there.keys() | now.keys()):
            inside = f"{where}.{key}" if where else key
            if key not in there or key not in now:
                return f"{inside} is {'recorded now only' if key in now else 'not recorded any more'}"
            if found := first_difference(there[key], now[key], inside):
                return found
        return ""
    if isinstance(there, list) and isinstance(now, list):
        for index, (one, other) in enumerate(zip(there, now, strict=False)):
            if found := first_difference(one, other, f"{where}[{index}]"):
                return found
        return "" if len(there) == len(now) else f"{where} has {len(there)} entries, recorded {len(now)}"
    return "" if there == now else f"{where} is {quoted(there)}, recorded {quoted(now)}"
