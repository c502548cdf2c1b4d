"""A sample in the middle of training: the family's own diffusers pipeline around the model that trains.

There is no second copy of the model. The VAE waits in host RAM and comes to the device for its turn; with
``validation_mode offload`` the model leaves while it decodes, and with group offload it comes block by block or layer
by layer. Behind a sample the model is where and as it was, and training goes on to the same bits.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor, nn

from planner.errors import VplanError
from planner.facts import ModelProfile
from planner.job import Job, Strategy, ValidationShape
from planner.shapes import grid
from trainers import step
from trainers.families import family
from trainers.families.base import Family
from trainers.families.sampling import Sampler, flow_shift, shifted
from trainers.memory import swap
from trainers.noise import randomise

if TYPE_CHECKING:
    import numpy

Phase = Callable[[str], contextlib.AbstractContextManager[None]]
"""Around ``denoise`` and around ``decode``."""


@dataclass(frozen=True)
class Asked:
    """What one sample is made of and how. What is left out is random, or the pipeline's own."""

    prompt: Mapping[str, Tensor] | None = None
    """tensors that caching left of the caption"""
    empty: Mapping[str, Tensor] | None = None
    """the same of the empty caption"""
    frames: list[Image.Image] | None = None
    """the image that a sample begins with, or the clip that steers it"""
    embeds: Tensor | None = None
    """tensor that caching left of that image, where the family has one"""
    vae: Callable[[], nn.Module] | None = None
    """loads the VAE on the CPU"""
    scheduler: Mapping[str, Any] | None = None
    """the config of the model's scheduler"""
    steps: int | None = None
    """denoising steps"""
    guidance: float | None = None
    seed: int = 0


def sample(
    model: nn.Module,
    profile: ModelProfile,
    job: Job,
    strategy: Strategy,
    device: torch.device,
    asked: Asked | None = None,
    phase: Phase = contextlib.nullcontext,
) -> numpy.ndarray[Any, Any]:
    """One sample of the job's validation shape, as numbers in 0..1: (F, H, W, 3), one frame of an image.

    ``sample(model, profile, job, strategy, device, Asked(steps=2), meter.phase)`` needs neither data nor weights: the
    prompt is random and so is the VAE. Gradients must be freed before. Raises a VplanError where the family has no
    pipeline, and whatever the pipeline raises, out of memory too; the model is put back in any case.
    """
    asked = asked or Asked()
    kind, shape = family(profile).for_job(job), shape_of(job)
    sampler = sampler_of(kind, profile)
    live = _Live(model, strategy, device)
    vae = asked.vae() if asked.vae else random_vae(profile, strategy)
    leaves = strategy.validation_mode == "offload" and strategy.group_offload == "none"
    away = _Away(model, profile, strategy, device) if leaves else None
    settings = scheduler(profile, sampler, shape, asked.scheduler)
    with _set_aside(model, strategy, device), _Turns(live, with_settings(vae, strategy), phase, away):
        prompt = asked.prompt if asked.prompt is not None else _random_prompt(kind, job, strategy)
        embeds = asked.embeds if asked.embeds is not None or not sampler.embeds else prompt[sampler.embeds]
        whole = _pipeline(sampler, live, {"vae": vae, "scheduler": settings, **_guider(sampler, job, asked)}, embeds)
        said = _arguments(kind, sampler, job, replace(asked, prompt=prompt), shape)
        return _numbers(whole(**_accepted(whole, said)))[: shape.frames]


def shape_of(job: Job) -> ValidationShape:
    """The shape of the sample that validation makes: the job's own where it says nothing else."""
    own = job.shapes[0]
    return job.validation or ValidationShape(frames=own.frames, height=own.height, width=own.width)


def sampler_of(kind: Family, profile: ModelProfile) -> Sampler:
    """How a family samples; a VplanError where it does not."""
    sampler = kind.sampler()
    if sampler is None:
        fault = f"samples of {profile.name} need what a folder of clips does not have"
        raise VplanError(fault, "leave out --validation-mode")
    return sampler


def random_vae(profile: ModelProfile, strategy: Strategy) -> nn.Module:
    """The published VAE at its true size with random weights, on the CPU."""
    import diffusers
    from accelerate import init_empty_weights

    with init_empty_weights():
        vae: nn.Module = getattr(diffusers, profile.vae.class_name).from_config(profile.vae.config)
    step.cast_weights(vae, step.DTYPES[strategy.vae_dtype])
    step.materialise(vae, "cpu", randomise)
    return vae.requires_grad_(False).eval()


