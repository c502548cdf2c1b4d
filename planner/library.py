"""Finds the recordings that answer for a question: bundled tapes first, then the user's own."""

from __future__ import annotations

import functools
from pathlib import Path

import profiles
from planner import catalog, home
from planner.errors import NotRecordedError
from planner.facts import GpuProfile, ModelProfile
from planner.job import Job, Machine, Strategy
from planner.rules import resolve
from planner.run import Facts
from planner.tape import Tape, read_tape
from planner.variants import OptimizerVariant, StepVariant


def tape(model: str, variant: str) -> Tape:
    """The tape of a model's variant. No user's model has a bundled one's name, so a name has tapes in one place."""
    for folder in (profiles.TAPES, home.tapes()):
        path: Path = folder / model / f"{variant}.json.gz"
        if path.is_file():
            return _read(path, path.stat().st_mtime_ns)
    raise NotRecordedError(f"no tape {variant} of {model}", f"record it: vplan record {model} --variant {variant}")


@functools.cache
def _read(path: Path, written_ns: int) -> Tape:
    return read_tape(path)


def facts(
    job: Job, strategy: Strategy, machine: Machine, model: ModelProfile | None = None, gpu: GpuProfile | None = None
) -> Facts:
    """Everything ``estimate`` needs, loaded. ``model`` and ``gpu`` spare the look-up by name."""
    strategy = resolve(job, strategy, machine)
    batch = max(shape.batch_size or job.batch_size for shape in job.shapes)
    model = model or catalog.model(job.model)
    return Facts(
        model,
        gpu or catalog.parse_gpus(machine.gpu)[1],
        tape(job.model, StepVariant.of(model, job, strategy, batch).name),
        tape(job.model, OptimizerVariant.of(model, job, strategy).name),
    )
