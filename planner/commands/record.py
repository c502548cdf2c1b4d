"""`vplan record`: records the tapes of a model (the user's own or a bundled one), or checks that existing ones are
still the same.

Nothing here imports torch: `planner.launch.recorders` starts the processes that record.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack

import click

import profiles
from planner.catalog import diffusers_folder, lookup, user_data
from planner.catalog.components import COMPONENTS, Component, components
from planner.catalog.own_code import NamedClass
from planner.catalog.own_inputs import OwnInputs
from planner.catalog.profiles import ModelProfile
from planner.commands import USAGE
from planner.commands._shared import own_model
from planner.commands._shared.verb import Verb, examples, json_option, show
from planner.errors import VplanError, quoted
from planner.launch.recorders import CHECKOUT, PARAMETERS, Recorders, TapeTask, Within
from planner.tape import packs
from planner.tape.parameter_table import FILE as PARAMETERS_FILE
from planner.terminal import console, echo

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
"""Packages that recording imports, which a laptop used only for planning lacks."""

MOST_NAMED = 3
"""Most tapes that one line names."""


class _OwnFacts(TypedDict):
    """Options about a model of the user's own."""

    name: str | None
    inputs_file: str | None
    class_name: str | None
    code_folder: str | None


class RecordedTape(NamedTuple):
    """A recorded tape: the size of its file, and how it differs from the existing file ("" if it does not)."""

    task: TapeTask
    nbytes: int
    difference: str
    unclassified: tuple[str, ...] = ()
    """operators not compared with CUDA's"""


@click.command(
    cls=Verb,
    epilog=examples(
        "vplan record ~/models/my-wan --name my-wan",
        "vplan record ~/models/my-wan/transformer/config.json --all",
        "vplan record config.json --class video:MyModel --path ~/code --name mine",
        "vplan record mochi-1 --variant optimizer-lora-fp32-lion-foreach",
        "vplan record wan2.1-t2v-1.3b -o tapes",
        "vplan record --check --jobs 4",
    ),
)
@click.argument("models", nargs=-1, metavar="[FOLDER|CONFIG.json|MODEL]...")
@click.option("--name", metavar="NAME", help="Name for the model in FOLDER.  [default: the folder's name]")
@click.option(
    "--inputs",
    "inputs_file",
    metavar="FILE.toml",
    help="What forward of the model in FOLDER is called with, where its class does not tell.",
)
@click.option(
    "--class",
    "class_name",
    metavar="MODULE:CLASS",
    help="Class of the model in FOLDER, where it is your own code or of transformers: runs that code, without network.",
)
@click.option("--path", "code_folder", metavar="DIR", help="Folder that holds MODULE of --class.")
@click.option(
    "--variant",
    "texts",
    metavar="TEXT",
    multiple=True,
    help="Only the variant named TEXT, or those with TEXT in their name.",
)
@click.option("--all", "everything", is_flag=True, help="All variants of your own model, not only those needed first.")
@click.option("--check", is_flag=True, help="Write nothing, name every tape that would change; exit 1 if any.")
@click.option(
    "--jobs", type=click.IntRange(1, 256), metavar="N", default=1, show_default=True, help="Number of processes."
)
@click.option("-o", "--output", metavar="FOLDER", help="Folder for the tapes.  [default: vplan's own]")
@json_option
def command(
    models: Sequence[str],
    texts: Sequence[str],
    everything: bool,
    check: bool,
    jobs: int,
    output: str | None,
    as_json: bool,
    **own: Unpack[_OwnFacts],
) -> None:
    """Record the tapes that estimates are computed from.

    A tape holds every allocation of one real training step, recorded with fake tensors: no GPU, no weights, no
    download. Recording needs the training dependencies: pip install 'vplan[train]'.

    FOLDER is a model of your own in diffusers format, or its config.json: any transformer or UNet of diffusers. How a
    class that no bundled model has is called is found out by dry runs; --inputs FILE says what they cannot find. With
    --class the model is of transformers or of your own code: that code runs then, in a process without network.

    The model is kept in your data folder (set VPLAN_HOME to change it) and then known everywhere by its name and its
    folder. Tapes of it that are up to date are not recorded again. MODEL is a bundled model, whose tapes are replaced,
    those of its VAE and text encoders too; without any, all bundled models are recorded: 80 to 180 tapes each, 2 to 40
    seconds per tape. --check says of each tape that would change what differs (sizes, order or operators) and how far
    the peak at the model's default shape moves; what models of one architecture share is compared once.
    """
    name, inputs_file = own["name"], own["inputs_file"]
    folders = [model for model in models if own_model.is_folder(model)]
    _check_use(models, folders, name, check, output)
    if inputs_file is not None and not folders:
        raise VplanError("--inputs is for a folder or config.json", "pass the folder of your model", USAGE)
    code = _own_code(own, models, folders)
    inputs = OwnInputs() if inputs_file is None else OwnInputs.from_file(Path(inputs_file))
    sources = [own_model.read(model, name, code) for model in folders]
    _require_torch()
    folder = Path(output) if output else _default_folder(check)
    if code is not None:
        echo(f"--class {code.class_name} {code.words} ...", err=True)
    with Recorders(jobs, _runs(code) if code else None) as recorders:
        own_models = [own_model.keep(source, chosen, inputs, recorders) for source, chosen in sources]
        names_of_known = [lookup.model(model).name for model in models if model not in folders]
        names = [entry.profile.name for entry in own_models] + names_of_known or list(profiles.model_names())
        tasks = _tasks(dict.fromkeys(names), _VariantSelection(tuple(texts), everything, check), folder)
        tasks = list(_each_text_once(tasks)) if check else tasks
        try:
            recorded = _all_done(tasks, recorders)
        except VplanError:
            for entry in own_models:
                user_data.forget(entry.profile.name)
            raise
    _refuse_changed([tape for tape in recorded if tape.difference], len(recorded))
    ours = [] if check else [task for task in tasks if task.path.is_relative_to(profiles.TAPES)]
    packs.pack_folders({task.path.parent: task.component or lookup.model(task.model).family for task in ours})
    answer = {
        "folder": str(user_data.tapes() if own_models or any(lookup.model(name).is_own for name in names) else folder),
        "checked": check,
        "own": [entry.to_json() for entry in own_models],
        "tapes": [{"model": tape.task.model, "variant": tape.task.variant, "bytes": tape.nbytes} for tape in recorded],
        "unclassified": sorted({name for tape in recorded for name in tape.unclassified}),
    }
    show(answer, as_json, lambda console: _render(console, answer, own_models))


