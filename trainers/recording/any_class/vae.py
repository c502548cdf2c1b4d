"""Finds a model's VAE and how much it shrinks a clip: from the folder, else from the pipeline's source."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

import profiles
from planner.catalog import lookup
from planner.catalog.diffusers_folder import CONFIG, Source, architecture
from planner.catalog.own_inputs import OwnInputs
from planner.catalog.profiles import Vae
from planner.errors import VplanError, quoted
from trainers.recording import own
from trainers.recording.any_class.pipeline_source import PipelineFacts

SPATIAL = ("vae_scale_factor_spatial", "vae_scale_factor", "vae_spatial_scale_factor", "vae_spatial_compression_ratio")
TEMPORAL = ("vae_scale_factor_temporal", "vae_temporal_scale_factor", "vae_temporal_compression_ratio")
"""Names of the factors in pipelines."""
ENCODERS = ("vae", "vqvae", "movq", "vqgan")
"""Names of the part that makes latents, in pipelines."""


class LatentSpace(NamedTuple):
    """How much a VAE shrinks a clip, the VAE's part of a profile, and notes on where both come from."""

    spatial: int
    temporal: int
    vae: dict[str, Any]
    assumed: tuple[str, ...]
    channels: int | None = None
    """of its latents; None if the VAE is not known"""


class KnownShrinkage(NamedTuple):
    """By how much a VAE shrinks a clip, and who says so, before it is tried."""

    spatial: int | None
    """pixels to a latent, along each side; None if nothing says it"""
    temporal: int
    """frames to a latent frame"""
    origin: str
    """in words"""


class Latents(NamedTuple):
    """What is known of a model's latents without knowing the VAE."""

    channels: int
    is_video: bool
    is_sequence: bool
    """in one dimension: sound, or latents packed into tokens"""


def latent_space(
    source: Source, pipeline: PipelineFacts | None, inputs: OwnInputs, latents: Latents, from_user: OwnInputs
) -> LatentSpace:
    """The latent space of a model. ``from_user``: the user's own input, which alone overrides the folder's VAE; it is
    part of ``inputs``. Raises a VplanError if nothing tells how much the VAE shrinks a clip."""
    if source.vae is not None:
        return _of_folder(source.vae, from_user)
    class_name = (pipeline.parts.get("vae", "") if pipeline else "").split(" | ")[0]
    spatial, temporal, origin = _known_shrinkage(pipeline, inputs, latents, class_name)
    if spatial is None:
        fault = f"nothing says by how much the VAE of {source.class_name} shrinks a clip"
        raise VplanError(fault, "name the pipeline's folder, or write vae = { spatial = 8, temporal = 4 } for --inputs")
    in_time = f", {temporal} in time" if latents.is_video else ""
    words = [f"the VAE shrinks {spatial} times{in_time}, {origin}"]
    channels = latents.channels
    for vae in _bundled():
        alike = (vae.class_name, vae.spatial, vae.temporal) == (class_name, spatial, temporal)
        if alike and vae.latent_channels in (channels, channels // 4):
            words.append(f"the VAE is that of other models with {class_name}")
            return LatentSpace(spatial, temporal, vae.to_json(), tuple(words), vae.latent_channels)
    words.append("the VAE itself is not known and not counted: name the pipeline's folder")
    return LatentSpace(spatial, temporal, _unknown(class_name or "unknown", spatial, temporal, channels), tuple(words))


def _known_shrinkage(
    pipeline: PipelineFacts | None, inputs: OwnInputs, latents: Latents, class_name: str
) -> KnownShrinkage:
    """The shrinkage that the user, the pipeline or the class of the VAE says, the first of them that does."""
    if inputs.vae:
        return KnownShrinkage(inputs.vae.spatial, inputs.vae.temporal, "as you said")
    constants = pipeline.constants if pipeline else {}
    spatial = next((constants[key] for key in SPATIAL if key in constants), None)
    temporal = next((constants[key] for key in TEMPORAL if key in constants), 1)
    if pipeline and spatial is not None:
        return KnownShrinkage(spatial, temporal, f"as {pipeline.name} has it")
    of_class = {(vae.spatial, vae.temporal) for vae in _bundled() if vae.class_name == class_name}
    if len(of_class) == 1:
        return KnownShrinkage(*of_class.pop(), f"as every {class_name} does that is known")
    if pipeline and not any(name.startswith(ENCODERS) for name in pipeline.parts):
        return KnownShrinkage(1, 1, f"as {pipeline.name} has none")
    if latents.is_sequence:
        return KnownShrinkage(1, 1, "as its samples are sequences: a size counts latents, one row after the other")
    return KnownShrinkage(None, temporal, "")


def _bundled() -> Iterable[Vae]:
    return (lookup.model(name).vae for name in profiles.model_names())


def _unknown(class_name: str, spatial: int, temporal: int, channels: int) -> dict[str, Any]:
    sizes = {"temporal": temporal, "spatial": spatial, "latent_channels": channels}
    return {"class": class_name, **sizes, "parameters": 1, "dtype": "bf16", "config": {}}


def _of_folder(config: dict[str, Any], inputs: OwnInputs) -> LatentSpace:
    """The latent space of the folder's VAE, built on the meta device and tried on a clip."""
    import diffusers
    from diffusers import ModelMixin

    class_name, where = config.get("_class_name"), f"vae/{CONFIG}"
    named = getattr(diffusers, class_name, None) if class_name in dir(diffusers.models) else None
    known = isinstance(named, type) and issubclass(named, ModelMixin)
    if not known or not named.__module__.startswith("diffusers.models.autoencoders"):
        raise VplanError(f"{where}: class {quoted(class_name)} is no VAE of diffusers", "correct the file")
    model_class: Any = named
    settings = own.complete(str(class_name), architecture(config), where)
    parameters = own.count(lambda: model_class.from_config(settings), where, str(class_name))
    like = next((vae for vae in _bundled() if vae.class_name == class_name), None)
    if inputs.vae:
        spatial, temporal, channels = inputs.vae.spatial, inputs.vae.temporal, settings.get("latent_channels", 16)
    else:
        spatial, temporal, channels = _measured_shrinkage(model_class, settings, where)
    vae = {
        **_unknown(str(class_name), spatial, temporal, channels),
        "parameters": parameters,
        "config": settings,
        "dtype": like.dtype if like else "bf16",
    }
    words = f"the VAE is the folder's: it shrinks {spatial} times, {temporal} in time"
    return LatentSpace(spatial, temporal, vae, (words,), channels)


def _measured_shrinkage(model_class: Any, settings: dict[str, Any], where: str) -> tuple[int, int, int]:
    """(pixels per latent, frames per latent frame, latent channels), by encoding a clip on the meta device."""
    frames, side = 65, 512
    with torch.device("meta"), torch.no_grad():
        vae = model_class.from_config(settings)
        for size in ((1, 3, frames, side, side), (1, 3, side, side)):
            try:
                out = vae.encode(torch.empty(size), return_dict=False)[0]
            except own.REFUSALS:
                continue
            latents = out.mode() if hasattr(out, "mode") else out
            in_time = -(-(frames - 1) // (latents.shape[2] - 1)) if len(size) == 5 and latents.shape[2] > 1 else 1
            return side // latents.shape[-1], in_time, latents.shape[1]
    raise VplanError(f"{where}: the VAE cannot be tried", "write vae = { spatial = 8, temporal = 4 } for --inputs")
