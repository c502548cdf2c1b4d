"""Which tapes a model has, and how they are recorded: one process, many variants.

A *step* tape depends on what changes the stream of operators: method, precision, checkpointing, one sample or several. An
*optimizer* tape depends on the trained parameters and the optimizer alone. fp16 and bf16 take the same memory, so both
are recorded as bf16 and called half.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from planner.facts import ModelProfile
from planner.job import Job, Strategy
from planner.tape import ATOMS, FORMAT
from planner.variants import OptimizerVariant, StepVariant
from trainers import step
from trainers.compress import HEAD, TAIL, compress
from trainers.families import family
from trainers.record import Run, Trace, find_runs, record_optimizer, record_step

RECORDED_BLOCKS = HEAD + TAIL + 2
"""Per kind of block: both ends and two middles, which must be alike."""

PRIMES = {"B": 101, "F": 103, "H": 107, "W": 109, "T": 127, "R": 113}
"""Larger than any prime factor of a published architecture, so that a size shows its atoms; 257 is CLIP's token count."""


def prime_grid(profile: ModelProfile, one_sample: bool) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """(shape to record at, values of the sums there, atoms the tape holds fixed). Sums come out prime too."""
    kind = family(profile)
    regime = {**kind.fixed, **({"B": 1} if one_sample else {})}
    grid = {**PRIMES, **regime}
    while True:
        sums = {
            name: constant + sum(math.prod(grid[atom] for atom in product) for product in products)
            for name, (constant, products) in kind.sums.items()
        }
        if all(_is_prime(value) for value in sums.values()):
            return grid, sums, regime
        grid["T"] += 2


def _is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def shallow_config(profile: ModelProfile) -> dict[str, Any]:
    """The published config with few blocks of each kind. A stack of several kinds is recorded at its full depth."""
    config = dict(profile.config)
    if profile.family != "sd3":  # which of its blocks are of which kind is another config entry
        for stack in profile.stacks:
            if isinstance(config[stack.depth_key], int):
                config[stack.depth_key] = min(RECORDED_BLOCKS, config[stack.depth_key])
    return config


def full_runs(profile: ModelProfile, job: Job, strategy: Strategy) -> list[Run]:
    """The runs of like blocks of the published architecture, counted on the meta device."""
    return find_runs(step.build_model(profile, job, strategy), [stack.list for stack in profile.stacks], None)[0]


def step_tape(profile: ModelProfile, variant: StepVariant) -> dict[str, Any]:
    """Records one step variant; returns the tape file's JSON."""
    job, strategy = variant.records(profile)
    grid, sums, regime = prime_grid(profile, variant.one_sample)
    trace = record_step(profile, job, strategy, grid, shallow_config(profile))
    return _tape(profile, variant.name, trace, grid, sums, regime, full_runs(profile, job, strategy))


def optimizer_tape(profile: ModelProfile, variant: OptimizerVariant) -> dict[str, Any]:
    """Records one optimizer variant; returns the tape file's JSON."""
    job, strategy = variant.records(profile)
    grid, sums, regime = prime_grid(profile, one_sample=False)
    trace = record_optimizer(profile, job, strategy, grid, shallow_config(profile))
    return _tape(profile, variant.name, trace, grid, sums, {}, full_runs(profile, job, strategy))


def _tape(
    profile: ModelProfile,
    name: str,
    trace: Trace,
    grid: dict[str, int],
    sums: dict[str, int],
    regime: dict[str, int],
    runs: list[Run],
) -> dict[str, Any]:
    atoms = {atom: 1 if atom in regime else grid[atom] for atom in ATOMS} | sums
    return {
        "format": FORMAT,
        "model": profile.name,
        "variant": name,
        "versions": {library: version(library).split("+")[0] for library in ("torch", "diffusers", "peft")},
        "regime": regime,
        "sums": {key: [constant, list(products)] for key, (constant, products) in family(profile).sums.items()},
        "operators": sorted(trace.ops),
        "tape": compress(trace, atoms, [run.count for run in runs]),
    }


def write_tape(tape: dict[str, Any], folder: Path) -> Path:
    """Writes ``folder/<variant>.json.gz``, byte for byte the same for the same recording."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{tape['variant']}.json.gz"
    text = json.dumps(tape, separators=(",", ":"), sort_keys=True)
    partial = path.with_suffix(f".{os.getpid()}.part")
    partial.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    partial.replace(path)
    return path


def all_variants() -> Iterator[StepVariant | OptimizerVariant]:
    """Every variant shipped for a model."""
    return itertools.chain(StepVariant.all(), OptimizerVariant.all())