def _check_use(models: Sequence[str], folders: list[str], name: str | None, check: bool, output: str | None) -> None:
    if name is not None and (len(models) != 1 or not folders):
        for model in models:
            if model.lower() not in lookup.model_names() and not os.path.exists(os.path.expanduser(model)):
                raise VplanError(f"there is no {quoted(model)}", "pass the folder of your model, or its config.json")
        raise VplanError("--name is for one folder or config.json", "pass the folder of your model", USAGE)
    if folders and check:
        raise VplanError("--check is for recorded models", "pass the model's name instead of its folder", USAGE)
    for model in set(models) - set(folders):
        if diffusers_folder.locate(model) is not None:
            # Recording the bundled model takes minutes and replaces its tapes.
            fix = f"write ./{model} for the folder; for the bundled model, call it where no such folder is"
            raise VplanError(f"{quoted(model)} is a model in a folder here, and the name of a bundled one", fix)
    own_names = user_data.model_names()
    if output and (folders or any(model.lower() in own_names for model in models)):
        raise VplanError(
            "-o is not supported for your own models", f"set {user_data.VARIABLE} to keep them elsewhere", USAGE
        )


def _runs(code: NamedClass) -> Within:
    """The context that starts workers; if they may run the user's own code, without network access."""
    from planner.rehearsal.without_network import without_network

    return lambda command, folder: without_network(command, folder, code.environment)


def _own_code(own: _OwnFacts, models: Sequence[str], folders: list[str]) -> NamedClass | None:
    """The user's own class, if one was named."""
    if own["class_name"] is None:
        if own["code_folder"] is not None:
            raise VplanError("--path is for --class", "add --class MODULE:CLASS, or leave it out", USAGE)
        return None
    if len(models) != 1 or not folders:
        raise VplanError("--class is for one folder or config.json", "pass the config.json of your model", USAGE)
    return NamedClass.of(own["class_name"], own["code_folder"])


