"""One small module per model family: its batches, the model's inputs, and the published loss."""

from __future__ import annotations

import importlib
import pkgutil

from planner.catalog.profiles import ModelProfile
from planner.errors import VplanError
from trainers.families.common.base import Family

ROOMS = ("", "image", "video")
"""Folders with families: this one ("") and its subfolders."""


def _places() -> dict[str, str]:
    """Name of each family's file -> its module."""
    found: dict[str, str] = {}
    for room in ROOMS:
        paths = [f"{path}/{room}" if room else path for path in __path__]
        package = f"{__name__}.{room}".rstrip(".")
        found |= {file.name: f"{package}.{file.name}" for file in pkgutil.iter_modules(paths) if not file.ispkg}
    return found


def files() -> tuple[str, ...]:
    """The names of the families' files, in alphabetical order."""
    return tuple(sorted(_places()))


def file_of(profile: ModelProfile) -> str:
    """The name of the file that trains a model: the one in its profile, else the one named like its family."""
    return profile.traits.trained_by or profile.family.replace("-", "_").replace(".", "_")


def family(profile: ModelProfile) -> Family:
    """The family of a model: the class `FAMILY` of its file, instantiated for its profile. Raises a VplanError if there
    is no such file."""
    name, places = file_of(profile), _places()
    if name not in places:
        known = ", ".join(sorted(places))
        raise VplanError(f"family {profile.family!r} of {profile.name} is unknown", f"known: {known}")
    of_profile: type[Family] = importlib.import_module(places[name]).FAMILY
    return of_profile(profile)
