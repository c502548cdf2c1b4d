"""The phases of a probe in one rank: load, first step, steady steps, one step taken apart, a sample, a checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from planner.catalog import lookup
from planner.catalog.profiles import ModelProfile
from planner.errors import VplanError
from planner.spec.job import Job, Strategy
from planner.spec.plan import Plan, plan_to_toml
from trainers.families import family
from trainers.measuring.counters import Meter
from trainers.memory import swap
from trainers.parallel import checkpoint, parallel
from trainers.parallel.ema import Average
from trainers.sampling import pipelines, validate
from trainers.step import experts, step, weights
from trainers.step.random_weights import randomise

SEED = 0
LEARNING_RATE = 1e-4
NOISE_LEVELS = 2
TURNS = 2
"""Micro-batches that one of two experts runs before the other does: they change places as often as in training, where
it is 0.46 to 0.49 times a micro-batch (Wan 2.2: 2 p (1 - p), see `planner.layout.experts.high_share`)."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to measure, with everything looked up."""

    plan: Plan
    profile: ModelProfile
    job: Job
    strategy: Strategy
    grids: tuple[dict[str, int], ...]
    """of the job's shapes, the largest first"""
    device: str
    steps: int
    scratch: Path
    """folder for a checkpoint that nobody keeps"""
    weights: str | None = None
    """folder of published weights; random ones without"""
    capacity_bytes: int | None = None
    """what the plan's card gives, where this one may give more"""
    history: str | None = None
    part: Literal["step", "encode"] = "step"
    """of training that is gone through: what is cached before is encoded in a process of its own"""

    @classmethod
    def of(cls, plan: Plan, *, config: dict[str, Any], scratch: str | Path, **said: Any) -> Wanted:
        """From a plan; ``config`` replaces keys of the published architecture."""
        profile = lookup.model(plan.job.model)
        if config:
            profile = profile.replace(config={**profile.config, **config})
        grids = [lookup.grid(profile, plan.job, shape) for shape in plan.job.shapes]
        return cls(
            plan=plan,
            profile=profile,
            job=plan.job.replace(lora_targets=plan.job.lora_targets or profile.lora.targets),
            strategy=plan.strategy,
            grids=tuple(sorted(grids, key=_tokens, reverse=True)),
            scratch=Path(scratch),
            **said,
        )


def _tokens(grid: dict[str, int]) -> int:
    return grid["B"] * (grid["F"] * grid["H"] * grid["W"] + grid["T"])