def _all_done(tasks: list[TapeTask], recorders: Recorders) -> list[RecordedTape]:
    """Records everything in the requested order, and reports each tape that differs. Raises a VplanError at the first
    that cannot be recorded."""
    recorded = []
    for entry in _with_progress(_run(tasks, recorders), len(tasks)):
        if entry.difference:
            echo(f"{entry.task.of} {entry.task.variant}: {entry.difference}", err=True)
        recorded.append(entry)
    return sorted(recorded, key=lambda entry: tasks.index(entry.task))


def _refuse_changed(changed: list[RecordedTape], count: int) -> None:
    """Raises a VplanError if existing tapes differ from what is recorded now."""
    if not changed:
        return
    first = changed[0].task
    fault = f"{len(changed)} of {count} tapes differ from a new recording"
    if count == 1:
        fault = f"tape {first.variant} of {first.of} differs from a new recording"
    models = dict.fromkeys(tape.task.model for tape in changed)
    variants = dict.fromkeys(tape.task.variant for tape in changed if tape.task.model == first.model)
    named = "".join(f" --variant {variant}" for variant in itertools.islice(variants, MOST_NAMED))
    more = ", and so on" if len(models) > 1 or len(variants) > MOST_NAMED else ""
    raise VplanError(fault, f"vplan record {first.model}{named}{more}")


def _render(console: Console, answer: dict[str, Any], own_models: Sequence[own_model.Kept]) -> None:
    for entry in own_models:
        profile = entry.profile
        size = f"{profile.parameters:,} parameters"
        console.print(f"{profile.name}: {profile.diffusers_class}, {size}, {profile.blocks} blocks", markup=False)
        for note in entry.notes:
            console.print(note, markup=False)
    what = "unchanged" if answer["checked"] else "written"
    kilobytes = sum(tape["bytes"] for tape in answer["tapes"]) / 1000
    where = f"{kilobytes:.0f} kB in {answer['folder']}"
    console.print(f"tapes {what}: {len(answer['tapes'])}, {where}", markup=False, soft_wrap=True)
    if answer["unclassified"]:
        names = ", ".join(answer["unclassified"])
        console.print(f"not compared with CUDA, so less certain: {names}", markup=False)
    for entry in own_models:
        console.print(f"next: vplan suggest {entry.profile.name} --gpu 24GB", markup=False)


def _require_torch() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise VplanError(f"recording needs {', '.join(missing)}: not installed", "pip install 'vplan[train]'")


def _default_folder(check: bool) -> Path:
    """The folder of the bundled models' tapes; if it is not writable, new tapes go to the user's folder instead."""
    return profiles.TAPES if check or os.access(profiles.TAPES, os.W_OK) else user_data.tapes()


class _VariantSelection(NamedTuple):
    """Which variants of each model to record: those whose name contains a text, all, or those needed first (own
    models)."""

    texts: tuple[str, ...]
    everything: bool
    check: bool

    def matches(self, variant: str, variant_names: Collection[str]) -> bool:
        """Whether a variant's name contains one of the texts; a text that is a complete name matches only that
        variant."""
        return not self.texts or any(
            text == variant if text in variant_names else text in variant for text in self.texts
        )


def _tasks(models: dict[str, None], selection: _VariantSelection, folder: Path) -> list[TapeTask]:
    tasks: list[TapeTask] = []
    seen_components: dict[Component, None] = {}
    for model in models:
        profile = lookup.model(model)
        if profile.is_own:
            tasks += _own_tasks(profile, selection)
            continue
        named = [(name, folder / model / f"{name}.json.gz") for name in _names(profile, selection)]
        if selection.check:  # not all of them are shipped
            required = {*own_model.first_variants(profile), *selection.texts}
            named = [(name, path) for name, path in named if name in required or packs.is_stored(path)]
        tasks += [TapeTask(model, name, "", path, selection.check) for name, path in named]
        tasks.append(TapeTask(model, PARAMETERS, "", folder / model / PARAMETERS_FILE, selection.check))
        for part in components(profile):
            if part not in seen_components:
                seen_components[part] = None
                path = folder / COMPONENTS / part.name / f"{part.variant}.json.gz"
                tasks.append(TapeTask(model, part.variant, part.name, path, selection.check))
    task_names = {task.variant for task in tasks}
    chosen = [
        task
        for task in tasks
        if selection.matches(task.variant, task_names)
        or (task.component and selection.matches(task.component, task_names))
    ]
    if tasks and not chosen:
        fault = f"no variant has {' or '.join(map(quoted, selection.texts))} in its name"
        raise VplanError(fault, f"names look like {tasks[0].variant}")
    return [task for task in chosen if not lookup.model(task.model).is_own or _is_due(task)]


