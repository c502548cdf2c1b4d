"""One small file per model family: what a batch holds, what the model is called with, and the published loss."""

from __future__ import annotations

import importlib

from planner.catalog.profiles import ModelProfile
from planner.errors import VplanError
from trainers.families.common.base import Family

FAMILIES = (
    *("wan", "wan-vace", "wan-animate", "cogvideox", "ltx", "hunyuan-video", "flux", "sd3", "unet"),
    *("qwen-image", "flux2", "z-image", "krea2", "mochi", "easyanimate", "hunyuan-video-1.5", "ltx-2"),
)


def family(profile: ModelProfile) -> Family:
    """The family of a model; its module is named like it."""
    if profile.family not in FAMILIES:
        raise VplanError(f"family {profile.family!r} of {profile.name} is unknown", f"known: {', '.join(FAMILIES)}")
    module = importlib.import_module(f"trainers.families.{profile.family.replace('-', '_').replace('.', '_')}")
    made: Family = module.FAMILY(profile)
    return made
