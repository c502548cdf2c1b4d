"""The phases of a probe in one rank: load, first step, steady steps, one step pass by pass, a sample, a checkpoint."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from planner.catalog import lookup
from planner.catalog.profiles import ModelProfile
from planner.errors import VplanError
from planner.launch.weight_files import model_folder
from planner.spec.job import Job, Strategy
from planner.spec.plan import Plan, plan_to_toml
from planner.spec.training import TrainingSettings
from trainers.families import family
from trainers.measuring.counters import Meter
from trainers.memory import swap
from trainers.parallel import checkpoint, parallel
from trainers.parallel.ema import Average
from trainers.sampling import pipelines, validate
from trainers.step import experts, placement, step, weights
from trainers.step.random_weights import randomise

SEED = 0
AT_RATE = TrainingSettings(learning_rate=1e-4)
NOISE_LEVELS = 2


@dataclass(frozen=True, kw_only=True)
class ProbeRequest:
    """What one rank of a probe measures: a plan, with its model and shapes looked up."""

    plan: Plan
    profile: ModelProfile
    job: Job
    strategy: Strategy
    grids: tuple[dict[str, int], ...]
    """the model's dimensions (`planner.catalog.lookup.grid`) at each of the job's shapes, most tokens first"""
    device: str
    steps: int
    scratch: Path
    """folder for a checkpoint that nobody keeps"""
    weights: str | None = None
    """folder of published weights; random ones without"""
    capacity_bytes: int | None = None
    """allocatable bytes of the plan's card, if this card may have more"""
    history: str | None = None
    part: Literal["step", "encode"] = "step"
    """the part of training to measure; encoding for the cache is measured in a separate process"""
    saves: bool = True
    """whether to write a checkpoint after the steps"""
    profiles: bool = False
    """whether to time the operators of one more step after all other measurements"""

    @classmethod
    def of(cls, plan: Plan, *, config: dict[str, Any], scratch: str | Path, **settings: Any) -> ProbeRequest:
        """The request for a plan; ``config`` replaces keys of the published architecture, ``settings`` are further
        fields."""
        profile = lookup.model(plan.job.model)
        if config:
            profile = profile.replace(config={**profile.config, **config})
        grids = [lookup.sample_grid(profile, plan.job, shape) for shape in plan.job.shapes]
        return cls(
            plan=plan,
            profile=profile,
            job=plan.job.replace(lora_targets=plan.job.lora_targets or profile.lora.targets),
            strategy=plan.strategy,
            grids=tuple(sorted(grids, key=_tokens, reverse=True)),
            scratch=Path(scratch),
            **settings,
        )


def _tokens(grid: dict[str, int]) -> int:
    return grid["B"] * (grid["F"] * grid["H"] * grid["W"] + grid["T"])


