"""How a family makes a sample: the diffusers pipeline of its own, and what that is told beside the shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.catalog.profiles import ModelProfile

SIZE_720P, SIZE_480P = 720 * 1280, 480 * 832
"""Pixels of the two sizes that published shifts are given for."""

SHIFTS = ("flow_shift", "shift")
"""What diffusers' schedulers call it: UniPC and DPM-Solver the first, Euler the second."""

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class FamilyPipeline:
    """How a family's diffusers pipeline is built and called. Guidance and denoising steps are the pipeline's defaults
    unless the user gives them."""

    pipeline: str
    prompt: Mapping[str, str]
    """tensor that caching left of a caption -> argument of the pipeline"""
    scale: str = "guidance_scale"
    """argument with the guidance scale"""
    frames: str = "num_frames"
    """argument with the frames of a sample"""
    unguided: float = 1.0
    """the scale that means no guidance"""
    negative: bool = True
    """whether guidance needs the empty caption too; else the scale is an input of the model"""
    scheduler: str = "FlowMatchEulerDiscreteScheduler"
    """what samples where the model's folder has no scheduler/"""
    settings: Settings = field(default_factory=dict)
    """its settings"""
    init: Settings = field(default_factory=dict)
    """further parts of the pipeline"""
    call: Settings = field(default_factory=dict)
    """further arguments of its call"""
    layers: frozenset[str] = frozenset()
    """those of a prompt's tensors that have an axis of layers, which the pipeline takes in front of the samples'"""
    has_own_area: bool = False
    """whether it makes samples of one area whatever size is asked for, that of its `default_sample_size`"""
    has_own_sizes: bool = False
    """whether it makes samples of the nearest size in its list `resolutions`, (width, height)"""
    lengths: str = ""
    """argument with where each prompt of a batch ends, counted from 0, beside a first 0"""
    listed: bool = False
    """whether it takes a list of one tensor for each caption"""
    image: bool = False
    """whether it begins with an image"""
    clip: bool = False
    """whether a video of its length steers it, in the image's place"""
    embeds: str = ""
    """tensor that caching left of the image, which the pipeline's own encoder would make"""
    vae: Settings = field(default_factory=dict)
    """what the pipeline asks the VAE's config for, where that does not say"""


def flow_shift(profile: ModelProfile, height: int, width: int) -> float | None:
    """The published shift of sampling's noise levels at a size; None where the scheduler's own stands.

    Where 720p has its own (Wan 2.1: 3.0 at 480p, 5.0 at 720p, docs of diffusers' Wan pipelines), the nearer size says.
    """
    large = profile.training.shift_720p
    if large is not None and height * width > (SIZE_480P * SIZE_720P) ** 0.5:
        return large
    return profile.training.shift


def shifted(settings: Settings, parameters: Mapping[str, Any], shift: float | None) -> dict[str, Any]:
    """A scheduler's settings with this shift, under the name that its class has for it; settings of a dynamic shift are
    returned unchanged."""
    name = next((name for name in SHIFTS if name in parameters), None)
    if shift is None or name is None or settings.get("use_dynamic_shifting"):
        return dict(settings)
    return {**settings, name: shift}
