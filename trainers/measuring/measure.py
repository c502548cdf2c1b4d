"""Measures a few real training steps in this process, phase by phase: allocator, NVML, host RAM, seconds."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

import torch

from planner.catalog import card_lookup
from planner.errors import VplanError
from planner.hardware.nvml import DeviceMemory
from trainers.measuring.counters import FactSink, Meter
from trainers.measuring.operator_seconds import operator_seconds
from trainers.measuring.phases import ProbedTraining, ProbeRequest
from trainers.memory.out_of_memory import callers, out_of_memory
from trainers.parallel import checkpoint
from trainers.parallel.start import start
from trainers.step import step
from trainers.step.attention_kernels import Kernels

MAX_EVENTS = 5_000_000
"""Limit on the allocator's history; a step of a 14B model has tens of thousands of events."""


def measure(request: ProbeRequest, report: FactSink) -> None:
    """Measures one rank of a plan and reports the results, phase by phase.

    Running out of memory is reported as an ``outcome``; other errors are raised.
    """
    device = find_device(request.device)
    with contextlib.ExitStack() as stack:
        watch = stack.enter_context(DeviceMemory(_uuid(device))) if device.type == "cuda" else None
        if watch:
            torch.cuda.set_device(device)  # creates the context, unless it is the first card
        meter = Meter(device, watch, report)
        _tell_device(meter)
        if request.history:
            torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=MAX_EVENTS)
        try:
            training = _run(request, meter)
        except checkpoint.NotFiniteError as error:
            _write_history(request, meter)
            report.tell(outcome="nan", message=str(error), **_sampled(watch))
            return
        except (RuntimeError, MemoryError) as error:
            outcome = out_of_memory(error)
            if outcome is None:
                raise
            _write_history(request, meter)
            if report.facts["phase"] == "step":
                report.tell(phase="optimizer" if step.optimizer_step.__name__ in callers(error) else "train")
            report.tell(outcome=outcome, **_shortage(error, device), **_sampled(watch))
            return
        _write_history(request, meter)
        report.tell(outcome="ok" if training is None or training.is_finite else "nan", **_sampled(watch))
        if training is None:
            return
        with contextlib.suppress(RuntimeError):  # out of memory in an extra pass: the measurement is already complete
            report.tell(attention_kernel=attention_kernels(training))
            if request.profiles and device.type == "cuda":
                report.tell(operators=operator_seconds(training))


def _run(request: ProbeRequest, meter: Meter) -> ProbedTraining | None:
    """Runs the phases: load, first step, warm-up and steady steps, then one step with separate phases for its passes
    and the optimizer, then a sample and a checkpoint. For a request of the part ``encode``, only encoding; then there
    is no training to return."""
    if meter.device.type == "cuda":
        meter.report.tell(capped_bytes=limit(request, meter))
    if request.part == "encode":
        from trainers.measuring.encoding_phase import encode  # imports the recorder, which steps do not need

        encode(request.profile, request.job, request.strategy, meter)
        return None
    if request.plan.machine.world > 1 or request.strategy.sharding != "none":
        start(request.job, request.strategy, request.plan.machine, meter.device, request.scratch)
    training = ProbedTraining(request, meter)
    with meter.phase("load"):
        training.load()
    with meter.phase("first_step"):
        training.first_step()
    if meter.device.type == "cuda":
        limit(request, meter)  # again, because loaded kernels and NCCL have taken memory outside the allocator by now
    with meter.phase("step"):
        training.steady_steps()
    if meter.device.type == "cuda":
        meter.report.tell(allocated_after_step_bytes=torch.cuda.memory_allocated(meter.device))
    # The same calls as in step.accumulated_step, but as two phases.
    with meter.phase("train"):
        training.forward_backward()
    with meter.phase("optimizer"):
        training.optimizer_step()
    if request.strategy.validation_mode != "off":
        training.sample()
    if training.is_finite and request.saves:
        with meter.phase("save"):
            training.save()
    return training


def limit(request: ProbeRequest, meter: Meter) -> int | None:
    """If this card has more memory than the plan's, caps this process's memory at that of the plan's card. Returns the
    capacity in bytes, or None without a cap.

    torch's limit is for its allocator only, so the context and everything else on the device outside the allocator is
    subtracted. Without NVML, the catalogue's context size of this card is used.
    """
    properties = torch.cuda.get_device_properties(meter.device)
    capacity = request.capacity_bytes
    same_card = not request.plan.machine.reserve and _is_card(request.plan.machine.gpu, properties.name)
    if capacity is None or same_card or capacity >= properties.total_memory:
        return None
    meter.synchronise()
    outside = _outside(meter, properties.name)
    fraction = max(0, capacity - outside) / properties.total_memory
    torch.cuda.set_per_process_memory_fraction(fraction, meter.device)
    return capacity


def _is_card(planned: str, name: str) -> bool:
    """Whether torch's name of the card is that of the plan's card."""
    with contextlib.suppress(VplanError):
        return card_lookup.gpu(name).name == card_lookup.parse_gpus(planned)[1].name
    return False


