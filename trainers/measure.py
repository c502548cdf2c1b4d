"""Measures a few real training steps in this process, phase by phase: allocator, NVML, host RAM, seconds."""

from __future__ import annotations

import contextlib
import json
import math
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from planner import catalog
from planner.errors import VplanError
from planner.facts import ModelProfile
from planner.job import Job, Strategy
from planner.monitor import DeviceMemory
from planner.plan import Plan
from trainers import step
from trainers.families import family
from trainers.families.base import Family
from trainers.kernels import Kernels
from trainers.meter import Meter, Told
from trainers.optimizers import make_optimizer
from trainers.scaling import loss_scaler

SEED = 0
SPREAD = 0.02
"""Standard deviation of random weights: small enough for every published architecture to keep its loss finite."""

MAX_EVENTS = 5_000_000
"""Of the allocator's history: a step of a 14B model has tens of thousands."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to measure, with everything looked up."""

    profile: ModelProfile
    job: Job
    strategy: Strategy
    grid: dict[str, int]
    device: str
    steps: int
    history: str | None

    @classmethod
    def of(cls, plan: Plan, *, device: str, steps: int, config: dict[str, Any], history: str | None) -> Wanted:
        """From a plan; ``config`` replaces keys of the published architecture."""
        profile = catalog.model(plan.job.model)
        if config:
            profile = profile.replace(config={**profile.config, **config})
        grids = [catalog.grid(profile, plan.job, shape) for shape in plan.job.shapes]
        return cls(
            profile=profile,
            job=plan.job.replace(lora_targets=plan.job.lora_targets or profile.lora.targets),
            strategy=plan.strategy,
            grid=max(grids, key=lambda grid: grid["B"] * (grid["F"] * grid["H"] * grid["W"] + grid["T"])),
            device=device,
            steps=steps,
            history=history,
        )


def measure(wanted: Wanted, report: Told) -> None:
    """Measures and tells. Running out of memory is told as an outcome; any other error is the caller's."""
    device = find_device(wanted.device)
    with contextlib.ExitStack() as stack:
        watch = stack.enter_context(DeviceMemory(_uuid(device))) if device.type == "cuda" else None
        meter = Meter(device, watch, report)
        _tell_device(meter)
        if wanted.history:
            torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=MAX_EVENTS)
        try:
            trainee, kind = _run(wanted, meter)
        except (RuntimeError, MemoryError) as error:
            outcome = out_of_memory(error)
            if outcome is None:
                raise
            _write_history(wanted, meter)
            if report.told["phase"] == "step":
                report.tell(phase="optimizer" if "optimizer_step" in _callers(error) else "train")
            report.tell(outcome=outcome, message=" ".join(str(error).split())[:1000], **_sampled(watch))
            return
        _write_history(wanted, meter)
        finite = all(loss is not None for loss in report.told["losses"])
        report.tell(outcome="ok" if finite else "nan", **_sampled(watch))
        with contextlib.suppress(RuntimeError):  # no memory for one more pass: the measurement is complete without it
            report.tell(attention_kernel=attention_kernels(trainee, kind, wanted, device))


def find_device(name: str) -> torch.device:
    """The device to measure on; a VplanError when there is no GPU."""
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        fix = "run it where one is; `vplan estimate` needs none, and `--device cpu` steps tiny models without counters"
        raise VplanError(f"a probe needs a GPU, and torch {torch.__version__} finds none on this machine", fix)
    return torch.device("cuda", torch.cuda.current_device())


def _uuid(device: torch.device) -> str:
    """NVML counts cards from the bus, torch from CUDA_VISIBLE_DEVICES; this names the same card for both."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _tell_device(meter: Meter) -> None:
    """The device's facts, and its use once there is a context and nothing else."""
    report, watch = meter.report, meter.watch
    if meter.device.type != "cuda" or watch is None:
        report.tell(gpu="cpu", driver="none", missing=["allocated_bytes, reserved_bytes, device_bytes: no GPU"])
        return
    meter.synchronise()
    report.tell(
        gpu=torch.cuda.get_device_name(meter.device),
        driver=watch.driver,
        total_bytes=torch.cuda.get_device_properties(meter.device).total_memory,
        context_bytes=watch.take_peak(),
        others_bytes=watch.base_bytes,
        missing=watch.missing,
    )