def _each_text_once(tasks: Iterable[TapeTask]) -> Iterator[TapeTask]:
    """Drops tapes identical to those of an earlier model of the same architecture."""
    seen: set[tuple[str, str, str]] = set()
    for task in tasks:
        if task.component or task.path.is_file() or not packs.is_stored(task.path):
            yield task
            continue
        profile = lookup.model(task.model)
        architecture = json.dumps([profile.diffusers_class, profile.config], sort_keys=True)
        key = architecture, task.variant, packs.digest(task.path)
        if key not in seen:
            seen.add(key)
            yield task


def _own_tasks(profile: ModelProfile, selection: _VariantSelection) -> list[TapeTask]:
    """The recordings that an own model may need, including its VAE and text encoders unless they are bundled."""
    names = _names(profile, selection)
    if not selection.texts and not selection.everything and not selection.check:
        names = list(own_model.first_variants(profile))
    folder = user_data.tapes() / profile.name
    tasks = [TapeTask(profile.name, name, "", folder / f"{name}.json.gz", selection.check) for name in names]
    tasks.append(TapeTask(profile.name, PARAMETERS, "", folder / PARAMETERS_FILE, selection.check))
    known_vaes = {lookup.model(name).vae.class_name for name in profiles.model_names()}
    for part in components(profile):
        if part.name == profile.vae.folder and profile.vae.class_name not in known_vaes:
            continue  # the shape of its input is unknown: estimates count its weights only, and say so
        place = Path(COMPONENTS, part.name, f"{part.variant}.json.gz")
        if not packs.is_stored(profiles.TAPES / place):
            tasks.append(TapeTask(profile.name, part.variant, part.name, user_data.tapes() / place, selection.check))
    return tasks


def _is_due(task: TapeTask) -> bool:
    """Whether a tape of an own model is to be recorded or checked; existing ones are not recorded again."""
    return packs.is_stored(task.path) if task.check else not own_model.is_current(task.path)


def _names(profile: ModelProfile, selection: _VariantSelection) -> list[str]:
    """The names of a model's variants. Those that are rarely needed are included only if named in full; a check
    includes all."""
    from planner.tape.variants.inventory import default_variants, requested_variants, step_variants_in_own_code

    usual = [variant.name for variant in default_variants(profile)]
    further = [variant.name for variant in requested_variants(profile)]
    if CHECKOUT not in os.environ:  # tapes of another trainer's code are only checked where that code is available
        elsewhere = {variant.name for variant in step_variants_in_own_code(profile)}
        further = [name for name in further if name in selection.texts or name not in elsewhere]
    return usual + [name for name in further if name in selection.texts or (selection.check and not profile.is_own)]


def _run(tasks: Sequence[TapeTask], recorders: Recorders) -> Iterator[RecordedTape]:
    """Yields the recordings as they finish."""
    for position, answer in recorders.answers(tasks):
        unclassified = tuple(answer["unclassified"])
        yield RecordedTape(tasks[position], answer["nbytes"], answer["difference"], unclassified)


def _with_progress(entries: Iterator[RecordedTape], total: int) -> Iterator[RecordedTape]:
    """Passes the entries on, and shows a bar on stderr with the name of the latest tape."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    errors = console(stderr=True)
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        bar = progress.add_task("", total=total)
        for entry in entries:
            progress.update(bar, advance=1, description=f"{entry.task.model} {entry.task.variant}")
            yield entry
