"""Makes a sample in the middle of training: the family's diffusers pipeline around the model that trains.

There is no second copy of the model. The VAE is kept in host RAM and moved to the device when it is needed. With
``validation_mode offload`` the model is moved off the device while the VAE decodes; with group offload it is loaded
block by block or layer by layer. Of two experts, the one that the noise level belongs to is switched to, as in
training. After a sample the model is where and as it was (except which expert is active), and training continues
bit-identically.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from planner.catalog.profiles import ModelProfile
from planner.spec.job import Job, Strategy
from trainers.families import family
from trainers.memory import swap
from trainers.sampling import pipelines
from trainers.sampling.pipelines import SampleInputs
from trainers.step import experts, placement, step
from trainers.step.random_weights import randomise

if TYPE_CHECKING:
    import numpy

Phase = Callable[[str], contextlib.AbstractContextManager[object]]
"""Returns a context for a part of sampling: ``denoise`` or ``decode``."""


@dataclass(frozen=True)
class Split:
    """For a model that is sharded over ranks: all ranks denoise together, and the first one decodes."""

    decodes: bool
    """whether this is the first rank"""
    release: Callable[[], None]
    """frees gathered weights; all ranks call it together, after their last call of the model"""
    begin: Callable[[], None] = lambda: None
    """called before the first call of the model; raises if another rank cannot continue"""


def sample(
    model: nn.Module,
    profile: ModelProfile,
    job: Job,
    strategy: Strategy,
    device: torch.device,
    inputs: SampleInputs | None = None,
    phase: Phase = contextlib.nullcontext,
    split: Split | None = None,
) -> numpy.ndarray[Any, Any]:
    """One sample of the job's validation shape: (F, H, W, 3) in 0..1, with one frame for an image.

    ``sample(model, profile, job, strategy, device, SampleInputs(steps=2), meter.phase)`` needs neither data nor
    weights: the prompt is random and so is the VAE. Gradients must be freed before. Raises a VplanError if the family
    has no pipeline, and any error of the pipeline, including out of memory; the model is restored in any case. With
    ``split`` only the first rank gets the sample, the others an empty array.
    """
    inputs = inputs or SampleInputs()
    kind, shape = family(profile).for_job(job), pipelines.shape_of(job)
    sampler = pipelines.sampler_of(kind, profile)
    models = _models(model, profile, strategy, device)
    vae = inputs.vae() if inputs.vae else random_vae(profile, strategy)
    leaves = strategy.validation_mode == "offload" and strategy.group_offload == "none"
    away = _WeightsAway(model, profile, strategy, device) if leaves else None
    parts = {"vae": vae, "scheduler": pipelines.scheduler(profile, sampler, shape, inputs.scheduler)}
    parts |= pipelines.guider(sampler, job, inputs)
    parts |= {"boundary_ratio": profile.training.boundary} if len(models) > 1 else {}
    with _set_aside(model, strategy, device), _Turns(models, with_settings(vae, strategy), phase, away, split):
        prompt = inputs.prompt if inputs.prompt is not None else pipelines.random_prompt(kind, job, strategy)
        embeds = inputs.embeds if inputs.embeds is not None or not sampler.embeds else prompt[sampler.embeds]
        pipeline = pipelines.pipeline(sampler, models, device, parts, embeds)
        pipelines.keep_size(sampler, pipeline, shape)
        call = pipelines.arguments(kind, sampler, job, replace(inputs, prompt=prompt), shape)
        if split and not split.decodes:
            pipeline(**pipelines.accepted(pipeline, {**call, "output_type": "latent"}))
            split.release()
            return _nothing()
        return pipelines.numbers(pipeline(**pipelines.accepted(pipeline, call)))[: shape.frames]


def random_vae(profile: ModelProfile, strategy: Strategy) -> nn.Module:
    """The published VAE at its true size with random weights, on the CPU."""
    import diffusers
    from accelerate import init_empty_weights

    with init_empty_weights():
        vae: nn.Module = getattr(diffusers, profile.vae.class_name).from_config(profile.vae.config)
    step.cast_weights(vae, step.DTYPES[strategy.vae_dtype])
    placement.materialise(vae, "cpu", randomise)
    return vae.requires_grad_(False).eval()


def with_settings(vae: nn.Module, strategy: Strategy) -> nn.Module:
    """Switches the VAE's tiling and slicing on as the strategy says; returns the VAE."""
    if strategy.vae_tiling:
        vae.enable_tiling()  # type: ignore[operator]  # diffusers' own method
    if strategy.vae_slicing:
        vae.enable_slicing()  # type: ignore[operator]  # likewise
    return vae


def _nothing_to_do() -> None:
    """The default for calls that need no preparation."""


