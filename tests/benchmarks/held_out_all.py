"""Holds every shipped tape to a direct recording at a shape it was not made from, and keeps what came out.

    python -m tests.benchmarks.held_out_all [MODEL ...] [--until HH:MM] [--only TEXT] [--jobs N] [--list]

One line of `held_out.jsonl` per tape: its digest, the shape, both allocated peaks in bytes, whether every event is the
same, and the versions; or why there is nothing to compare, when the tape or the recording cannot be played. A tape is
due when no line with peaks has its digest, so the run can be stopped and gone on with, and tapes recorded anew are held
out anew.
Of each model one tape of every kind and method is held out at full depth, and those that hold at no other, all others
at seven blocks of each kind (tapes are made from six; a line says how many). Cheap and telling ones first, then 40 of a
model after each other, which remember its operators. Ends with exit code 1 when an error in the file is over 0.1 %, or
a tape is not compared.
Needs vplan[train]; the whole takes some three hours of one core.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import profiles
from planner.catalog import lookup
from planner.catalog.components import COMPONENTS, Component, components
from planner.catalog.profiles import ModelProfile
from planner.errors import VplanError
from planner.evidence.jsonl import append_row, rows_by_id
from planner.launch.recorders import CHECKOUT, SAME_EACH_TIME
from planner.tape.packs import digest, is_stored
from planner.tape.variants.variant import OptimizerVariant, StepVariant
from tests.benchmarks import held_out_around
from tests.benchmarks.held_out import GIB, LIMIT_PCT, SEED, Case, Played, Variant, directly, from_tape, shipped
from tests.benchmarks.held_out_around import PROMPTS, SIDES
from trainers.recording.own import REFUSALS
from trainers.recording.tapes import RECORDED_BLOCKS, recorded_whole, shallow_config

LEDGER = Path(__file__).with_name("held_out.jsonl")
BLOCKS = RECORDED_BLOCKS + 1
CHEAP_FIRST = ("sample", "step", "optimizer")
TAPES_PER_PROCESS = 40
"""As many of a model come after each other."""


class Due(NamedTuple):
    """A tape, how it is held out, and when: the lower the order, the sooner."""

    order: tuple[float | str, ...]
    profile: ModelProfile
    what: Variant | Component
    full_depth: bool

    @property
    def path(self) -> Path:
        if isinstance(self.what, Component):
            return profiles.TAPES / COMPONENTS / self.what.name / f"{self.what.variant}.json.gz"
        return profiles.TAPES / self.profile.name / f"{self.what.name}.json.gz"

    @property
    def id(self) -> str:
        name = f"{self.path.parent.name}/{self.path.name.removesuffix('.json.gz')}"
        return name if isinstance(self.what, Component) or self.full_depth else f"{name}/shallow"

    @property
    def digest(self) -> str:
        return digest(self.path)[:12]


def around(profile: ModelProfile) -> Iterator[Due]:
    """What stands around a model."""
    for component in components(profile):
        due = Due((0, profile.parameters), profile, component, full_depth=True)
        if is_stored(due.path):
            yield due


def of_model(profile: ModelProfile) -> Iterator[Due]:
    """The model's own tapes: one of each kind and method first, the others by lot. Those of a trainer's own model only
    where `CHECKOUT` names its code."""
    has_code = bool(os.environ.get(CHECKOUT))
    lot = [variant for variant in shipped(profile) if has_code or not getattr(variant, "code", "")]
    random.Random(f"{SEED} {profile.name}").shuffle(lot)
    seen: set[tuple[str, str]] = set()
    places = itertools.count(2 * TAPES_PER_PROCESS)
    for variant in sorted(lot, key=_plainness):
        kind = variant.name.split("-")[0], variant.method
        first = kind not in seen
        seen.add(kind)
        cost = CHEAP_FIRST.index(kind[0])
        # Like ones come after each other: calls of operators that were seen take a third of the time.
        after = (next(places) // TAPES_PER_PROCESS, profile.parameters, profile.name, cost, variant.name)
        order = (1, cost, profile.parameters) if first else after
        yield Due(order, profile, variant, full_depth=first or recorded_whole(profile, variant))


def _plainness(variant: Variant) -> int:
    """What people train with when they say no more goes first."""
    if isinstance(variant, OptimizerVariant):
        return int((variant.optimizer, variant.how) != ("adamw", "foreach"))
    plain = not variant.one_sample and (not isinstance(variant, StepVariant) or variant.checkpointing == "full")
    return int(not plain)


def queue(models: list[str], only: str) -> list[Due]:
    """Every shipped tape, in the order in which they are held out."""
    known = [lookup.model(name) for name in models or lookup.model_names()]
    each = {due.id: due for profile in known for due in around(profile)}
    all_due = [*each.values(), *(due for profile in known for due in of_model(profile))]
    return sorted((due for due in all_due if only in due.id), key=lambda due: due.order)


def still_due(every: list[Due]) -> list[Due]:
    """Those without a line that speaks of them."""
    kept = {name: row["digest"] for name, row in rows_by_id(LEDGER).items() if "fault" not in row}
    known = sorted((entry for entry in every if entry.id in kept), key=lambda entry: entry.path)  # pack by pack
    spoken_of = {entry.id for entry in known if kept[entry.id] == entry.digest}
    return [entry for entry in every if entry.id not in spoken_of]


def compared(due: Due) -> dict[str, Any]:
    """What a line says of a tape beside its name."""
    if isinstance(due.what, Component):
        ours, theirs = held_out_around.compared(due.profile, due.what)
        rows, columns = SIDES
        shape = f"{rows}x{columns} latents" if due.what.name.startswith("Autoencoder") else f"{PROMPTS} prompts"
        return {"shape": shape, "tape": ours.peak, "recorded": theirs.peak, "same_events": ours == theirs}
    case = Case.of(due.profile, due.what)
    theirs, counts = directly(case, None if due.full_depth else shallow_config(due.profile, BLOCKS))
    ours, job = from_tape(case, counts), case.job
    shape = f"{job.batch_size}x{job.frames}x{job.height}x{job.width} rank {job.lora_rank}"
    peaks = {"tape": _peak(ours, "the tape"), "recorded": _peak(theirs, "the recording")}
    return {"shape": shape, "blocks": counts, **peaks, "same_events": ours.same(theirs)}


def _peak(played: Played, what: str) -> int:
    try:
        return played.peak
    except VplanError as error:
        raise VplanError(f"{what} cannot be played: {error.message}", error.fix) from None


def line(due: Due) -> dict[str, Any]:
    """The line of one tape, with a ``fault`` where there is nothing to compare: the others are compared all the
    same."""
    start = time.process_time()
    try:
        found = compared(due)
    except (VplanError, *REFUSALS) as error:
        found = {"fault": str(error) or type(error).__name__}
    seconds = round(time.process_time() - start, 1)
    versions = {library: version(library).split("+")[0] for library in ("torch", "diffusers")}
    return {"id": due.id, "digest": due.digest, **found, "seconds": seconds, **versions}


def keep(row: dict[str, Any]) -> None:
    """Writes a line into the file, and shows it."""
    append_row(LEDGER, row)
    if "fault" in row:
        print(f"{row['id']:84} {row['fault']}", flush=True)
        return
    error = 100 * (row["tape"] - row["recorded"]) / row["recorded"]
    told = f"{error:+9.4f} {'same' if row['same_events'] else 'other'} events"
    numbers = f"{row['tape'] / GIB:9.3f} {row['recorded'] / GIB:9.3f} {told} {row['seconds']:6.1f}"
    print(f"{row['id']:84} {row['shape']:24} {numbers}", flush=True)


def hold(due: list[Due], jobs: int, until: datetime.datetime | None) -> None:
    """Compares tapes in processes that end after some: tapes and what torch remembers of operators fill memory.
    ``until``: start none after."""
    left, running = iter(due), set[Future[dict[str, Any]]]()
    os.environ |= SAME_EACH_TIME  # of the processes, as of those that recorded
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, max_tasks_per_child=TAPES_PER_PROCESS) as pool:
        while True:
            while len(running) <= jobs and not _is_past(until) and (entry := next(left, None)):
                running.add(pool.submit(line, entry))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                keep(future.result())


def _is_past(until: datetime.datetime | None) -> bool:
    return until is not None and datetime.datetime.now(datetime.UTC) >= until


def next_time(time_of_day: str) -> datetime.datetime:
    """When the clock, in UTC, next shows HH:MM."""
    now = datetime.datetime.now(datetime.UTC)
    hour, minute = map(int, time_of_day.split(":"))
    today = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
    return today if today > now else today + datetime.timedelta(days=1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.held_out_all")
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--until", type=next_time, metavar="HH:MM", help="start no tape after this time of day, UTC")
    parser.add_argument("--only", default="", metavar="TEXT", help="the tapes with a text in their name")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many side by side")
    parser.add_argument("--list", action="store_true", help="say what is due, and hold nothing out")
    asked = parser.parse_args()
    every = queue(asked.models, asked.only)
    due = still_due(every)
    print(f"{len(every)} tapes, {len(due)} due", flush=True)
    if asked.list:
        print("\n".join(entry.id for entry in due))
        return 0
    hold(due, asked.jobs, asked.until)
    faults = [row["id"] for row in rows_by_id(LEDGER).values() if "fault" in row]
    rows = [row for row in rows_by_id(LEDGER).values() if "fault" not in row]
    wrong = [row["id"] for row in rows if 100 * abs(row["tape"] - row["recorded"]) / row["recorded"] > LIMIT_PCT]
    others = [row["id"] for row in rows if not row.get("same_events", True)]
    for what, names in (("not compared", faults), ("off", wrong), ("of other events at the same peak", others)):
        print(f"{len(names)} {what}" + "".join(f"\n  {name}" for name in names))
    return int(bool(faults or wrong))


if __name__ == "__main__":
    sys.exit(main())