class ProbedTraining:
    """One rank's model, engine and optimizer, and the parts of training that a probe measures, in execution order."""

    def __init__(self, request: ProbeRequest, meter: Meter) -> None:
        self.request = request
        self.meter = meter
        self.strategy = request.strategy
        self.family = family(request.profile)
        self.dtype = step.compute_dtype(request.strategy)
        self.losses: list[float | None] = []
        self.seconds: list[float] = []
        self.steps_done = 0
        self.experts: experts.Experts | None = None
        torch.manual_seed(SEED)
        meter.report.tell(losses=self.losses, step_seconds=self.seconds)

    def load(self) -> None:
        """Sets up model, engine, optimizer and average as training does."""
        request, device = self.request, self.meter.device
        two_experts = request.job.experts == "both"
        model = self._two_experts() if two_experts else step.build_model(request.profile, request.job, self.strategy)
        parallel.split(model, request.profile, request.job, self.strategy, device, request.scratch)
        if request.weights is None and not two_experts:
            placement.place(model, request.profile, self.strategy, device, randomise)
        elif request.weights is not None and not two_experts:
            folder = model_folder(Path(request.weights), request.profile, request.job)
            moving = swap.blocks_to_host(model, request.profile, self.strategy, device)
            waiting = placement.offloaded_shares(model, self.strategy)
            weights.load(
                model, weights.published(folder, request.profile), device, weights.fresh(SEED), None, moving, waiting
            )
            if moving:
                swap.BlockSwap(moving, device)
        self.trainee, self.engine = parallel.set_up(
            model, request.profile, request.job, self.strategy, AT_RATE, device, drive=request.scratch
        )
        ema = self.strategy.ema
        self.average = Average(self.trainee.trainable, ema) if ema != "none" else None

    def first_step(self) -> None:
        """Runs the step that creates the optimizer's states, at the largest shape."""
        self.meter.report.tell(first_step_seconds=self._step(self.request.grids[0]))

    def steady_steps(self) -> None:
        """Runs one step of each shape, the largest last, so that the allocator's cache has what the others leave
        behind; then the steps to be measured."""
        for grid in reversed(self.request.grids):
            self._step(grid)
        for _ in range(self.request.steps):
            self.seconds.append(self._step(self.request.grids[0]))

    def _step(self, grid: dict[str, int]) -> float:
        """Runs one optimizer step; returns its seconds."""
        # A single batch is made before the clock starts, as a loader would have it ready. Several are made during the
        # step, so that only one is on the device at a time.
        alone = self.strategy.gradient_accumulation == 1 and self.experts is None
        batches = list(self._batches(grid)) if alone else self._batches(grid)
        self.meter.synchronise()
        began = time.perf_counter()
        loss = step.accumulated_step(self.trainee, self.family, batches, self.strategy)
        self._count_step()
        self.meter.synchronise()
        elapsed = time.perf_counter() - began
        self._keep_loss(loss)
        return elapsed

    def _batches(self, grid: dict[str, int]) -> Iterator[step.Batch]:
        # The high-noise expert takes the first step, the low-noise expert all others. So both have stepped once and
        # changed places before the measured steps; in training they change places only once in many steps.
        if self.experts is not None:
            self.experts.turn("low" if self.steps_done else "high")
        for _ in range(self.strategy.gradient_accumulation):
            yield self.family.batch(grid, self.meter.device, self.dtype)

    def _count_step(self) -> None:
        self.steps_done += 1
        if self.average:
            self.average.update()

    def _two_experts(self) -> nn.Module:
        request, device = self.request, self.meter.device

        def at_random(_: str, model: nn.Module, waiting: frozenset[str], moving: swap.BlocksToHost | None) -> None:
            fill = moving.filling(randomise) if moving else randomise
            placement.materialise(model, device, fill, waiting | (moving.names if moving else frozenset()))

        fill: experts.Fill = at_random
        if request.weights is not None:
            fill = experts.from_folder(
                Path(request.weights), request.profile, request.job, device, lambda *_: weights.fresh(SEED)
            )
        self.experts = experts.pair(request.profile, request.job, self.strategy, device, fill)
        return self.experts

    def forward_backward(self) -> None:
        """Runs forward and backward of one more step, without its optimizer step: the phase ``train``."""
        loss = step.gradients(self.trainee, self.family, self._batches(self.request.grids[0]), self.strategy)
        self._keep_loss(loss)

    def _keep_loss(self, loss: torch.Tensor) -> None:
        """Keeps the mean of all ranks' losses, so that every rank notices when one of them is not finite."""
        self.losses.append(finite(parallel.mean_over_ranks(loss)))

    def optimizer_step(self) -> None:
        """Runs the optimizer step with the gradients of `forward_backward`: the phase ``optimizer``."""
        step.optimizer_step(self.trainee)
        self._count_step()

    def sample(self) -> None:
        """Makes a sample at the full validation shape but with only `NOISE_LEVELS` steps, on the first rank while the
        others wait. If the model is sharded, all ranks denoise."""
        request, first, engine = self.request, checkpoint.is_first(), self.engine
        if first or engine.gathers:
            inputs = pipelines.SampleInputs(steps=NOISE_LEVELS, seed=SEED)
            model, device = engine.plain, self.meter.device
            split = validate.Split(first, engine.release) if engine.gathers else None
            with self.average.in_model() if self.average else contextlib.nullcontext():
                validate.sample(
                    model, request.profile, request.job, self.strategy, device, inputs, self.meter.phase, split
                )
        checkpoint.barrier()

    def save(self) -> None:
        """Writes a checkpoint as training does, and waits until it is written. A full disk is reported as ``missing``
        and does not end the probe."""
        manifest = {"run": "probe", "step": self.steps_done}
        plan = plan_to_toml(self.request.plan)
        try:
            writer = checkpoint.CheckpointWriter(self.request.scratch, self.engine, keep=1)
            writer.save(self.average, manifest, plan)
            writer.wait()
        except VplanError as error:
            self.meter.report.facts["missing"].append(f"save: {error.message}")

    @property
    def is_finite(self) -> bool:
        """Whether no loss so far was NaN or infinite."""
        return None not in self.losses


def finite(loss: torch.Tensor) -> float | None:
    """The loss as a float; None if it is NaN or infinite, which JSON cannot express."""
    value = float(loss)
    return value if math.isfinite(value) else None
