"""Other trainers' words: how their commands and config files are read, and how ours are written for them.

A package a trainer. Its ``settings.DIALECT`` is the table of what its words and ours are to each other
(`planner.dialects.base.bindings`). How these trainers hold memory is in `planner.layout.trainer_terms`.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from planner.errors import VplanError, did_you_mean

if TYPE_CHECKING:
    from planner.dialects.base.bindings import Dialect, Given
    from planner.dialects.base.script import Script

TRAINERS = (
    "accelerate",
    "ai-toolkit",
    "diffsynth",
    "diffusers",
    "diffusers-pipeline",
    "diffusion-pipe",
    "easyanimate",
    "latentsync",
    "musubi-tuner",
    "sd-scripts",
    "videox-fun",
)
"""Trainers whose words we know."""


FORMER = ("diffsynth-2025",)
"""Trainers' former scripts, whose commands are still pasted; their terms are those of ``trainer@version``."""


UNREAD = {
    "simpletuner": "SimpleTuner",
    "--parallel_backend": "finetrainers",
    "OneTrainer": "OneTrainer",
    "--config-path": "OneTrainer",
    "axolotl": "axolotl",
}
"""Marks of trainers that people use and we do not read, so that the refusal can name them."""


@functools.cache
def spoken() -> dict[str, Dialect]:
    """The dialects that we read or write, by name."""
    spoken: tuple[Dialect, ...] = tuple(module(name).DIALECT for name in (*TRAINERS, *FORMER))
    return {dialect.name: dialect for dialect in spoken}


def dialect(name: str) -> Dialect:
    """The dialect of a trainer; a VplanError names those there are."""
    known = spoken()
    name = name if name in known else name.partition("@")[0]
    if name not in known:
        listed = "supported trainers: " + ", ".join(known)
        raise VplanError(f"trainer {name} is not supported", did_you_mean(name, known, listed))
    return known[name]


def recognise(script: Script) -> tuple[Dialect, Given]:
    """Whose script, config or Python file was given, and what it says; a VplanError names those we read."""
    import profiles
    from planner.dialects.base import flags

    readers = [dialect for dialect in spoken().values() if dialect.gather is not None]
    for reader in readers:
        assert reader.gather is not None
        given = reader.gather(script)
        if given is not None:
            return reader, given
    what = ", ".join(dict.fromkeys(program.script for program in script.programs)) or script.name
    said = " ".join([what, *(word for program in script.programs for word in program.arguments)])
    title = next((title for mark, title in UNREAD.items() if mark in said), "")
    for reader in readers:
        for program in script.programs:
            found = flags.find(reader.name, program.script) if reader.name in profiles.trainer_names() else None
            folder = program.script.rpartition("/")[0]
            if found is not None and program.script.endswith(found.path) and not (found.path == "train.py" and folder):
                fault = f"{found.path} of {reader.title} is not supported"
                raise VplanError(fault, f"supported scripts: {', '.join(reader.scripts)}")
    fault = (
        f"{what} belongs to {title}, which is not supported"
        if title
        else f"{what} does not belong to a supported trainer"
    )
    raise VplanError(fault, f"supported: {', '.join(reader.title for reader in readers)}")


def module(name: str) -> ModuleType:
    """A trainer's settings: its ``DIALECT``, and where it writes files what each of their lines carries."""
    return importlib.import_module(f"planner.dialects.{name.replace('-', '_')}.settings")
