"""`vplan record`: records the tapes of our models again, or says whether the ones there are still what is recorded.

The one command that runs torch: `trainers` is imported inside it, in this process or in the workers of `--jobs`.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

import profiles
from planner import catalog
from planner.commands.common import Verb, examples, json_option, show
from planner.errors import VplanError, quoted
from planner.parameters import FILE as PARAMETERS_FILE

if TYPE_CHECKING:
    from rich.console import Console

NEEDED = ("torch", "diffusers", "accelerate", "peft", "bitsandbytes")
"""What recording imports. A planning laptop has none of them."""

NOT_COMPARED = ("versions",)
"""Keys of a tape that may differ: another torch may well record the same allocations."""


PARAMETERS = "parameters"
"""The table of a model's parameters, recorded beside its tapes."""


class Task(NamedTuple):
    """One tape to record, and the file it is written to or compared with."""

    model: str
    variant: str
    path: Path
    check: bool


class Done(NamedTuple):
    """A recorded tape: its file's size, and where it differs from the file that is there ("" when it does not)."""

    task: Task
    nbytes: int
    difference: str


@click.command(
    cls=Verb,
    epilog=examples(
        "vplan record wan2.1-t2v-1.3b -o tapes",
        "vplan record --check --jobs 4",
        "vplan record flux.1-dev --variant step-lora --check",
    ),
)
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option("--variant", "text", metavar="TEXT", default="", help="Only variants with TEXT in their name.")
@click.option("--check", is_flag=True, help="Write nothing; exit 1 at the first tape that is not what is recorded now.")
@click.option("--jobs", type=click.IntRange(1, 256), default=1, show_default=True, help="Processes at once.")
@click.option("-o", "--output", metavar="FOLDER", help="Folder of the tapes.  [default: vplan's own]")
@json_option
def command(models: Sequence[str], text: str, check: bool, jobs: int, output: str | None, as_json: bool) -> None:
    """Record the tapes that estimates are read from.

    A tape is every allocation of one real training step, recorded with fake tensors: no GPU, no weights, no download.
    It needs what training needs: pip install 'vplan[train]'. A model has some forty tapes, of 2 to 30 seconds each.
    Without MODEL, all models are recorded.
    """
    names = [catalog.model(name).name for name in models] or list(catalog.model_names())
    folder = Path(output) if output else profiles.TAPES
    _require_torch()
    tasks = _tasks(dict.fromkeys(names), text, folder, check)
    done = []
    for entry in _with_progress(_run(tasks, jobs), len(tasks)):
        if entry.difference:
            task = entry.task
            raise VplanError(
                f"tape {task.variant} of {task.model} is not what is recorded now: {entry.difference}",
                f"vplan record {task.model} --variant {task.variant}",
            )
        done.append(entry)
    done.sort(key=lambda entry: tasks.index(entry.task))
    answer = {
        "folder": str(folder),
        "checked": check,
        "tapes": [{"model": task.model, "variant": task.variant, "bytes": nbytes} for task, nbytes, _ in done],
    }

    def render(console: Console) -> None:
        what = "as recorded now" if check else "written"
        kilobytes = sum(entry.nbytes for entry in done) / 1000
        console.print(f"tapes {what}: {len(done)}, {kilobytes:.0f} kB in {folder}", markup=False)

    show(answer, as_json, render)


def _require_torch() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise VplanError(f"recording needs {', '.join(missing)}, not installed here", "pip install 'vplan[train]'")


def _tasks(models: dict[str, None], text: str, folder: Path, check: bool) -> list[Task]:
    from planner.variants import OptimizerVariant, StepVariant

    variants = [
        (model, variant.name)
        for model in models
        for kind in (StepVariant, OptimizerVariant)
        for variant in kind.all(catalog.model(model))
    ]
    chosen = [(model, name) for model, name in variants if text in name]
    if not chosen and text not in PARAMETERS:
        raise VplanError(f"no variant has {quoted(text)} in its name", f"they are named like {variants[0][1]}")
    tables = [Task(model, PARAMETERS, folder / model / PARAMETERS_FILE, check) for model in models]
    found = [Task(model, name, folder / model / f"{name}.json.gz", check) for model, name in chosen]
    return found + [table for table in tables if text in PARAMETERS]


def _run(tasks: Sequence[Task], jobs: int) -> Iterator[Done]:
    """The recordings as they end. Several processes are spawned, because torch's threads do not survive a fork."""
    if jobs == 1:
        yield from map(_record, tasks)
        return
    with ProcessPoolExecutor(min(jobs, len(tasks)), get_context("spawn")) as pool:
        futures = [pool.submit(_record, task) for task in tasks]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _with_progress(entries: Iterator[Done], total: int) -> Iterator[Done]:
    """Passes the entries on, with a bar on stderr that names the tape recorded last."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=total)
        for entry in entries:
            progress.update(bar, advance=1, description=f"{entry.task.model} {entry.task.variant}")
            yield entry


def _record(task: Task) -> Done:
    """Records one tape and writes it, or compares it. Runs in a worker when there are several jobs."""
    from trainers import tapes

    profile = catalog.model(task.model)
    if task.variant == PARAMETERS:
        tape = tapes.parameter_table(profile)
    else:
        variant = next(variant for variant in tapes.all_variants(profile) if variant.name == task.variant)
        record = tapes.step_tape if variant.name.startswith("step-") else tapes.optimizer_tape
        tape = record(profile, variant)
    if not task.check:
        return Done(task, tapes.write(tape, task.path).stat().st_size, "")
    if not task.path.is_file():
        return Done(task, 0, f"there is no {task.path}")
    there = _read(task.path)
    for key in NOT_COMPARED:
        there.pop(key, None)
        tape.pop(key, None)
    return Done(task, task.path.stat().st_size, first_difference(there, tape))


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
