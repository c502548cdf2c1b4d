"""Builds the diffusers pipeline of a family around the models that train, and the arguments of its call.

Moving its parts between devices is up to `trainers.sampling.validate`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor, nn

from planner.catalog.profiles import ModelProfile
from planner.catalog.shapes import sample_grid
from planner.errors import VplanError
from planner.spec.job import Job, Strategy, ValidationShape
from trainers.families.common.base import Family
from trainers.families.common.sampling import FamilyPipeline, flow_shift, shifted
from trainers.step import step

if TYPE_CHECKING:
    import numpy


@dataclass(frozen=True)
class SampleInputs:
    """The inputs of one sample. A field that is None is drawn at random, or left to the pipeline's default."""

    prompt: Mapping[str, Tensor] | None = None
    """cached tensors of the caption"""
    empty: Mapping[str, Tensor] | None = None
    """cached tensors of the empty caption"""
    frames: list[Image.Image] | None = None
    """the image that a sample begins with, or the control video"""
    embeds: Tensor | None = None
    """cached embedding of that image, for families that have one"""
    vae: Callable[[], nn.Module] | None = None
    """loads the VAE on the CPU; None: one with random weights"""
    scheduler: Mapping[str, Any] | None = None
    """the config of the model's scheduler"""
    steps: int | None = None
    """denoising steps"""
    guidance: float | None = None
    seed: int = 0


def shape_of(job: Job) -> ValidationShape:
    """The shape of validation samples: the job's `validation`, else the first of its training shapes."""
    shape = job.shapes[0]
    return job.validation or ValidationShape(frames=shape.frames, height=shape.height, width=shape.width)


def sampler_of(family: Family, profile: ModelProfile) -> FamilyPipeline:
    """How a family makes samples. Raises a VplanError if it cannot."""
    sampler = family.sampler()
    if sampler is None:
        fault = f"samples of {profile.name} need {family.sample_needs}"
        raise VplanError(fault, "leave out --validation-mode")
    return sampler


def scheduler(
    profile: ModelProfile, sampler: FamilyPipeline, shape: ValidationShape, config: Mapping[str, Any] | None
) -> Any:
    """The scheduler of the model's folder, else the family's default, with the published shift for the sample's size.
    Raises a VplanError if diffusers has no scheduler of that class."""
    import diffusers

    name = config["_class_name"] if config else sampler.scheduler
    kind: Any = getattr(diffusers, name, None) if isinstance(name, str) else None
    is_scheduler = inspect.isclass(kind) and issubclass(kind, diffusers.SchedulerMixin)
    if not is_scheduler:
        raise VplanError(f"scheduler/ is {name!r}, which diffusers does not have", "download the model again")
    settings = {key: value for key, value in config.items() if not key.startswith("_")} if config else sampler.settings
    shift = flow_shift(profile, shape.height, shape.width)
    return kind.from_config(shifted(settings, inspect.signature(kind).parameters, shift))


def guider(sampler: FamilyPipeline, job: Job, inputs: SampleInputs) -> dict[str, Any]:
    """The component ``guider`` for pipelines whose guidance is a component rather than an argument; else empty."""
    import diffusers

    if sampler.scale != "guider":
        return {}
    scale = {} if inputs.guidance is None else {"guidance_scale": inputs.guidance}
    return {"guider": diffusers.ClassifierFreeGuidance(**scale, enabled=job.guided)}


def pipeline(
    sampler: FamilyPipeline,
    models: Mapping[str, Any],
    device: torch.device,
    parts: Mapping[str, Any],
    embeds: Tensor | None,
) -> Any:
    """The family's pipeline with the live models, by component name, and a few other parts; all other components are
    None."""
    import diffusers

    kind = getattr(diffusers, sampler.pipeline)
    parameters = inspect.signature(kind.__init__).parameters
    required = [
        name for name, parameter in parameters.items() if parameter.default is parameter.empty and name != "self"
    ]
    parts["vae"].register_to_config(**{k: v for k, v in sampler.vae.items() if k not in parts["vae"].config})
    # Tensors that a pipeline creates must be on the device of the live models, not on that of its first component.
    attributes: dict[str, Any] = {"_execution_device": property(lambda _: device)}
    if embeds is not None:
        whole_batch = embeds[None].to(device)
        attributes["encode_image"] = lambda *_: whole_batch
    subclass = type(kind.__name__, (kind,), attributes)
    built = subclass(**{**dict.fromkeys(required), **models, **parts, **sampler.init})
    built.set_progress_bar_config(disable=True)
    return built


