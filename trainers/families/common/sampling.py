"""Describes how a family makes samples: its diffusers pipeline, and the pipeline's arguments besides the shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.catalog.profiles import ModelProfile

SIZE_720P, SIZE_480P = 720 * 1280, 480 * 832
"""Pixels of the two sizes for which shifts are published."""

SHIFTS = ("flow_shift", "shift")
"""Names of the shift in diffusers' schedulers: the first in UniPC and DPM-Solver, the second in Euler."""

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class FamilyPipeline:
    """How a family's diffusers pipeline is built and called. Guidance and denoising steps are the pipeline's defaults
    unless the user gives them."""

    pipeline: str
    prompt: Mapping[str, str]
    """cached tensor of a caption -> argument of the pipeline"""
    scale: str = "guidance_scale"
    """argument with the guidance scale"""
    frames: str = "num_frames"
    """argument with the frames of a sample"""
    unguided: float = 1.0
    """the scale that turns guidance off"""
    negative: bool = True
    """whether guidance uses the empty caption; otherwise the scale is an input of the model"""
    scheduler: str = "FlowMatchEulerDiscreteScheduler"
    """the scheduler if the model's folder has no scheduler/"""
    settings: Settings = field(default_factory=dict)
    """its settings"""
    init: Settings = field(default_factory=dict)
    """further arguments of the pipeline's constructor"""
    call: Settings = field(default_factory=dict)
    """further arguments of its call"""
    layers: frozenset[str] = frozenset()
    """prompt tensors with an axis of layers, which the pipeline takes in front of the batch axis"""
    has_own_area: bool = False
    """whether its samples always have the area of its `default_sample_size`, whatever size is asked for"""
    has_own_sizes: bool = False
    """whether its samples have the nearest size in its list `resolutions`, (width, height)"""
    lengths: str = ""
    """argument with the cumulative lengths of a batch's prompts, beginning with 0"""
    listed: bool = False
    """whether it takes prompts as a list with one tensor per caption"""
    image: bool = False
    """whether samples begin with an image"""
    clip: bool = False
    """whether samples take a control video of their length, in place of the image"""
    embeds: str = ""
    """cached tensor that replaces the output of the pipeline's image encoder"""
    vae: Settings = field(default_factory=dict)
    """keys that the pipeline reads from the VAE's config, for configs without them"""


def flow_shift(profile: ModelProfile, height: int, width: int) -> float | None:
    """The published shift of the noise levels in sampling at a size in pixels; None to use the scheduler's own.

    If there is a separate shift for 720p (Wan 2.1: 3.0 at 480p, 5.0 at 720p, docs of diffusers' Wan pipelines), that of
    the nearer size is used.
    """
    large = profile.training.shift_720p
    if large is not None and height * width > (SIZE_480P * SIZE_720P) ** 0.5:
        return large
    return profile.training.shift


def shifted(settings: Settings, parameters: Mapping[str, Any], shift: float | None) -> dict[str, Any]:
    """A scheduler's settings with this shift, under its class's name for it; settings with dynamic shifting are
    returned unchanged."""
    name = next((name for name in SHIFTS if name in parameters), None)
    if shift is None or name is None or settings.get("use_dynamic_shifting"):
        return dict(settings)
    return {**settings, name: shift}
