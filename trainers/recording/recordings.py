"""Records a model's step, sampling and optimizer with fake tensors: no GPU, no weights, no data.

`record_step`, `record_sample` and `record_optimizer` build the model with the code that trains it (`trainers.step`),
run it under a `Recorder`, and return a RawRecording, which `trainers.recording.compress` turns into a Tape. `Dispatch`
says whose operators the fake tensors run: CUDA's, those of an older torch, or MPS's.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from bitsandbytes import functional
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import (
    _disable_current_modes,
)
from torch.utils._pytree import tree_leaves

from planner.catalog.profiles import ModelProfile
from planner.garbage_collection import without_garbage_collection
from planner.spec.job import Job, Strategy
from planner.tape.variants.variant import SampleVariant, StepVariant
from trainers.families import family
from trainers.memory import quantise
from trainers.recording import cuda_ops, mps_ops
from trainers.recording.block_places import Place, find_runs, place_of_name
from trainers.recording.hooks import watch_blocks, watch_casts, watch_gradients
from trainers.recording.recorder import RawRecording, Recorder
from trainers.recording.trainer_code import TrainerCode
from trainers.step import placement, step
from trainers.step.optimizers import SteppedInBackward, make_optimizer


class Dispatch(NamedTuple):
    """Properties of torch and the card on which it depends which operators a call dispatches to."""

    older_torch: bool = False
    """autocast as it was before `planner.tape.variants.torch_and_card.RMS_NORM_IN_FP32`"""
    cudnn: bool = False
    """the card uses cuDNN's attention where the kernel differs by card (`trainers.recording.cuda_ops.CudaAttention`)"""
    mps: bool = False
    """the card is Apple's (`trainers.recording.mps_ops`)"""

    @classmethod
    def of(cls, variant: StepVariant | SampleVariant) -> Dispatch:
        """The dispatch of a tape's variant."""
        return cls(variant.older, variant.cudnn, isinstance(variant, StepVariant) and variant.mps)

    def semantics(self) -> contextlib.AbstractContextManager[object]:
        """A context in which fake CPU tensors behave like the device's tensors."""
        if self.mps:
            return mps_ops.mps_semantics()
        return cuda_ops.cuda_semantics(rms_norm_in_fp32=not self.older_torch, cudnn=self.cudnn)


USUAL = Dispatch()


def record_step(
    profile: ModelProfile,
    job: Job,
    strategy: Strategy,
    grid: Mapping[str, int],
    config: dict[str, Any] | None = None,
    dispatch: Dispatch = USUAL,
    code: TrainerCode | None = None,
    version: str = "",
) -> RawRecording:
    """Records loading (piece ``load``) and one forward and backward (``step``) at the shape of ``grid``.

    ``config`` replaces the published architecture, e.g. by one with fewer blocks. ``code``: another trainer's model and
    step to record instead of ours; ``version``: a variant of that code.
    """
    build = step.build_model if code is None else functools.partial(code.build_model, version=version)
    with _recording(profile, job, strategy, grid, config, dispatch, build) as (recorder, trainee, places):
        watch_blocks(trainee.model, recorder, places)
        watch_gradients(trainee.trainable, recorder, places)
        watch_casts(trainee.model, recorder, places)
        before = recorder.weights()
        buffers = list(trainee.model.buffers())  # keeps them alive if the step replaces one
        kind = family(profile)
        recorder.follow(kind)
        recorder.piece("step")
        recorder.begin("forward")
        dtype = step.compute_dtype(strategy)
        batch = kind.batch(grid, "cpu", dtype) if code is None else code.batch(profile, grid, dtype)
        for name, tensor in batch.items():
            recorder.label(tensor, "batch", name)
        if code is None:
            loss = step.forward(trainee, kind, batch, strategy)
        else:
            loss = code.loss(trainee.model, batch, strategy)
        recorder.label(loss, "batch", "loss")
        recorder.begin("backward")
        loss.backward()
        assert recorder.weights() == before, "a step must leave the weights stored as they were"
        recorder.piece("end")
        del buffers
    if code is not None:
        for allocation in recorder.recording.allocations:
            allocation.name = code.published_name(allocation.name)
    return recorder.recording


def record_sample(
    profile: ModelProfile,
    job: Job,
    strategy: Strategy,
    grid: Mapping[str, int],
    config: dict[str, Any] | None = None,
    dispatch: Dispatch = USUAL,
) -> RawRecording:
    """Records loading and one forward without gradients (``denoise``), as sampling calls it at every noise level."""
    with _recording(profile, job, strategy, grid, config, dispatch) as (recorder, trainee, places):
        watch_blocks(trainee.model, recorder, places)
        kind = family(profile)
        recorder.follow(kind)
        trainee.model.eval()
        recorder.piece("denoise")
        recorder.begin("forward")
        batch = kind.batch(grid, "cpu", step.compute_dtype(strategy))
        for name, tensor in batch.items():
            recorder.label(tensor, "batch", name)
        out = step.sample_forward(trainee, kind, batch, strategy)
        recorder.place = None
        for index, tensor in enumerate(tree_leaves(out)):
            recorder.label(tensor, "batch", f"prediction {index}" if index else "prediction")
        recorder.piece("end")
        return recorder.recording


