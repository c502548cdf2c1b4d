"""Finds the recordings that answer for a question: bundled tapes first, then the user's own."""

from __future__ import annotations

import functools
from pathlib import Path

import profiles
from planner import catalog
from planner.errors import NotRecordedError
from planner.facts import GpuProfile, ModelProfile
from planner.job import SPLIT, Job, Machine, Strategy
from planner.parameters import FILE as PARAMETERS_FILE
from planner.parameters import Parameters, read_parameters
from planner.rules import resolve
from planner.run import Facts
from planner.tape import Tape, read_tape
from planner.variants import OptimizerVariant, StepVariant


@functools.cache
def tape(model: str, variant: str) -> Tape:
    """The tape of a model's variant."""
    path: Path = profiles.TAPES / model / f"{variant}.json.gz"
    if not path.is_file():
        raise NotRecordedError(f"no tape {variant} of {model}", f"record it: vplan record {model}")
    return read_tape(path)


@functools.cache
def parameters(model: str) -> Parameters:
    """The table of a model's parameters."""
    path: Path = profiles.TAPES / model / PARAMETERS_FILE
    if not path.is_file():
        raise NotRecordedError(f"no table of {model}'s parameters", f"record it: vplan record {model}")
    return read_parameters(path)


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
        parameters(job.model) if strategy.sharding in SPLIT else Parameters(),
    )