def _outside(meter: Meter, name: str) -> int:
    """Device bytes that came into use since the measurement began and that torch's allocator does not hold: this
    process's context and libraries."""
    if meter.watch is not None:
        meter.watch.take_peak()
        device_bytes = meter.watch.take_peak()
        if device_bytes is not None:
            return max(0, device_bytes - torch.cuda.memory_reserved(meter.device))
    with contextlib.suppress(VplanError):
        return card_lookup.gpu(name).context_bytes
    return 0


REQUESTED = re.compile(r"allocate ([\d.]+) (bytes|[KMGT]iB)")
"""In torch's messages: "Tried to allocate 2.00 GiB", "you tried to allocate 9 bytes"."""

WORDS = 1000
"""Characters of an error's message that are kept."""


def _shortage(error: BaseException, device: torch.device) -> dict[str, Any]:
    """The message and request of an out-of-memory error, and on a GPU the allocator's summary."""
    message = " ".join(str(error).split())
    facts: dict[str, Any] = {"message": message[:WORDS], "requested_bytes": requested_bytes(message)}
    if device.type == "cuda":
        facts["allocator"] = torch.cuda.memory_summary(device, abbreviated=True)
    return facts


def requested_bytes(message: str) -> int | None:
    """The size of the failed allocation in bytes, which torch rounds to a hundredth of its unit; None if the message
    does not have it."""
    match = REQUESTED.search(message)
    if match is None:
        return None
    unit: int = 1024 ** "bKMGT".index(match[2][0])
    return round(float(match[1]) * unit)


def find_device(name: str) -> torch.device:
    """The device to measure on, without initialising it. Raises a VplanError if there is no GPU."""
    if name == "cpu":
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if not torch.cuda.is_available():
        fix = (
            "use a machine with one; `vplan estimate` needs none, and `--device cpu` steps tiny models without counters"
        )
        raise VplanError(f"a probe needs a GPU, but torch {torch.__version__} finds none on this machine", fix)
    if local >= torch.cuda.device_count():
        fault = f"the plan is for GPU {local + 1} of this machine, but torch sees {torch.cuda.device_count()}"
        raise VplanError(fault, "plan for fewer GPUs, or check CUDA_VISIBLE_DEVICES")
    return torch.device("cuda", local)


def _uuid(device: torch.device) -> str:
    """The card's UUID, which names it for both NVML and torch: NVML numbers cards by bus, torch within
    CUDA_VISIBLE_DEVICES."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _tell_device(meter: Meter) -> None:
    """Reports the device's facts, and the memory in use when there is only the CUDA context."""
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


def _sampled(watch: DeviceMemory | None) -> dict[str, Any]:
    """The sampling rate of the device's memory, and the counters that could not be read."""
    return {"device_hertz": watch.hertz, "missing": watch.missing} if watch else {}


def attention_kernels(training: ProbedTraining) -> str:
    """The attention kernels that really run, as ``cudnn+efficient``, from one more forward pass after all
    measurements."""
    request = training.request
    batch = training.family.batch(request.grids[0], training.meter.device, training.dtype)
    kernels = Kernels()
    with kernels:
        step.forward(training.trainee, training.family, batch, request.strategy)
    return kernels.names


def _write_history(request: ProbeRequest, meter: Meter) -> None:
    """Writes the allocator's events on this device, and the index of each phase's first event, as JSON. Raises a
    VplanError if the file cannot be written."""
    if request.history is None or not checkpoint.is_first():  # there is one file, with the first rank's events
        return
    events = torch.cuda.memory._snapshot()["device_traces"][meter.device.index]
    times = [event.get("time_us", 0) for event in events]
    lines: dict[str, int] = {}
    plan = request.plan
    rows = [
        [event["action"], event.get("addr", 0), event["size"], event["stream"], _line(event, lines)] for event in events
    ]
    data = {
        "plan": {part: getattr(plan, part).to_json() for part in ("job", "strategy", "machine")},
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(meter.device),
        "expandable_segments": request.strategy.expandable_segments,
        "phases": [[name, sum(at < mark for at in times)] for name, mark in meter.marks],
        "columns": ["action", "addr", "size", "stream", "frame"],
        "events": rows,
        "frames": list(lines),
    }
    try:
        Path(request.history).write_text(json.dumps(data, separators=(",", ":")) + "\n")
    except OSError as error:
        raise VplanError(f"cannot write {request.history}: {error.strerror}", "name another file") from None


def _line(event: dict[str, Any], lines: dict[str, int]) -> int:
    """The number of an event's innermost Python line outside torch and the rehearsal's observer; adds it to ``lines``
    if it is new. -1 if there is no such line, as in backward, whose kernels are launched from C++."""
    for frame in event.get("frames", ()):
        folder, _, name = frame["filename"].replace("\\", "/").rpartition("/")
        if folder and "/torch/" not in f"{folder}/" and not folder.endswith("/trainers/observer"):
            return lines.setdefault(f"{name}:{frame['line']} {frame['name']}", len(lines))
    return -1