def _run(wanted: Wanted, meter: Meter) -> tuple[step.Trainee, Family]:
    """Load, first step, warm-up, steady steps, then one step taken apart into forward and backward, and optimizer."""
    kind = family(wanted.profile)
    strategy, report = wanted.strategy, meter.report
    dtype = step.compute_dtype(strategy)
    torch.manual_seed(SEED)
    losses: list[float | None] = []
    seconds: list[float] = []

    def one_step() -> float:
        batch = kind.batch(wanted.grid, meter.device, dtype)
        meter.synchronise()
        began = time.perf_counter()
        loss = step.train_step(trainee, kind, batch, strategy)
        meter.synchronise()
        elapsed = time.perf_counter() - began
        losses.append(_finite(loss))
        return elapsed

    report.tell(losses=losses, step_seconds=seconds)
    with meter.phase("load"):
        model = step.build_model(wanted.profile, wanted.job, strategy)
        step.place(model, wanted.profile, strategy, meter.device, randomise)
        step.choose_kernels(model, wanted.profile, strategy, meter.device)
        trainee = step.Trainee(model, step.trainable_parameters(model))
        trainee.optimizer = make_optimizer(trainee.trainable, strategy)
        trainee.engine = step.Engine(loss_scaler(wanted.job, strategy, meter.device))
    with meter.phase("first_step"):
        report.tell(first_step_seconds=one_step())
    with meter.phase("step"):
        one_step()
        for _ in range(wanted.steps):
            seconds.append(one_step())
    if meter.device.type == "cuda":
        report.tell(allocated_after_step_bytes=torch.cuda.memory_allocated(meter.device))
    # The same calls as in step.train_step, with the counters read in between.
    with meter.phase("train"):
        batch = kind.batch(wanted.grid, meter.device, dtype)
        loss = step.forward(trainee, kind, batch, strategy)
        trainee.engine.backward(loss)
    with meter.phase("optimizer"):
        step.optimizer_step(trainee)
    losses.append(_finite(loss.detach()))
    return trainee, kind


def _finite(loss: torch.Tensor) -> float | None:
    """The loss, or None: JSON has neither NaN nor infinity."""
    value = float(loss)
    return value if math.isfinite(value) else None


@torch.no_grad()
def randomise(name: str, weight: torch.Tensor) -> None:
    """Fills a weight in place: vectors like fresh norms and biases, the rest with small noise."""
    if weight.ndim <= 1:
        weight.fill_(0.0 if name.endswith("bias") else 1.0)
    elif weight.dtype == torch.float8_e4m3fn:  # has no random numbers of its own
        weight.copy_(torch.empty_like(weight, dtype=torch.bfloat16).normal_(0.0, SPREAD))
    else:
        weight.normal_(0.0, SPREAD)


def out_of_memory(error: BaseException) -> str | None:
    """``oom`` or ``host-oom`` when an error means that; None for any other."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "oom"
    # Activations offloaded into pinned host memory: CUDA gives the same error for either memory.
    pinning = "pack_to_cpu" in _callers(error)
    if isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate" in text:
        return "host-oom"
    if "CUDA error: out of memory" in text:
        return "host-oom" if pinning else "oom"
    return "oom" if "CUBLAS_STATUS_ALLOC_FAILED" in text or "CUDNN_STATUS_ALLOC_FAILED" in text else None


def _callers(error: BaseException) -> set[str]:
    """Names of the functions an error came through."""
    return {frame.name for frame in traceback.extract_tb(error.__traceback__)}


def _sampled(watch: DeviceMemory | None) -> dict[str, Any]:
    """How well the device was watched, and what could not be had."""
    return {"device_hertz": watch.hertz, "missing": watch.missing} if watch else {}


def attention_kernels(trainee: step.Trainee, kind: Family, wanted: Wanted, device: torch.device) -> str:
    """What attention really ran on, as ``cudnn+efficient``: from one more forward pass, when all is measured."""
    batch = kind.batch(wanted.grid, device, step.compute_dtype(wanted.strategy))
    with Kernels() as kernels:
        step.forward(trainee, kind, batch, wanted.strategy)
    return kernels.names


def _write_history(wanted: Wanted, meter: Meter) -> None:
    """The allocator's events on this device as plain numbers, and where in them each phase begins."""
    if wanted.history is None:
        return
    events = torch.cuda.memory._snapshot()["device_traces"][meter.device.index]
    times = [event.get("time_us", 0) for event in events]
    data = {
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(meter.device),
        "expandable_segments": wanted.strategy.expandable_segments,
        "phases": [[name, sum(at < mark for at in times)] for name, mark in meter.marks],
        "columns": ["action", "addr", "size", "stream"],
        "events": [[event["action"], event.get("addr", 0), event["size"], event["stream"]] for event in events],
    }
    try:
        Path(wanted.history).write_text(json.dumps(data, separators=(",", ":")) + "\n")
    except OSError as error:
        raise VplanError(f"cannot write {wanted.history}: {error.strerror}", "name another file") from None