class Probed:
    """One rank's model and its steps."""

    def __init__(self, wanted: Wanted, meter: Meter) -> None:
        self.wanted = wanted
        self.meter = meter
        self.strategy = wanted.strategy
        self.kind = family(wanted.profile)
        self.dtype = step.compute_dtype(wanted.strategy)
        self.losses: list[float | None] = []
        self.seconds: list[float] = []
        self.done = 0
        self.experts: experts.Experts | None = None
        self.turns = 0
        torch.manual_seed(SEED)
        meter.report.tell(losses=self.losses, step_seconds=self.seconds)

    def load(self) -> None:
        """Model, engine, optimizer and average, as training sets them up."""
        wanted, device = self.wanted, self.meter.device
        both = wanted.job.experts == "both"
        model = self._both() if both else step.build_model(wanted.profile, wanted.job, self.strategy)
        if wanted.weights is None and not both:
            step.place(model, wanted.profile, self.strategy, device, randomise)
        elif wanted.weights is not None and not both:
            folder = weights.model_folder(Path(wanted.weights), wanted.profile, wanted.job)
            swapped = swap.swapped_blocks(model, wanted.profile, self.strategy)
            weights.load(model, weights.published(folder, wanted.profile), device, SEED, None, swapped)
        made = parallel.set_up(model, wanted.profile, wanted.job, self.strategy, LEARNING_RATE, drive=wanted.scratch)
        self.trainee, self.engine = made
        ema = self.strategy.ema
        self.average = Average(self.trainee.trainable, ema) if ema != "none" else None

    def first_step(self) -> None:
        """The step that makes the optimizer's states, at the largest shape."""
        self.meter.report.tell(first_step_seconds=self._step(self.wanted.grids[0]))

    def steady_steps(self) -> None:
        """One step of each shape, the largest last, so that it finds what the others leave; then those that count."""
        for grid in reversed(self.wanted.grids):
            self._step(grid)
        for _ in range(self.wanted.steps):
            self.seconds.append(self._step(self.wanted.grids[0]))

    def _step(self, grid: dict[str, int]) -> float:
        """Seconds of one optimizer step."""
        alone = self.strategy.gradient_accumulation == 1 and self.experts is None
        batches = list(self._batches(grid)) if alone else self._batches(grid)
        self.meter.synchronise()
        began = time.perf_counter()
        loss = step.accumulated_step(self.trainee, self.kind, batches, self.strategy)
        self._follow()
        self.meter.synchronise()
        elapsed = time.perf_counter() - began
        self._note(loss)
        return elapsed

    def _batches(self, grid: dict[str, int]) -> Iterator[step.Batch]:
        for _ in range(self.strategy.gradient_accumulation):
            if self.experts is not None:
                self.experts.turn(("high", "low")[self.turns // TURNS % 2])
                self.turns += 1
            yield self.kind.batch(grid, self.meter.device, self.dtype)

    def _follow(self) -> None:
        self.done += 1
        if self.average:
            self.average.update()

    def _both(self) -> nn.Module:
        wanted, device = self.wanted, self.meter.device

        def at_random(_: str, model: nn.Module, waiting: Collection[str]) -> None:
            step.materialise(model, device, randomise, waiting)

        fill: experts.Fill = at_random
        if wanted.weights is not None:
            fill = experts.from_folder(Path(wanted.weights), wanted.profile, wanted.job, device, SEED)
        self.experts = experts.pair(wanted.profile, wanted.job, self.strategy, device, fill)
        return self.experts

    def passes(self) -> None:
        """Forward and backward of one more step."""
        loss = step.gradients(self.trainee, self.kind, self._batches(self.wanted.grids[0]), self.strategy)
        self._note(loss)

    def _note(self, loss: torch.Tensor) -> None:
        """Keeps the mean of all ranks' losses, so that all of them know when one has no number."""
        self.losses.append(finite(parallel.mean_over_ranks(loss)))

    def optimizer_step(self) -> None:
        """The rest of it."""
        step.optimizer_step(self.trainee)
        self._follow()

    def sample(self) -> None:
        """A sample of the validation's true size, on the first rank, while the others wait; two noise levels tell.
        Of a model that is split all ranks denoise."""
        wanted, first, engine = self.wanted, checkpoint.is_first(), self.engine
        if first or engine.gathers:
            asked = pipelines.SampleInputs(steps=NOISE_LEVELS, seed=SEED)
            model, device = engine.plain, self.meter.device
            split = validate.Split(first, engine.release) if engine.gathers else None
            validate.sample(model, wanted.profile, wanted.job, self.strategy, device, asked, self.meter.phase, split)
        checkpoint.barrier()

    def save(self) -> None:
        """A checkpoint as training writes it. A disk without room for it is told, and ends nothing else."""
        manifest = {"run": "probe", "step": self.done}
        plan = plan_to_toml(self.wanted.plan)
        try:
            checkpoint.save(self.wanted.scratch, self.engine, self.average, manifest, plan, keep=1)
        except VplanError as error:
            self.meter.report.told["missing"].append(f"save: {error.message}")

    @property
    def is_finite(self) -> bool:
        """Whether every loss was a number."""
        return None not in self.losses


def finite(loss: torch.Tensor) -> float | None:
    """The loss, or None: JSON has neither NaN nor infinity."""
    value = float(loss)
    return value if math.isfinite(value) else None
