"""One small file per model family: what a batch holds, what the model is called with, and the published loss."""

from __future__ import annotations

import importlib
import pkgutil

from planner.catalog.profiles import ModelProfile
from planner.errors import VplanError
from trainers.families.common.base import Family


def files() -> tuple[str, ...]:
    """The files of this folder that train models, by name, in alphabetical order."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg))


def file_of(profile: ModelProfile) -> str:
    """The file that trains a model: the one its profile names, else the one named like its family."""
    return profile.traits.trained_by or profile.family.replace("-", "_").replace(".", "_")


def family(profile: ModelProfile) -> Family:
    """The family that trains a model: the `FAMILY` of its file, made for its profile. Raises a VplanError when there is
    no such file."""
    name = file_of(profile)
    if name not in files():
        raise VplanError(f"family {profile.family!r} of {profile.name} is unknown", f"known: {', '.join(files())}")
    of_profile: type[Family] = importlib.import_module(f"{__name__}.{name}").FAMILY
    return of_profile(profile)