def record_optimizer(
    profile: ModelProfile, job: Job, strategy: Strategy, grid: Mapping[str, int], config: dict[str, Any] | None = None
) -> RawRecording:
    """Records the first optimizer step (``optimizer_first``: it creates the states) and a later one (``optimizer``).

    The step depends only on the parameters and their gradients, so gradients are simply allocated, for all parameters
    except those that a backward never reaches, which the optimizer skips.
    """
    kind = family(profile)
    with _recording(profile, job, strategy, grid, config) as (recorder, trainee, places):
        with _disable_current_modes():  # bitsandbytes fills its quantisation tables with real values
            trainee.optimizer = make_optimizer(trainee.trainable, strategy)
        recorder.begin("optimizer")
        for piece in ("optimizer_first", "optimizer"):
            recorder.piece("gradients")
            for name, parameter in trainee.trainable.items():
                if kind.without_gradient(name, len(places)):
                    continue
                parameter.grad = torch.empty_like(parameter)
                recorder.label(parameter.grad, "gradient", name, place_of_name(name, places))
            recorder.piece(piece)
            if isinstance(trainee.optimizer, SteppedInBackward):
                for parameter in reversed(trainee.trainable.values()):  # the order of backward
                    trainee.optimizer.step_parameter(parameter)
            else:
                trainee.engine.step(trainee)
            _label_states(trainee, recorder, places, strategy)
        recorder.piece("end")
        return recorder.recording


@contextlib.contextmanager
def _recording(
    profile: ModelProfile,
    job: Job,
    strategy: Strategy,
    grid: Mapping[str, int],
    config: dict[str, Any] | None,
    dispatch: Dispatch = USUAL,
    build: Callable[..., nn.Module] = step.build_model,
) -> Iterator[tuple[Recorder, step.Trainee, dict[str, Place]]]:
    """A context with a loaded model of fake tensors and an active recorder."""
    recorder = Recorder(mps_ops.workspaces if dispatch.mps else cuda_ops.workspaces)
    model = build(profile, job.model_copy(update={"lora_rank": grid["R"]}), strategy, config)
    if strategy.weights(job.method) == "nf4":  # a table of values that all layers share, computed on first use
        functional.name2qmap.setdefault("dynamic", functional.create_dynamic_map())
    fake = FakeTensorMode(allow_non_fake_inputs=True)  # buffers, tables and noise schedules are real
    gc.collect(1)
    # Frees must come from reference counts, not from a collection that runs at a random moment.
    with without_garbage_collection(), dispatch.semantics(), fake:
        lists = [stack.list for stack in profile.stacks]
        partial = strategy.checkpointed_blocks if strategy.gradient_checkpointing == "partial" else None
        recorder.recording.runs, places = find_runs(model, lists, partial)
        with recorder:
            recorder.piece("load")
            load(model, recorder, places)
            yield recorder, step.Trainee(model, step.trainable_parameters(model)), places


def load(model: nn.Module, recorder: Recorder, places: dict[str, Place]) -> None:
    """Loads the model's weights and buffers, and labels their allocations."""

    def allocated(name: str, weight: Tensor) -> None:
        recorder.place = place_of_name(name, places)
        recorder.label(weight, "weight", "", recorder.place)  # named below, as quantising may replace it

    placement.materialise(model, "cpu", allocated)
    for name, tensor in named_tensors(model):
        recorder.label(tensor, "weight", name, place_of_name(name, places))
    recording = recorder.recording
    numbers = [event if event >= 0 else ~event for event in recording.events]
    freed = {~event for event in recording.events if event < 0}
    stay = [recording.allocations[number] for number in numbers if number not in freed]
    assert all(allocation.name for allocation in stay), "everything that stays loaded must be a weight"
    recording.places[:] = [recording.allocations[number].place for number in numbers]


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(full name, tensor) of all plain tensors that hold a model's parameters and buffers."""
    for name, parameter in model.named_parameters():
        yield from quantise.stored_tensors(name, parameter)
    yield from model.named_buffers()


QUANTISED_PER_BYTE = 64
"""bitsandbytes keeps one fp32 number, 4 bytes, for every 256 numbers of an 8-bit state, rounded up (functional.py):
one byte for 64 numbers."""


def _label_states(trainee: step.Trainee, recorder: Recorder, places: dict[str, Place], strategy: Strategy) -> None:
    """Labels optimizer states. torch's step counters are in host memory unless the step is fused.

    Other scalar states count as host memory too (Adafactor's RMS, which is made anew in every step): on the GPU they
    would take 512 bytes for each parameter.
    """
    assert trainee.optimizer is not None
    for name, parameter in trainee.trainable.items():
        for key, value in trainee.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                host = value.ndim == 0 and strategy.optimizer_step != "fused"
                recorder.label(value, "host" if host else "optimizer", f"{name}:{key}", place_of_name(name, places))
                if key.startswith("absmax") and "lora_" in name and parameter.numel() % QUANTISED_PER_BYTE == 0:
                    recorder.rounds_up(value, parameter.numel() // QUANTISED_PER_BYTE, value.itemsize)
