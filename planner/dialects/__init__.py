"""Other trainers: how each holds memory where it differs from ours. Reading and writing their commands comes here too.

A dialect's memory terms are functions on a Run, applied after our own transformations when the plan names that trainer.
"""

from __future__ import annotations

import importlib

from planner.run import Term

TRAINERS = (
    "diffsynth",
    "diffusers",
    "diffusion-pipe",
    "easyanimate",
    "latentsync",
    "musubi-tuner",
    "sd-scripts",
    "simpletuner",
)
"""Trainers with terms of their own; every other name is priced like ours."""


def terms(trainer: str) -> tuple[Term, ...]:
    """The memory terms of a trainer, as it is or, named ``trainer@version``, as it was.

    A dialect's ``OLDER`` holds the further terms of the versions that measurements are of.
    """
    name, _, version = trainer.partition("@")
    if name not in TRAINERS:
        return ()
    dialect = importlib.import_module(f"planner.dialects.{name.replace('-', '_')}")
    found: tuple[Term, ...] = dialect.TERMS
    older: dict[str, tuple[Term, ...]] = getattr(dialect, "OLDER", {})
    return found + older.get(version, ())