class _Live:
    """Wraps a model that trains for use in a pipeline: runs it under autocast, and calls ``before`` and ``turn`` before
    each call."""

    def __init__(
        self, model: nn.Module, strategy: Strategy, device: torch.device, turn: Callable[[], None] = _nothing_to_do
    ) -> None:
        self.model, self.strategy, self.device, self.turn = model, strategy, device, turn
        self.dtype = step.compute_dtype(strategy)
        self.before: Callable[[], None] = _nothing_to_do

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        self.before()
        self.turn()
        with step.autocast(self.strategy, self.device):
            return self.model(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def _models(model: nn.Module, profile: ModelProfile, strategy: Strategy, device: torch.device) -> dict[str, _Live]:
    """The models that train, by component name. Calling one of two experts switches to it first."""
    if not isinstance(model, experts.Experts):
        return {profile.traits.part: _Live(model, strategy, device)}
    return {
        part: _Live(model.part(which), strategy, device, functools.partial(model.turn, which))
        for which, part in experts.PARTS.items()
    }


class _Turns(contextlib.ExitStack):
    """Moves models to and from the device: the model is there while it denoises, the VAE while it encodes an image or
    decodes. Also enters the phase of each part."""

    def __init__(
        self, models: dict[str, _Live], vae: nn.Module, phase: Phase, away: _WeightsAway | None, split: Split | None
    ) -> None:
        super().__init__()
        self.vae, self.phase, self.away, self.split = vae, phase, away, split
        self._is_here, self._running = False, ""
        for live in models.values():
            live.before, self.device = self.denoise, live.device
        for name, prepare in (("encode", self.bring), ("decode", self.decode)):
            setattr(vae, name, functools.partial(self._called, getattr(vae, name), prepare))
        # diffusers' pipelines move the VAE's inputs to the device of this hook (utils/torch_utils.py,
        # get_module_execution_device).
        vae._hf_hook = _Where(self.device)  # type: ignore[assignment]  # neither tensor nor module

    def _called(
        self, method: Callable[..., Any], prepare: Callable[[], None], tensor: Tensor, *rest: Any, **more: Any
    ) -> Any:
        prepare()
        dtype: torch.dtype = self.vae.dtype  # type: ignore[assignment]  # diffusers' own property
        return method(tensor.to(self.device, dtype), *rest, **more)

    def denoise(self) -> None:
        """Called before each call of the model."""
        if self._is_here:
            self.vae.to("cpu")
            self._is_here = False
            _empty_cache(self.device)
        if self.split and self._running != "denoise":
            self.split.begin()
        self._begin("denoise")

    def decode(self) -> None:
        """Called before each call of the VAE's decoder, which pipelines may make once or frame by frame."""
        if self._running == "decode":
            return
        self._begin("decode")
        if self.away is not None:
            self.away.leave()
        if self.split is not None:
            self.split.release()
        _empty_cache(self.device)
        self.bring()

    def bring(self) -> None:
        """Moves the VAE to the device."""
        if not self._is_here:
            self.vae.to(self.device)
            self._is_here = True

    def _begin(self, name: str) -> None:
        if self._running != name:
            self.close()
            self.enter_context(self.phase(name))
            self._running = name

    def __exit__(self, *error: Any) -> bool | None:
        traceback.clear_frames(error[2])  # after an error, the frames of its traceback still hold tensors
        ended = super().__exit__(*error)
        self.vae.to("cpu")
        if self.away is not None:
            self.away.come_back()
        return ended


class _Where:
    """Tells diffusers a module's device in the form of accelerate's hooks."""

    def __init__(self, device: torch.device) -> None:
        self.execution_device = device


class _WeightsAway:
    """Moves a model's weights to host RAM and back: those that are on the device as a whole, and of two experts those
    of the one that ran last."""

    def __init__(self, model: nn.Module, profile: ModelProfile, strategy: Strategy, device: torch.device) -> None:
        self.model, self.profile, self.strategy, self.device = model, profile, strategy, device
        self.moved: list[nn.Parameter] = []

    def leave(self) -> None:
        """Moves the weights to host RAM."""
        model = self.model.part(self.model.running) if isinstance(self.model, experts.Experts) else self.model
        waiting = swap.on_host(swap.swapped_blocks(model, self.profile, self.strategy))
        self.moved = [weight for name, weight in model.named_parameters() if name not in waiting]
        for weight in self.moved:
            weight.data = weight.data.to("cpu")
        _empty_cache(self.device)

    def come_back(self) -> None:
        """Moves them back to the device."""
        for weight in self.moved:
            weight.data = weight.data.to(self.device)


@contextlib.contextmanager
def _set_aside(model: nn.Module, strategy: Strategy, device: torch.device) -> Iterator[None]:
    """A context in which a model is ready for sampling: in eval mode, and with group offload if the strategy has it.
    Restores it afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    _empty_cache(device)
    try:
        if strategy.group_offload != "none":
            with _in_groups(model, strategy, device):
                yield
        else:
            yield
    finally:
        for module in training:
            module.training = True
        gc.collect()
        _empty_cache(device)


@contextlib.contextmanager
def _in_groups(model: nn.Module, strategy: Strategy, device: torch.device) -> Iterator[None]:
    """A context with diffusers' group offload applied to a model; removes it afterwards."""
    from diffusers.hooks import HookRegistry, apply_group_offloading
    from diffusers.hooks.group_offloading import (
        _GROUP_OFFLOADING,
        _LAYER_EXECUTION_TRACKER,
        _LAZY_PREFETCH_GROUP_OFFLOADING,
    )

    tensors = [*model.parameters(), *model.buffers()]
    stream = strategy.group_offload_stream and device.type == "cuda"
    try:
        apply_group_offloading(
            model,
            onload_device=device,
            offload_device=torch.device("cpu"),
            offload_type=f"{strategy.group_offload}_level",
            num_blocks_per_group=1 if strategy.group_offload == "block" else None,
            use_stream=stream,
        )
        yield
    finally:
        registry = HookRegistry.check_if_exists_or_initialize(model)
        for name in (_GROUP_OFFLOADING, _LAYER_EXECUTION_TRACKER, _LAZY_PREFETCH_GROUP_OFFLOADING):
            registry.remove_hook(name, recurse=True)
        for tensor in tensors:
            tensor.data = tensor.data.to(device)


def _empty_cache(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _nothing() -> numpy.ndarray[Any, Any]:
    import numpy

    return numpy.empty((0, 0, 0, 3))