def with_settings(vae: nn.Module, strategy: Strategy) -> nn.Module:
    """A VAE that works in tiles and slices as the strategy says."""
    if strategy.vae_tiling:
        vae.enable_tiling()  # type: ignore[operator]
    if strategy.vae_slicing:
        vae.enable_slicing()  # type: ignore[operator]
    return vae


def scheduler(profile: ModelProfile, sampler: Sampler, shape: ValidationShape, config: Mapping[str, Any] | None) -> Any:
    """The scheduler that the model's folder describes, else the family's, with the published shift for the size."""
    import diffusers

    name = config["_class_name"] if config else sampler.scheduler
    kind = getattr(diffusers, name, None) if isinstance(name, str) else None
    if not (inspect.isclass(kind) and issubclass(kind, diffusers.SchedulerMixin)):
        raise VplanError(f"scheduler/ is {name!r}, which diffusers does not have", "fetch the model again")
    own = {key: value for key, value in config.items() if not key.startswith("_")} if config else sampler.settings
    shift = flow_shift(profile, shape.height, shape.width)
    return kind.from_config(shifted(own, inspect.signature(kind).parameters, shift))


class _Live:
    """The model that trains, as a pipeline holds and calls it: under autocast, and telling when it is called."""

    def __init__(self, model: nn.Module, strategy: Strategy, device: torch.device) -> None:
        self.model, self.strategy, self.device = model, strategy, device
        self.dtype = step.compute_dtype(strategy)
        self.before: Callable[[], None] = lambda: None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.before()
        with step.autocast(self.strategy, self.device):
            return self.model(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


class _Turns(contextlib.ExitStack):
    """Who is on the device: the model while it denoises, the VAE while it encodes an image or decodes."""

    def __init__(self, live: _Live, vae: nn.Module, phase: Phase, away: _Away | None) -> None:
        super().__init__()
        self.device, self.vae, self.phase, self.away = live.device, vae, phase, away
        self._is_here, self._running = False, ""
        live.before = self.denoise
        for name, then in (("encode", self.bring), ("decode", self.decode)):
            setattr(vae, name, functools.partial(self._called, getattr(vae, name), then))
        # Where diffusers' pipelines put what the VAE is given (utils/torch_utils.py, get_module_execution_device).
        vae._hf_hook = _Where(live.device)  # type: ignore[assignment]

    def _called(
        self, method: Callable[..., Any], then: Callable[[], None], given: Tensor, *rest: Any, **more: Any
    ) -> Any:
        then()
        return method(given.to(self.device, self.vae.dtype), *rest, **more)

    def denoise(self) -> None:
        """Before each call of the model."""
        if self._is_here:
            self.vae.to("cpu")
            self._is_here = False
            _empty_cache(self.device)
        self._begin("denoise")

    def decode(self) -> None:
        """Before each call of the VAE's decoder; of one image, or of all frames."""
        if self._running == "decode":
            return
        self._begin("decode")
        if self.away is not None:
            self.away.leave()
        _empty_cache(self.device)
        self.bring()

    def bring(self) -> None:
        """The VAE comes to the device."""
        if not self._is_here:
            self.vae.to(self.device)
            self._is_here = True

    def _begin(self, name: str) -> None:
        if self._running != name:
            self.close()
            self.enter_context(self.phase(name))
            self._running = name

    def __exit__(self, *error: Any) -> bool | None:
        traceback.clear_frames(error[2])  # what ran out of memory still holds what it had
        ended = super().__exit__(*error)
        self.vae.to("cpu")
        if self.away is not None:
            self.away.come_back()
        return ended


class _Where:
    """A module's place, as accelerate's hooks tell it."""

    def __init__(self, device: torch.device) -> None:
        self.execution_device = device


class _Away:
    """Sends a model's weights to host RAM and brings them back. Gone are those that lie on the device as a whole."""

    def __init__(self, model: nn.Module, profile: ModelProfile, strategy: Strategy, device: torch.device) -> None:
        waiting = swap.on_host(swap.swapped_blocks(model, profile, strategy))
        self.device = device
        self.weights = [each for name, each in model.named_parameters() if name not in waiting]

    def leave(self) -> None:
        """Frees the device."""
        for weight in self.weights:
            weight.data = weight.data.to("cpu")
        _empty_cache(self.device)

    def come_back(self) -> None:
        """Puts all that is away onto the device again."""
        for weight in self.weights:
            weight.data = weight.data.to(self.device)


@contextlib.contextmanager
def _set_aside(model: nn.Module, strategy: Strategy, device: torch.device) -> Iterator[None]:
    """A model as sampling needs it: in eval mode, and in host RAM with group offload; as it was behind that."""
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
    """Group offload as diffusers does it, taken off again."""
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


def _guider(sampler: Sampler, job: Job, asked: Asked) -> dict[str, Any]:
    """Guidance where it is a part of the pipeline."""
    import diffusers

    if sampler.scale != "guider":
        return {}
    scale = {} if asked.guidance is None else {"guidance_scale": asked.guidance}
    return {"guider": diffusers.ClassifierFreeGuidance(**scale, enabled=job.guided)}


def _pipeline(sampler: Sampler, live: _Live, parts: dict[str, Any], embeds: Tensor | None) -> Any:
    """The family's pipeline of the live model and some parts, and nothing else."""
    import diffusers

    kind = getattr(diffusers, sampler.pipeline)
    parameters = inspect.signature(kind.__init__).parameters
    needed = [name for name, each in parameters.items() if each.default is each.empty and name != "self"]
    model = {"unet" if "unet" in parameters else "transformer": live}
    parts["vae"].register_to_config(**{k: v for k, v in sampler.vae.items() if k not in parts["vae"].config})
    # All that a pipeline makes itself is to lie where the live model is, not where its first part waits.
    own: dict[str, Any] = {"_execution_device": property(lambda _: live.device)}
    if embeds is not None:
        whole_batch = embeds[None].to(live.device)
        own["encode_image"] = lambda *_: whole_batch
    here = type(kind.__name__, (kind,), own)
    whole = here(**dict.fromkeys(needed) | model | parts | dict(sampler.init))
    whole.set_progress_bar_config(disable=True)
    return whole


def _arguments(kind: Family, sampler: Sampler, job: Job, asked: Asked, shape: ValidationShape) -> dict[str, Any]:
    """What the pipeline is called with; more than it may take."""
    assert asked.prompt is not None
    prompt, empty = asked.prompt, asked.empty if asked.empty is not None else asked.prompt
    said: dict[str, Any] = {**sampler.call, "frame_rate": kind.profile.inputs.get("frame_rate", 25)}
    said |= {"height": shape.height, "width": shape.width, "num_frames": shape.frames, "output_type": "np"}
    for name, argument in sampler.prompt.items():
        said[argument] = [prompt[name]] if sampler.listed else prompt[name][None]
        if sampler.negative and job.guided:
            said[f"negative_{argument}"] = [empty[name]] if sampler.listed else empty[name][None]
    if asked.guidance is not None:
        said[sampler.scale] = asked.guidance
    if sampler.negative and not job.guided:
        said[sampler.scale] = sampler.unguided
    if sampler.image or sampler.clip:
        blank = [Image.new("RGB", (shape.width, shape.height))] * (shape.frames if sampler.clip else 1)
        given = asked.frames or blank
        said |= kind.sampled_image(given if sampler.clip else given[0], shape.height, shape.width, shape.frames)
    if asked.steps is not None:
        said["num_inference_steps"] = asked.steps
    return {**said, "generator": torch.Generator().manual_seed(asked.seed)}


def _random_prompt(kind: Family, job: Job, strategy: Strategy) -> dict[str, Tensor]:
    """A random batch's tensors of one sample, the prompt's among them."""
    batch = kind.batch({**grid(kind.profile, job), "B": 1}, "cpu", step.compute_dtype(strategy))
    return {name: tensor if name in kind.shared else tensor[0] for name, tensor in batch.items()}


def _accepted(whole: Any, said: Mapping[str, Any]) -> dict[str, Any]:
    """Those arguments that a pipeline has, its tensors where it works."""
    known = inspect.signature(type(whole).__call__).parameters
    place = whole._execution_device

    def there(value: Any) -> Any:
        if isinstance(value, list):  # of prompts (Z-Image), or of images
            return [there(each) for each in value]
        return value.to(place) if isinstance(value, Tensor) else value

    return {name: there(value) for name, value in said.items() if name in known}


def _numbers(made: Any) -> numpy.ndarray[Any, Any]:
    """(F, H, W, 3) of what a pipeline answers."""
    import numpy

    frames = made.frames if hasattr(made, "frames") else made.images
    found = numpy.asarray(frames)
    return found[0] if found.ndim == 5 else found