def arguments(
    family: Family, sampler: FamilyPipeline, job: Job, inputs: SampleInputs, shape: ValidationShape
) -> dict[str, Any]:
    """The arguments of the pipeline's call; may contain ones that the pipeline does not take (see `accepted`)."""
    assert inputs.prompt is not None
    prompt, empty = inputs.prompt, inputs.empty if inputs.empty is not None else inputs.prompt
    call: dict[str, Any] = {**sampler.call, "frame_rate": family.profile.inputs.get("frame_rate", 25)}
    call |= {"height": shape.height, "width": shape.width, sampler.frames: shape.frames, "output_type": "np"}
    for name, argument in sampler.prompt.items():
        call[argument] = _of_one_sample(sampler, name, prompt[name])
        if sampler.negative and job.guided:
            call[f"negative_{argument}"] = _of_one_sample(sampler, name, empty[name])
    if sampler.lengths:
        call[sampler.lengths] = _ends(prompt)
        if job.guided:
            call[f"negative_{sampler.lengths}"] = _ends(empty)
    if inputs.guidance is not None:
        call[sampler.scale] = inputs.guidance
    if sampler.negative and not job.guided:
        call[sampler.scale] = sampler.unguided
    if sampler.image or sampler.clip:
        blank = [Image.new("RGB", (shape.width, shape.height))] * (shape.frames if sampler.clip else 1)
        images = inputs.frames or blank
        call |= family.sampled_image(images if sampler.clip else images[0], shape.height, shape.width, shape.frames)
    if inputs.steps is not None:
        call["num_inference_steps"] = inputs.steps
    return {**call, "generator": torch.Generator().manual_seed(inputs.seed)}


def _ends(prompt: Mapping[str, Tensor]) -> Tensor:
    """The cumulative prompt lengths of a batch of one: [0, tokens]."""
    return torch.tensor([0, prompt["prompt"].shape[0]], dtype=torch.int32)


def keep_size(sampler: FamilyPipeline, built: Any, shape: ValidationShape) -> None:
    """Sets the sample's size on a pipeline that would choose a size of its own. An area is set slightly larger, because
    the pipeline rounds sides down to multiples."""
    if sampler.has_own_sizes:
        built.resolutions = [(shape.width, shape.height)]
    if sampler.has_own_area:
        built.default_sample_size = math.sqrt(shape.height * shape.width) * (1 + 1e-9) / built.vae_scale_factor


def _of_one_sample(sampler: FamilyPipeline, name: str, tensor: Tensor) -> Any:
    """A prompt's tensor in the form that the pipeline takes for one sample."""
    if sampler.listed:
        return [tensor]
    return tensor[:, None] if name in sampler.layers else tensor[None]


def random_prompt(family: Family, job: Job, strategy: Strategy) -> dict[str, Tensor]:
    """The tensors of one sample of a random batch, including the prompt's."""
    batch = family.batch({**sample_grid(family.profile, job), "B": 1}, "cpu", step.compute_dtype(strategy))
    return {name: tensor if name in family.shared else tensor[0] for name, tensor in batch.items()}


def accepted(pipe: Any, call: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that the pipeline's call takes, with tensors moved to its device."""
    parameters = inspect.signature(type(pipe).__call__).parameters
    place = pipe._execution_device

    def moved(value: Any) -> Any:
        if isinstance(value, list):  # of prompts (Z-Image) or of images
            return [moved(item) for item in value]
        return value.to(place) if isinstance(value, Tensor) else value

    return {name: moved(value) for name, value in call.items() if name in parameters}


def numbers(output: Any) -> numpy.ndarray[Any, Any]:
    """The frames (F, H, W, 3) of a pipeline's output, without an alpha channel."""
    import numpy

    frames = next(getattr(output, name) for name in ("frames", "images", "image") if hasattr(output, name))
    stacked = numpy.asarray(frames)[..., :3]
    return stacked[0] if stacked.ndim == 5 else stacked
